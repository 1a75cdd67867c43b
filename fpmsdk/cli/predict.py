"""`fpmsdk predict`: what a deployment makes of a workload, from one YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

if TYPE_CHECKING:
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
) -> None:
    """Predict latencies and throughput of one deployment under one workload.

    Exits with 0 when a request completed; 1 when none did, or the replay failed; 2 when the input was rejected, before
    anything was written; 4 when a measured table lacks a point that the workload needs; 130 after Ctrl-C.
    """
    from fpmsdk.prediction.documents import SEARCH_SECTIONS, read_document
    from fpmsdk.prediction.preflight import checked_config
    from fpmsdk.prediction.run import predict as run

    document = read_document(config, set or (), forbidden=SEARCH_SECTIONS)
    report(
        run(checked_config(document), output_dir, capture_per_request=capture_per_request, overwrite=overwrite), format
    )


def report(result: Prediction, format: Literal["table", "json"]) -> NoReturn:
    """Print how a prediction ended, and exit with its code."""
    from fpmsdk.cli.console import print_result
    from fpmsdk.cli.predict_table import summary_json, summary_table, uncovered_text
    from fpmsdk.prediction.output import COVERAGE, REPORT
    from fpmsdk.prediction.run import UNCOVERED

    if result.report is not None:
        as_json = format == "json"
        print_result(
            summary_json(result.report) if as_json else summary_table(result.report, result.output_dir / REPORT)
        )
    elif result.exit_code == UNCOVERED and result.coverage is not None:
        typer.echo(f"error: {uncovered_text(result.coverage)}; details: {result.output_dir / COVERAGE}", err=True)
    else:
        typer.echo(f"error: {result.error}", err=True)
    raise typer.Exit(result.exit_code)
