"""The subcommands and their names; a new one is a module and a line here."""

import typer

from fpmsdk.cli import demo, doctor, estimate, replay, tune, warmup
from fpmsdk.cli.console import reports_errors
from fpmsdk.cli.learn import learn
from fpmsdk.cli.onboard import onboard
from fpmsdk.cli.snapshot import snapshot
from fpmsdk.cli.table import table
from fpmsdk.cli.trace import trace

app = typer.Typer(
    name="fpmsdk",
    help="Forward-pass performance models of LLM inference engines: predict, tune online, replay.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo.demo, tune.tune, estimate.estimate, replay.replay, warmup.warmup, doctor.doctor):
    app.command()(reports_errors(command))
app.add_typer(learn)
app.add_typer(onboard)
app.add_typer(snapshot)
app.add_typer(table)
app.add_typer(trace)
