"""`fpmsdk quickstart`: a prediction from measured passes that are in the package, and the files to go on with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fpmsdk.cli.predict import FormatOption


def quickstart(
    folder: Annotated[Path, typer.Argument(help="Where the files go: a new or empty directory.")] = Path(
        "fpmsdk-quickstart"
    ),
    format: FormatOption = "table",
) -> None:
    """Predict a small deployment that was measured, offline, and leave its files to change.

    Writes predict.yaml and what it names, then does what `fpmsdk predict -c predict.yaml` does.
    """
    from fpmsdk.cli.predict import report
    from fpmsdk.errors import OnboardError
    from fpmsdk.prediction.run import predict
    from fpmsdk.sample.quickstart import write_quickstart

    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise OnboardError(f"{folder}: there is something already; name a new directory", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    config = write_quickstart(folder)
    typer.echo(f"wrote {config}; change it and run: fpmsdk predict -c {config} --output-dir NEW", err=True)
    report(predict(config, folder / "output"), format)
