"""`fpmsdk trace`: look for what is wrong with a trace file, convert it, say what it asks for."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from fpmsdk.cli.console import NEGATIVE_RESULT, JsonOption, number, progress, reports_errors, show
from fpmsdk.cli.inputs import read_object
from fpmsdk.cli.traces import (
    BenchmarkOption,
    BlockTokensOption,
    FormatOption,
    NestedOption,
    TimeUnitOption,
    read_options,
)
from fpmsdk.errors import ConfigError

FileArgument = Annotated[Path, typer.Argument(metavar="TRACE", help="The trace file, or a folder of Weka plays.")]

trace = typer.Typer(name="trace", help="Trace files: check, convert, statistics.", no_args_is_help=True)


def check(
    file: FileArgument,
    *,
    format: FormatOption = None,
    block_tokens: BlockTokensOption = None,
    time_unit: TimeUnitOption = None,
    benchmark: BenchmarkOption = None,
    nested_timestamps: NestedOption = None,
    launch: Annotated[
        Path | None, typer.Option("--launch", help="Say what an engine of this configuration (JSON) would reject.")
    ] = None,
    scheduler_rules: Annotated[
        Literal["vllm", "simulator"] | None,
        typer.Option("--scheduler-rules", help="Rules of that engine; vllm by default."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Find every fault of a trace with its lines, and what is strange about it.

    Exits with 1 when there is a fault, or when the engine would reject a request.
    """
    from fpmsdk.replay.check import check_trace

    if scheduler_rules is not None and launch is None:
        raise ConfigError("--scheduler-rules has no effect without --launch; give both or none")
    with progress(f"checking {file}") as advance:
        outcome = check_trace(
            file,
            format,
            options=read_options(block_tokens, time_unit, benchmark, nested_timestamps),
            launch=None if launch is None else read_object(launch, "the launch configuration"),
            scheduler_rules=scheduler_rules or "vllm",
            advance=advance,
        )
    sessions = "" if outcome.num_sessions == outcome.num_requests else f" in {outcome.num_sessions:,} sessions"
    lines = [f"{file}: {outcome.format}, {outcome.num_requests:,} requests{sessions}"]
    for finding in outcome.findings:
        where = f"; line {', '.join(map(str, finding.lines))}{', …' if finding.count > len(finding.lines) else ''}"
        lines.append(f"{finding.level}: {finding.text} ({finding.count:,} x{where if finding.lines else ''})")
    show(outcome.to_dict(), json, *lines)
    if not outcome.ok:
        raise typer.Exit(NEGATIVE_RESULT)


def convert(
    source: FileArgument,
    target: Annotated[Path, typer.Argument(help="The file to write: .parquet, or .jsonl for Mooncake.")],
    *,
    format: FormatOption = None,
    to: Annotated[
        Literal["parquet", "mooncake"] | None, typer.Option("--to", help="Form to write, whatever the ending.")
    ] = None,
    block_tokens: BlockTokensOption = None,
    time_unit: TimeUnitOption = None,
    benchmark: BenchmarkOption = None,
    nested_timestamps: NestedOption = None,
    json: JsonOption = False,
) -> None:
    """Write a trace in a form of ours, row by row; the earliest arrival becomes 0."""
    from fpmsdk.replay.convert import convert_trace

    with progress(f"converting {source}") as advance:
        done = convert_trace(
            source,
            target,
            source_format=format,
            target_format=to,
            options=read_options(block_tokens, time_unit, benchmark, nested_timestamps),
            advance=advance,
        )
    line = f"{target}: {done.num_requests:,} requests, {done.block_tokens} tokens per hash id"
    left_out = [f"{count:,} records left out: {reason}" for reason, count in done.left_out.items()]
    show({"target": str(target), **asdict(done)}, json, line, *left_out)


def stats(
    file: FileArgument,
    *,
    format: FormatOption = None,
    block_tokens: BlockTokensOption = None,
    time_unit: TimeUnitOption = None,
    benchmark: BenchmarkOption = None,
    nested_timestamps: NestedOption = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write arrivals and lengths as one page (HTML); needs the extra plot.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say what a trace asks for: lengths, arrivals, sessions, and how much of its prompts repeats."""
    from fpmsdk.replay.stats import trace_stats

    with progress(f"reading {file}") as advance:
        figures = trace_stats(
            file,
            format,
            options=read_options(block_tokens, time_unit, benchmark, nested_timestamps),
            plot=plot,
            advance=advance,
        )
    show(figures, json, _table(figures))


def _table(figures: dict[str, Any]) -> Table:
    rate, repeated = figures["arrival_rate_rps"], figures["repeated_block_ratio"]
    shown = Table(
        title=f"{figures['num_requests']:,} requests in {figures['num_sessions']:,} sessions",
        caption=(
            f"{figures['arrival_span_ms'] / 1e3:,.1f} s of arrivals, {number(rate)} sessions/s, at most "
            f"{figures['busiest_second_requests']:,} in a second; prompt blocks that came before: "
            f"{number(None if repeated is None else 100 * repeated, 1)} %"
        ),
    )
    columns = ("mean", "min", "median", "p90", "p99", "max")
    shown.add_column("")
    for column in columns:
        shown.add_column(column, justify="right")
    for label, name, digits in (
        ("prompt tokens", "prompt_tokens", 0),
        ("output tokens", "output_tokens", 0),
        ("between arrivals, ms", "interarrival_ms", 1),
        ("turns", "turns_per_session", 1),
    ):
        shown.add_row(label, *(number(figures[name][column], digits) for column in columns))
    return shown


for command in (check, convert, stats):
    trace.command()(reports_errors(command))
