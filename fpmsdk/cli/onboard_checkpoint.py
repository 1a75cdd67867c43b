"""`fpmsdk onboard checkpoint` and `resume`: save what a session knows, and tell what it amounts to."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fpmsdk.cli.console import REJECTED_INPUT


def checkpoint(
    *,
    file: Annotated[Path, typer.Option(metavar="FILE", help="The session; keep it outside of output folders.")],
    update: Annotated[
        str | None, typer.Option(metavar="FILE|-", help="A JSON merge patch (RFC 7386); - reads it from stdin.")
    ] = None,
    expect_revision: Annotated[
        int | None, typer.Option(metavar="N", help="The revision that was read; needed to change an existing session.")
    ] = None,
    accept_profile: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Record that the user approved this configuration's exact draft; repeatable."),
    ] = None,
) -> None:
    """Save or look at one onboarding session, as one JSON object.

    Exits with 2 when the change is rejected, or when a file of the session is no longer what it was.
    """
    from fpmsdk.onboard.checkpoint import checkpoint_path
    from fpmsdk.onboard.checkpoint_save import save_checkpoint

    path = checkpoint_path(file)
    patch = None if update is None else _patch(update, path)
    state, saved = save_checkpoint(
        path, patch=patch, expected_revision=expect_revision, accept=tuple(accept_profile or ())
    )
    _report(state, path, saved=saved)


def resume(
    *, checkpoint: Annotated[Path, typer.Option(metavar="FILE", help="The session of `onboard checkpoint`.")]
) -> None:
    """Verify a session and tell what comes next, as one JSON object; nothing is written or executed.

    Exits with 2 when a file of the session is no longer what it was.
    """
    from fpmsdk.onboard.checkpoint import checkpoint_path, load_checkpoint

    path = checkpoint_path(checkpoint)
    _report(load_checkpoint(path), path, saved=False)


def _patch(update: str, path: Path) -> dict[str, Any]:
    from fpmsdk.documents.canonical import parse_document, read_document
    from fpmsdk.errors import OnboardError
    from fpmsdk.onboard.checkpoint import lock_path

    if update == "-":
        patch = parse_document(typer.get_binary_stream("stdin").read(), "--update")
    else:
        source = Path(update).expanduser().resolve()
        if source in (path, lock_path(path)):
            raise OnboardError(
                f"--update: {source} is the checkpoint or its lock; write the patch elsewhere", "--update"
            )
        patch = read_document(source)
    if not isinstance(patch, dict):
        raise OnboardError(f"--update: expected a JSON object, found {type(patch).__name__}", "--update")
    return patch


def _report(state: Any, path: Path, *, saved: bool) -> None:
    from fpmsdk.onboard.checkpoint_report import checkpoint_report

    report = {**checkpoint_report(state, path), "saved": saved}
    typer.echo(json.dumps(report, sort_keys=True, allow_nan=False))
    if report["integrity_issues"]:
        raise typer.Exit(REJECTED_INPUT)
