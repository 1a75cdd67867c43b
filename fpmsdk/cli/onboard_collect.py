"""`fpmsdk onboard collect-fpm`: preview, readiness and execution of a collection.

Source: onboarding.md sections 1.2 and 5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fpmsdk.cli.console import INTERRUPTED, NEGATIVE_RESULT, show
from fpmsdk.cli.deployment_options import (
    BindOption,
    CacheOption,
    CpusOption,
    DynamoOption,
    ExecutorOption,
    ImageOption,
    MountOption,
    NamespaceOption,
    SecretOption,
    TransportOption,
    given_deployment,
)
from fpmsdk.cli.onboard_plan import DEFAULT_FOLDER, PlanFolderOption, RequestOption


def collect_fpm(
    config: RequestOption,
    output_dir: PlanFolderOption = DEFAULT_FOLDER,
    execute: Annotated[bool, typer.Option("--execute", help="Run; the plan must have been written.")] = False,
    check_readiness: Annotated[
        bool, typer.Option("--check-readiness", help="Report on saved evidence; runs and writes nothing.")
    ] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="A few points of every cell; nothing is published.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", help="Only so many cells; needs --smoke.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the campaign of the same plan.")] = False,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option("--checkpoint-dir", help="Folder of the checkpoint, inside the plan's fpm-checkpoint."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="MINUTES", help="Only the points that help most, in rounds, for so long."),
    ] = None,
    traffic: Annotated[
        Path | None,
        typer.Option("--traffic", help="YAML with the `traffic` of a prediction, for --budget."),
    ] = None,
    holdout_error: Annotated[
        float | None,
        typer.Option("--holdout-error", help="Mean relative error at which --budget ends early.", show_default="0.1"),
    ] = None,
    executor: ExecutorOption = None,
    image: ImageOption = None,
    container_mount: MountOption = None,
    cpus_per_task: CpusOption = None,
    cpu_bind: BindOption = None,
    namespace: NamespaceOption = None,
    model_cache: CacheOption = None,
    dynamo_version: DynamoOption = None,
    transport: TransportOption = None,
    image_pull_secret: SecretOption = None,
) -> None:
    """Show the collector's command; with --execute collect, with --check-readiness report what is collected.

    With --budget, the first round measures the envelope of the grid and a holdout; every further one adds the points at
    which the table is expected to be wrong most, weighted by the traffic.

    Exit codes: 0 shown, ready, collected and ready, or collected well enough; 1 ran or assessed and not so; 2 rejected;
    130 interrupted.
    """
    from fpmsdk.onboard.collect import CollectionCall, pending_version, preview, readiness, select_collection
    from fpmsdk.onboard.request import load_request

    call = CollectionCall(
        execute=execute,
        check_readiness=check_readiness,
        smoke=smoke,
        limit=limit,
        resume=resume,
        checkpoint_dir=checkpoint_dir,
        deployment=given_deployment(
            executor=executor,
            image=image,
            container_mount=container_mount,
            cpus_per_task=cpus_per_task,
            cpu_bind=cpu_bind,
            namespace=namespace,
            model_cache=model_cache,
            dynamo_version=dynamo_version,
            transport=transport,
            image_pull_secret=image_pull_secret,
        ),
    )
    asked = _asked_budget(call, budget, traffic, holdout_error)
    selected = select_collection(load_request(config), output_dir, call, notice=_notice)
    pending = pending_version(selected, execute=execute)
    if pending is not None:
        _end(pending, NEGATIVE_RESULT if check_readiness or execute else 0)
    elif check_readiness:
        report = readiness(selected, call)
        _end(report, 0 if report["ready_for_full_collection"] else NEGATIVE_RESULT)
    elif asked is not None:
        _on_budget(selected, call, asked)
    elif not execute:
        typer.echo(preview(selected, call, notice=_notice))
    else:
        _execute(selected, call)


def _asked_budget(call: Any, minutes: float | None, traffic: Path | None, holdout_error: float | None) -> Any:
    from fpmsdk.errors import OnboardError
    from fpmsdk.onboard.budget.run import Budget

    if minutes is None:
        if traffic is not None or holdout_error is not None:
            raise OnboardError("--traffic and --holdout-error belong to --budget MINUTES", "--budget")
        return None
    if not call.execute or call.smoke or call.check_readiness or call.checkpoint_dir is not None:
        raise OnboardError(
            "--budget: needs --execute, and none of --smoke, --check-readiness and --checkpoint-dir", "--budget"
        )
    given = {} if holdout_error is None else {"holdout_error": holdout_error}
    return Budget(minutes, traffic=traffic, **given)


def _on_budget(selected: Any, call: Any, asked: Any) -> None:
    from fpmsdk.onboard.budget.run import OUT_OF_TIME, collect_on_budget

    try:
        report = collect_on_budget(selected, call, asked, notice=_notice)
    except KeyboardInterrupt:
        _notice("interrupted; pass --resume to continue")
        raise typer.Exit(INTERRUPTED) from None
    _end(report, NEGATIVE_RESULT if report["status"] == OUT_OF_TIME else 0)


def _execute(selected: Any, call: Any) -> None:
    from fpmsdk.onboard.collect_execute import execute, exit_code

    try:
        report = execute(selected, call, notice=_notice)
    except KeyboardInterrupt:
        _notice("interrupted; pass --resume to continue")
        raise typer.Exit(INTERRUPTED) from None
    _end(report, exit_code(report))


def _end(document: dict[str, Any], code: int) -> None:
    show(document, True)
    raise typer.Exit(code)


def _notice(text: str) -> None:
    typer.echo(text, err=True)
