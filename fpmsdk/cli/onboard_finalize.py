"""`fpmsdk onboard finalize`: the memory of a finished collection, resolved into a fresh plan directory."""

from pathlib import Path
from typing import Annotated

import typer

from fpmsdk.cli.console import progress, show


def finalize(
    config: Annotated[Path, typer.Option("-c", "--config", help="The reviewed request of the collection.")],
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Its plan directory, which is only read.")],
    resolved_output_dir: Annotated[
        Path, typer.Option("--resolved-output-dir", help="New directory for the resolved plan and a copy of the table.")
    ],
    memory_config: Annotated[
        Path | None,
        typer.Option("--memory-config", help="Accepted revision of the request that lowers the cache capacity."),
    ] = None,
    collection_report: Annotated[
        Path | None,
        typer.Option("--collection-report", help="collection-validation.json of this collection, assessed anew."),
    ] = None,
) -> None:
    """Verify a finished collection and resolve its memory; review the profile before accepting it.

    Prints a JSON object: resolved_directory, request, review_status, collection_quality, accuracy.
    """
    from fpmsdk.onboard.finalize import finalize as resolve
    from fpmsdk.onboard.request import load_request

    with progress("verifying the collection"):
        outcome = resolve(
            load_request(config),
            output_dir,
            resolved_output_dir,
            memory_config=memory_config,
            collection_report=collection_report,
        )
    show(outcome, True)
    typer.echo("Runtime memory resolved. Review the new profile before accepting it in the checkpoint.", err=True)
