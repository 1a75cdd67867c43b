"""The two sides of a setup: lines for whoever reads, and answers of whoever sits at a terminal.

A setup runs through the same functions with a terminal, with scripted answers, and without anybody to ask.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from fpmsdk.errors import OnboardError


class Cancelled(Exception):
    """The person at the terminal gave up; nothing was written. Exit code 130."""


class Talk:
    """Lines to standard output, and nobody to ask."""

    interactive = False

    def tell(self, line: str) -> None:
        """Show one or several lines."""
        print(line)

    def fields(self, title: str, values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
        """Show fields with their values and sources."""
        self.tell(f"{title}:")
        for name, value in values.items():
            self.tell(f"  {name}: {value} (source: {sources[name]})")

    def ask(self, question: str) -> str:
        """The answer to a question, without blanks around it.

        Raises: `NotInteractiveError` without anybody to ask; `Cancelled` at the end of a terminal's input.
        """
        raise NotInteractiveError(question)


class NotInteractiveError(OnboardError):
    """A question came up where nobody answers."""

    def __init__(self, question: str) -> None:
        super().__init__(f"needs an answer: {question}; use --interactive or supply the option")


class Silence(Talk):
    """Nothing is shown, and there is nobody to ask."""

    def tell(self, line: str) -> None:
        """Show nothing."""


class Terminal(Talk):
    """A person at a terminal.

    Raises
    ------
    OnboardError: standard input is no terminal.
    """

    interactive = True

    def __init__(self) -> None:
        if not sys.stdin.isatty():
            raise OnboardError(
                "--interactive needs a terminal; without one supply the options, see `fpmsdk onboard init --help`",
                "--interactive",
            )
        from rich.console import Console

        # What is shown are values, not markup.
        self._console = Console(markup=False, highlight=False, soft_wrap=True)

    def tell(self, line: str) -> None:
        """Show one or several lines."""
        self._console.print(line)

    def fields(self, title: str, values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
        """Show fields as a table."""
        from rich.table import Table

        table = Table("field", "value", "source", title=title, title_justify="left")
        for name, value in values.items():
            table.add_row(name, str(value), sources[name])
        self._console.print(table, soft_wrap=False)

    def ask(self, question: str) -> str:
        """The answer to a question."""
        try:
            return self._console.input(f"{question}: ", markup=False).strip()
        except (EOFError, KeyboardInterrupt):
            raise Cancelled from None
