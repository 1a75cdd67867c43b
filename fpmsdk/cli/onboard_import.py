"""`fpmsdk onboard import-observations`: drafts of a session from saved observations."""

from pathlib import Path
from typing import Annotated

import typer

from fpmsdk.cli.console import NEGATIVE_RESULT
from fpmsdk.documents.canonical import pretty_bytes

CheckpointOption = Annotated[Path, typer.Option(metavar="FILE", help="The session of `onboard checkpoint`.")]
ConfigurationOption = Annotated[
    list[str] | None, typer.Option(metavar="ID", help="A configuration of the session; repeatable. All by default.")
]


def import_observations(
    *,
    checkpoint: CheckpointOption,
    observations: Annotated[Path, typer.Option(metavar="INDEX", help="observations.json of a probe or a campaign.")],
    output_dir: Annotated[Path, typer.Option(metavar="DIR", help="A folder that does not exist yet.")],
    configuration: ConfigurationOption = None,
) -> None:
    """Validate saved observations into drafts of a session, as one JSON object. Accepts nothing, executes nothing.

    Exits with 1 when the evidence of a configuration does not hold; its draft is then unchanged.
    """
    from fpmsdk.onboard.checkpoint import checkpoint_path
    from fpmsdk.onboard.import_observations import import_observations

    result = import_observations(checkpoint_path(checkpoint), observations, output_dir, configuration)
    typer.echo(pretty_bytes(result).decode(), nl=False)
    if result["status"] != "complete":
        raise typer.Exit(NEGATIVE_RESULT)
