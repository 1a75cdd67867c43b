"""Subcommands whose modules load when they run: `fpmsdk --help`, and every other command, never pay for them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from fpmsdk.cli.console import reports_errors


class Subcommand(NamedTuple):
    """Where a subcommand is, and what the list of commands says of it.

    Attributes
    ----------
    place: `module:name` of a function, or of a `typer.Typer` with commands of its own.
    help: one line; the first of the function's own help.
    """

    place: str
    help: str

    def load(self, name: str) -> Any:
        """The command itself."""
        module, _, attribute = self.place.partition(":")
        target = getattr(import_module(module), attribute)
        if isinstance(target, typer.Typer):
            command: Any = typer.main.get_group(target)
        else:
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            single.command(name)(reports_errors(target))
            command = typer.main.get_command(single)
        command.name = name
        return command


def lazy_group(subcommands: Mapping[str, Subcommand]) -> type[TyperGroup]:
    """The class of a group with these subcommands.

    >>> app = typer.Typer(cls=lazy_group({"doctor": Subcommand("fpmsdk.cli.doctor:doctor", "Look around.")}))
    >>> _ = app.callback()(lambda: None)
    >>> typer.main.get_command(app).list_commands(None)
    ['doctor']
    """

    class LazyGroup(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            # What lists and suggestions need; `resolve_command` puts the command itself in place of its stand-in.
            self.commands = {
                name: TyperCommand(name=name, help=item.help, callback=_nothing) for name, item in subcommands.items()
            }

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            name, command, rest = super().resolve_command(ctx, args)
            return name, command if name is None else subcommands[name].load(name), rest

    return LazyGroup


def _nothing() -> None:
    """The body of a stand-in, which never runs."""
