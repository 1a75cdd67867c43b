"""`fpmsdk onboard`: the stages from a model's `config.json` to a resolved profile; a new command is a line here."""

import typer

onboard = typer.Typer(
    name="onboard", help="Onboard a model: plan, collect, verify and finalise its measurements.", no_args_is_help=True
)
