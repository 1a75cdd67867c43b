"""The subcommands and their names; a new one is a module and an entry here."""

from typing import Annotated

import typer

from fpmsdk.cli.lazy import Subcommand, lazy_group

SUBCOMMANDS = {
    "quickstart": Subcommand(
        "fpmsdk.cli.quickstart:quickstart",
        "Predict a small deployment that was measured, offline, and leave its files to change.",
    ),
    "init": Subcommand("fpmsdk.cli.init:init", "Write a commented example to start from."),
    "predict": Subcommand(
        "fpmsdk.cli.predict:predict", "Predict latencies and throughput of one deployment under one workload."
    ),
    "demo": Subcommand(
        "fpmsdk.cli.demo:demo", "Tune on a recorded vLLM run, replay another one, and print predicted next to measured."
    ),
    "tune": Subcommand(
        "fpmsdk.cli.tune:tune",
        "Predict each recorded iteration, then tune on it; report the error by kind and what was learned.",
    ),
    "estimate": Subcommand("fpmsdk.cli.estimate:estimate", "Estimate the latency of one iteration in ms."),
    "replay": Subcommand(
        "fpmsdk.cli.replay:replay",
        "Replay requests; passes cost what the launch says, --fixed, --recorded-passes, --snapshot, or a tuned model.",
    ),
    "warmup": Subcommand("fpmsdk.cli.warmup:warmup", "Create the cache directory and fill every cache."),
    "doctor": Subcommand("fpmsdk.cli.doctor:doctor", "Check this installation."),
    "learn": Subcommand("fpmsdk.cli.learn:learn", "Estimators that learn from telemetry."),
    "onboard": Subcommand(
        "fpmsdk.cli.onboard:onboard", "Onboard a model: plan, collect, verify and finalise its measurements."
    ),
    "recommend": Subcommand("fpmsdk.cli.recommend:recommend", "Search the deployments that serve a workload best."),
    "snapshot": Subcommand("fpmsdk.cli.snapshot:snapshot", "Saved models: save, inspect, verify, diff."),
    "table": Subcommand(
        "fpmsdk.cli.table:table", "Whole-forward tables: check, leave-one-out report, plot, merge, medians."
    ),
    "trace": Subcommand("fpmsdk.cli.trace:trace", "Trace files: check, convert, statistics."),
}

app = typer.Typer(
    name="fpmsdk",
    cls=lazy_group(SUBCOMMANDS),
    help="Forward-pass performance models of LLM inference engines: predict, tune online, replay.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the list of commands is plain text, and there without loading Rich
)


def _print_version(asked: bool) -> None:
    if asked:
        from fpmsdk.version import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def fpmsdk(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Forward-pass performance models of LLM inference engines: predict, tune online, replay."""
