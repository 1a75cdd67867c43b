"""`fpmsdk predict`: what a deployment makes of a workload, from one YAML file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from fpmsdk.prediction.config import PredictConfig
    from fpmsdk.prediction.run import Prediction

DEFAULT_OUTPUT = Path("fpmsdk-output")

ConfigOption = Annotated[Path, typer.Option("-c", "--config", help="The deployment and its workload, a YAML file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=YAML", help="Change a field, such as engine.context_length=4096; repeatable."),
]
OutputOption = Annotated[Path, typer.Option("--output-dir", help="Where the files go: a new or empty directory.")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Remove the files of an earlier run there first; others stay.")
]
FormatOption = Annotated[
    Literal["table", "json"], typer.Option("--format", help="What is printed; files are always written.")
]


def predict(
    config: ConfigOption,
    set: SetOption = None,
    output_dir: OutputOption = DEFAULT_OUTPUT,
    overwrite: OverwriteOption = False,
    format: FormatOption = "table",
    stack: Annotated[Literal["engine"], typer.Option("--stack", help="Execution stack.")] = "engine",
    capture_per_request: Annotated[
        bool, typer.Option("--capture-per-request", help="Keep a record for every request, also in requests.jsonl.")
    ] = False,
    on_uncovered: Annotated[
        Literal["stop", "collect-plan"],
        typer.Option("--on-uncovered", help="With collect-plan: list every missing point, and how to collect them."),
    ] = "stop",
    detail: Annotated[
        str | None,
        typer.Option("--detail", metavar="LIST", help="Add summary, memory, time, energy, source; or all."),
    ] = None,
    detail_top_n: Annotated[
        int,
        typer.Option("--detail-top-n", "--diagnostics-top-n", min=1, help="Operations of a phase that are printed."),
    ] = 12,
    diagnostics: Annotated[
        Literal["power"] | None, typer.Option("--diagnostics", help="Older spelling of --detail energy.")
    ] = None,
) -> None:
    """Predict latencies and throughput of one deployment under one workload.

    Exits with 0 when a request completed; 1 when none did, or the replay failed; 2 when the input was rejected, before
    anything was written; 3 when the memory of this machine does not suffice; 4 when a measured table lacks a point that
    the workload needs; 124 when it did not begin in time; 130 after Ctrl-C.
    """
    from fpmsdk.cli.console import INTERRUPTED
    from fpmsdk.prediction.documents import SEARCH_SECTIONS, read_document
    from fpmsdk.prediction.preflight import checked_config
    from fpmsdk.prediction.run import predict as run

    document = read_document(config, set or (), forbidden=SEARCH_SECTIONS)
    sections = [name.strip() for name in (detail or "").split(",") if name.strip()]
    sections += ["energy"] if diagnostics else []
    checked = checked_config(document)
    try:
        result = run(
            checked, output_dir, capture_per_request=capture_per_request, overwrite=overwrite, details=sections
        )
    except KeyboardInterrupt:
        typer.echo("interrupted; there is no report", err=True)
        raise typer.Exit(INTERRUPTED) from None
    for line in _limits_of_the_profile(checked) if result.report is not None else ():
        typer.echo(line, err=True)
    _plan(document.document, result, on_uncovered)
    report(result, format, detail_top_n)


def _plan(document: dict[str, Any], result: Prediction, on_uncovered: Literal["stop", "collect-plan"]) -> None:
    """Plan the collection of what a prediction misses; a plan of an earlier run goes in any case."""
    from fpmsdk.prediction.run import UNCOVERED
    from fpmsdk.recommendation.plan_files import PLAN, remove_collect_plan

    remove_collect_plan(result.output_dir)
    if on_uncovered == "collect-plan" and result.exit_code == UNCOVERED:
        from fpmsdk.recommendation.collect_plan import write_collect_plan
        from fpmsdk.recommendation.missing import missing_points

        plan = write_collect_plan(missing_points([("prediction", document)]), result.output_dir)
        points = sum(len(campaign["missing"]) for campaign in plan["campaigns"])
        typer.echo(f"note: {points} missing points, and how to collect them: {result.output_dir / PLAN}", err=True)


def _limits_of_the_profile(config: PredictConfig) -> Iterator[str]:
    """What the scheduler takes from the profile where the configuration is silent."""
    from fpmsdk.prediction.compile.launch import limits_of

    for role, worker in config.roles.items():
        scheduler = worker.scheduler
        if config.engine.fpm_profile is not None and None in (scheduler.max_batched_tokens, scheduler.max_sequences):
            tokens, sequences, _ = limits_of(config, role)
            yield f"{role}: limits of the profile: max_batched_tokens {tokens}, max_sequences {sequences}"


def report(result: Prediction, format: Literal["table", "json"], top_n: int = 12) -> NoReturn:
    """Print how a prediction ended, and exit with its code."""
    from fpmsdk.cli.console import print_result
    from fpmsdk.cli.predict_details import detail_lines
    from fpmsdk.cli.predict_table import summary_json, summary_table, uncovered_text
    from fpmsdk.prediction.output import COVERAGE, REPORT
    from fpmsdk.prediction.run import UNCOVERED

    if result.report is not None:
        if format == "json":
            print_result(summary_json(result.report))
        else:
            lines = list(detail_lines(result.report["details"], top_n)) if "details" in result.report else []
            print_result("\n".join([*lines, summary_table(result.report, result.output_dir / REPORT)]))
    elif result.exit_code == UNCOVERED and result.coverage is not None:
        typer.echo(f"error: {uncovered_text(result.coverage)}; details: {result.output_dir / COVERAGE}", err=True)
    else:
        typer.echo(f"error: {result.error}", err=True)
    raise typer.Exit(result.exit_code)
