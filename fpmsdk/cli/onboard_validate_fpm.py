"""`fpmsdk onboard validate-fpm`: does the collected table answer every query of a recorded trace?"""

from pathlib import Path
from typing import Annotated

import typer

from fpmsdk.cli.console import progress


def validate_fpm(
    config: Annotated[Path, typer.Option("-c", "--config", help="The reviewed request of the collection.")],
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Its plan directory.")],
    trace: Annotated[Path, typer.Option("--trace", help="Weka plays, .json or .jsonl; all of them are replayed.")],
    validation_output_dir: Annotated[
        Path, typer.Option("--validation-output-dir", help="Where configuration, replay and coverage go.")
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier validation there.")] = False,
) -> None:
    """Replay a local trace on a finished collection and keep which queries its table answers.

    Plays are served one after the other from a cold cache, without speculation. Exits with 0 when every request
    completed and every query was answered, with 4 when the table lacks a point, else with 1. Accuracy is not assessed.
    """
    from fpmsdk.onboard.validate_fpm import REPORT_FILE
    from fpmsdk.onboard.validate_fpm import validate_fpm as validate

    with progress("replaying the trace"):
        report, exit_code = validate(config, output_dir, trace, validation_output_dir, overwrite=overwrite)
    for issue in report["issues"]:
        typer.echo(f"  {issue}", err=True)
    typer.echo(
        f"FPM replay coverage: {report['status']}; accuracy: not assessed. Saved {validation_output_dir / REPORT_FILE}"
    )
    raise typer.Exit(exit_code)
