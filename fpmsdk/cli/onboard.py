"""`fpmsdk onboard`: the stages from a model's `config.json` to a resolved profile; a new command is a line here."""

import typer

from fpmsdk.cli.console import reports_errors
from fpmsdk.cli.onboard_init import ManyValuesCommand, init

onboard = typer.Typer(
    name="onboard", help="Onboard a model: plan, collect, verify and finalise its measurements.", no_args_is_help=True
)
onboard.command("init", cls=ManyValuesCommand)(reports_errors(init))
