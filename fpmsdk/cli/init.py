"""`fpmsdk init`: commented examples to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fpmsdk.cli.console import reports_errors

init = typer.Typer(name="init", help="Write a commented example to start from.", no_args_is_help=True)


def predict(
    output: Annotated[Path, typer.Option("--output", help="The file to write.")] = Path("predict.yaml"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
) -> None:
    """Write a configuration for `fpmsdk predict`, with what each field means.

    It runs as it is, on two constants for the duration of a pass.
    """
    from importlib.resources import files

    from fpmsdk.errors import OnboardError
    from fpmsdk.files import whole_file

    if output.exists() and not overwrite:
        raise OnboardError(f"{output}: the file exists; pass --overwrite, or name another with --output", str(output))
    with whole_file(output) as file:
        file.write((files("fpmsdk.sample") / "predict.yaml").read_bytes())
    typer.echo(f"wrote {output}; run: fpmsdk predict -c {output}")


init.command("predict")(reports_errors(predict))
