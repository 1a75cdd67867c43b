"""`fpmsdk onboard`: the stages from a model's `config.json` to a resolved profile; a new command is a line here."""

import typer

from fpmsdk.cli import (
    onboard_checkpoint,
    onboard_collect,
    onboard_finalize,
    onboard_import,
    onboard_plan,
    onboard_probe,
    onboard_serving,
    onboard_validate_collection,
    onboard_validate_fpm,
)
from fpmsdk.cli.console import reports_errors
from fpmsdk.cli.onboard_init import ManyValuesCommand, init

onboard = typer.Typer(
    name="onboard", help="Onboard a model: plan, collect, verify and finalise its measurements.", no_args_is_help=True
)
onboard.command("init", cls=ManyValuesCommand)(reports_errors(init))
onboard.command()(reports_errors(onboard_plan.plan))
onboard.command()(reports_errors(onboard_checkpoint.checkpoint))
onboard.command()(reports_errors(onboard_checkpoint.resume))
onboard.command()(reports_errors(onboard_probe.probe_runtime))
onboard.command()(reports_errors(onboard_import.import_observations))
onboard.command()(reports_errors(onboard_collect.collect_fpm))
onboard.command()(reports_errors(onboard_validate_collection.validate_collection))
onboard.command()(reports_errors(onboard_validate_fpm.validate_fpm))
onboard.command()(reports_errors(onboard_finalize.finalize))
onboard.command()(reports_errors(onboard_serving.validate_serving))
