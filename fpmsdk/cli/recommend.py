"""`fpmsdk recommend`: search the deployments that serve a workload best; `recommend merge` joins parts of a search."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fpmsdk.cli.console import INTERRUPTED, reports_errors
from fpmsdk.errors import OnboardError

if TYPE_CHECKING:
    from fpmsdk.recommendation import Recommendation

_OUTPUT = Path("./fpmsdk-output")

FormatOption = Annotated[
    Literal["table", "json"], typer.Option("--format", help="What is printed; files are always written.")
]
OutputOption = Annotated[Path, typer.Option("--output-dir", help="Where the results go.")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Remove the results of an earlier run there first; other files stay.")
]
EmitOption = Annotated[
    str | None,
    typer.Option("--emit", metavar="LIST", help="Also write launch files of each recommendation: vllm-cmd,k8s,slurm."),
]
ImageOption = Annotated[str | None, typer.Option("--image", help="Container image that the launch files name.")]

recommend = typer.Typer(name="recommend", add_completion=False)


def search(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("-c", "--config", help="The search, a YAML file.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=YAML", help="Change a field of it; may be repeated.")
    ] = None,
    output_dir: OutputOption = _OUTPUT,
    overwrite: OverwriteOption = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the sweep that was stopped there.")] = False,
    format: FormatOption = "table",
    stack: Annotated[str, typer.Option("--stack", help="Execution stack; engine is the only one.")] = "engine",
    executor: Annotated[
        Literal["threads", "processes"],
        typer.Option("--executor", help="Threads of this process, or processes that are killed when they are late."),
    ] = "threads",
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Candidates evaluated at once; all cores but one by default.")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option("--scheduler", metavar="ADDRESS", help="Evaluate on the Dask cluster at this address.")
    ] = None,
    shard: Annotated[
        str, typer.Option("--shard", metavar="I/N", help="Search part I of N; recommend merge joins them.")
    ] = "1/1",
    on_uncovered: Annotated[
        Literal["stop", "skip", "collect-plan"],
        typer.Option("--on-uncovered", help="What to do when a table lacks a point that a candidate needs."),
    ] = "skip",
    emit: EmitOption = None,
    image: ImageOption = None,
    progress: Annotated[
        Literal["auto", "live", "plain", "json", "none"],
        typer.Option("--progress", help="On stderr: a line on a terminal, plain lines elsewhere, or JSON events."),
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how large the search is and how long it takes; write nothing.")
    ] = False,
) -> None:
    """Search the deployments that serve a workload best.

    Exits with 0 when a deployment is feasible, with 1 when none is, with 2 when the input was rejected, with 3 when
    candidates were given up for lack of memory, with 124 when no worker was ready in time, and with 130 when it was
    interrupted: the same command with --resume goes on.
    """
    if context.invoked_subcommand is not None:
        return
    if config is None:
        raise OnboardError("-c/--config: missing; name the YAML file of the search", "--config")
    if stack != "engine":
        raise OnboardError(f"--stack: found {stack!r}, accepted is engine", "--stack")
    from fpmsdk.recommendation import Options, explain, planned
    from fpmsdk.recommendation.run import search as run

    options = Options(
        executor="dask" if scheduler is not None else executor,
        workers=workers,
        scheduler=scheduler,
        resume=resume,
        overwrite=overwrite,
        on_uncovered=on_uncovered,
        emit=_kinds(emit),
        image=image,
        progress=progress,
    )
    plan = planned(config, output_dir, options=options, shard=shard, overrides=tuple(overrides or ()))
    for note in plan.notes:
        typer.echo(f"note: {note}", err=True)
    if dry_run:
        from fpmsdk.cli.recommend_table import show_dry_run

        show_dry_run(explain(plan, options), as_json=format == "json")
        return
    try:
        found = run(plan, output_dir, options)
    except KeyboardInterrupt:
        typer.echo(
            f"interrupted; what was evaluated is in {output_dir}: the same command with --resume goes on", err=True
        )
        raise typer.Exit(INTERRUPTED) from None
    _show(found, format)


def merge(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Output directories of all parts.")],
    output_dir: OutputOption = _OUTPUT,
    overwrite: OverwriteOption = False,
    format: FormatOption = "table",
    emit: EmitOption = None,
    image: ImageOption = None,
) -> None:
    """Join the parts of a search (--shard) into the result of one.

    Exits as the search itself.
    """
    from fpmsdk.recommendation import Options
    from fpmsdk.recommendation import merge as run

    options = Options(overwrite=overwrite, emit=_kinds(emit), image=image)
    _show(run(folders, output_dir, options=options), format)


def _kinds(emit: str | None) -> tuple[str, ...]:
    if emit is None:
        return ()
    from fpmsdk.recommendation.emit import parse_kinds

    return parse_kinds(emit)


def _show(found: "Recommendation", format: str) -> None:
    from fpmsdk.cli.recommend_table import show_recommendation

    show_recommendation(found, as_json=format == "json")
    raise typer.Exit(found.exit_code)


recommend.callback(invoke_without_command=True)(reports_errors(search))
recommend.command("merge")(reports_errors(merge))
