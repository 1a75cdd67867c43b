"""`fpmsdk onboard`: the stages from a model's `config.json` to a resolved profile; a new command is a line here."""

import typer

from fpmsdk.cli import onboard_checkpoint, onboard_init, onboard_plan, onboard_validate_fpm
from fpmsdk.cli.console import reports_errors

onboard = typer.Typer(
    name="onboard", help="Onboard a model: plan, collect, verify and finalise its measurements.", no_args_is_help=True
)
onboard.command(cls=onboard_init.ManyValuesCommand)(reports_errors(onboard_init.init))
onboard.command()(reports_errors(onboard_plan.plan))
onboard.command()(reports_errors(onboard_checkpoint.checkpoint))
onboard.command()(reports_errors(onboard_checkpoint.resume))
onboard.command()(reports_errors(onboard_validate_fpm.validate_fpm))
