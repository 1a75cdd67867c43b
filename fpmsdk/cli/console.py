"""What every subcommand shares on the terminal: results as JSON or tables, progress, errors, exit codes."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fpmsdk.errors import FpmSdkError, StartTimeoutError

if TYPE_CHECKING:
    from rich.table import Table

REJECTED_INPUT = 2
NEGATIVE_RESULT = 1
NOT_STARTED = 124  # as `timeout` reports a command that took too long
INTERRUPTED = 130  # as a shell reports a command that Ctrl-C ended

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a subcommand so that a deliberate error is one message and an exit code, never a traceback.

    Errors that blame the input (`ValueError`, unreadable files) exit with 2, those about the run with 1, and a run that
    did not begin in time with 124.
    """

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except BrokenPipeError:
            _forget_stdout()  # whoever read it, such as `head`, has enough
        except StartTimeoutError as fault:
            typer.echo(f"error: {fault}", err=True)
            raise typer.Exit(NOT_STARTED) from None
        except (FpmSdkError, OSError) as fault:
            typer.echo(f"error: {fault}", err=True)
            rejected = isinstance(fault, ValueError | OSError)
            raise typer.Exit(REJECTED_INPUT if rejected else NEGATIVE_RESULT) from None

    return run


def print_result(text: str) -> None:
    """Print on stdout; a reader that has left does not change how the command ends."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _forget_stdout()


def _forget_stdout() -> None:
    """Let the interpreter flush into nothing when it exits."""
    with contextlib.suppress(OSError, ValueError):  # no descriptor where stdout was replaced
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show(document: dict[str, Any], as_json: bool, *tables: Table | str) -> None:
    """Print the result on stdout: the document as JSON, or its tables and lines."""
    if as_json:
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
        return
    console: Any = None  # Rich loads with the first table
    for table in tables:
        if isinstance(table, str):
            typer.echo(table)
        else:
            if console is None:
                from rich.console import Console

                console = Console()
            console.print(table)


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr for work that turns out to take more than a second; none when stderr is not a terminal.

    Yields a function to call with the number of steps done since its last call; without `total` the bar only
    says that the work goes on.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    bar = Progress(console=console, transient=True)
    task = bar.add_task(description, total=total)
    start = threading.Timer(1.0, bar.start if console.is_terminal else lambda: None)
    start.start()
    try:
        yield lambda steps: bar.update(task, advance=steps)
    finally:
        start.cancel()
        start.join()
        if bar.live.is_started:
            bar.stop()


def number(value: float | None, digits: int = 2) -> str:
    """A figure for a table cell; a dash for an absent one, a power of ten for one that would not fit.

    >>> number(1234.5), number(None), number(-2.5e38)
    ('1,234.50', '-', '-2.5e+38')
    """
    if value is None:
        return "-"
    return f"{value:.1e}" if abs(value) >= 1e12 else f"{value:,.{digits}f}"
