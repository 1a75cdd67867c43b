"""`fpmsdk replay`: serve a trace with a simulated engine and report the latencies."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fpmsdk.cli.console import INTERRUPTED, JsonOption, progress, show
from fpmsdk.cli.inputs import (
    AttentionDpOption,
    ConfigOption,
    WorkerTypeOption,
    read_object,
    tuned_model,
)
from fpmsdk.errors import ConfigError, ReplayInterrupted

if TYPE_CHECKING:
    from fpmsdk import ReplayReport, Trace
    from fpmsdk.replay.formats.recorded import RecordedRun


def replay(
    trace: Annotated[Path, typer.Argument(help="Request trace: .jsonl (Mooncake), .csv (Azure) or .json (recorded).")],
    *,
    format: Annotated[str | None, typer.Option("--format", help="mooncake, azure or recorded.")] = None,
    block_tokens: Annotated[int, typer.Option("--block-tokens", help="Prompt tokens per hash id.")] = 512,
    head: Annotated[int | None, typer.Option("--head", help="Serve the first so many requests only.")] = None,
    launch: Annotated[Path | None, typer.Option("--launch", help="Engine launch configuration (JSON).")] = None,
    fixed: Annotated[
        tuple[float, float] | None,
        typer.Option("--fixed", metavar="PREFILL_MS DECODE_MS", help="Price passes with two constants."),
    ] = None,
    frames: Annotated[
        list[Path] | None,
        typer.Option("--frames", help="Price passes with a model tuned on this telemetry; may be repeated."),
    ] = None,
    config: ConfigOption = None,
    worker_type: WorkerTypeOption = None,
    attention_dp: AttentionDpOption = None,
    scheduler_rules: Annotated[Literal["vllm", "simulator"], typer.Option("--scheduler-rules")] = "vllm",
    mixed_pass_pricing: Annotated[Literal["composed", "separate"], typer.Option("--mixed-pass-pricing")] = "composed",
    workers: Annotated[int, typer.Option("--workers", help="Identical workers behind a round robin.")] = 1,
    speedup: Annotated[float, typer.Option("--speedup", help="Divide arrival times by this.")] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", help="Ignore arrival times; keep so many sessions active.")
    ] = None,
    ttft_ms: Annotated[float | None, typer.Option("--ttft-ms", help="Goodput bound.")] = None,
    itl_ms: Annotated[float | None, typer.Option("--itl-ms", help="Goodput bound.")] = None,
    e2e_ms: Annotated[float | None, typer.Option("--e2e-ms", help="Goodput bound.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the report with a record per request here (JSON).")
    ] = None,
    fpm_stream: Annotated[
        Path | None,
        typer.Option(
            "--fpm-stream", help="Write the telemetry of every pass: .parquet, .arrow, or .bin as on the wire."
        ),
    ] = None,
    series: Annotated[
        Path | None, typer.Option("--series", help="Write samples of queues and caches: .parquet, .arrow or .jsonl.")
    ] = None,
    sample_interval_ms: Annotated[
        float | None, typer.Option("--sample-interval-ms", help="Simulated time between samples; 1000 by default.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write the report as one web page; a recorded trace is drawn as measured, too."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Replay a request trace; passes cost what the launch says, --fixed, or a model tuned on --frames.

    Exits with 1 when no request completed, and with 130 after Ctrl-C, when it has reported what was simulated so far.
    """
    from fpmsdk import Trace

    if sample_interval_ms is not None and series is None:
        raise ConfigError("--sample-interval-ms has no effect without --series; give both")
    if fixed is not None and frames:
        raise ConfigError("--fixed and --frames both price the passes; give one of them")
    if not frames and (config is not None or worker_type is not None or attention_dp is not None):
        raise ConfigError("--config and its like describe the model that --frames tunes; give --frames too")
    requests = Trace.read(trace, format, block_tokens=block_tokens)
    if head is not None:
        requests = requests.head(head)
    timing: Any = None
    if fixed is not None:
        timing = {"type": "fixed", "prefill_ms": fixed[0], "decode_ms": fixed[1]}
    elif frames:
        timing = tuned_model(frames, config, worker_type, attention_dp)
    bounds = {"ttft_ms": ttft_ms, "itl_ms": itl_ms, "e2e_ms": e2e_ms}
    with progress(f"replaying {len(requests):,} requests"):
        report = _whole_or_partial(
            requests,
            launch=None if launch is None else read_object(launch, "the launch configuration"),
            timing=timing,
            scheduler_rules=scheduler_rules,
            mixed_pass_pricing=mixed_pass_pricing,
            num_workers=workers,
            arrival_speedup_ratio=speedup,
            concurrency=concurrency,
            sla=None if all(bound is None for bound in bounds.values()) else bounds,
            sample_interval_ms=None if series is None else 1000.0 if sample_interval_ms is None else sample_interval_ms,
        )
    if output is not None:
        report.write_json(output)
    if fpm_stream is not None:
        report.write_fpm_stream(fpm_stream)
    if series is not None:
        report.write_series(series)
    if html is not None:
        measured = _measured_run(trace, format, requests, report)
        report.write_html(html, measured=measured, title=f"Replay of {trace.name}")
    show(
        {
            "options": report.options,
            "partial": report.partial,
            "trace": requests.summary(),
            "summary": report.summary,
        },
        json,
        report.table(),
    )
    if report.partial:
        raise typer.Exit(INTERRUPTED)


def _whole_or_partial(trace: "Trace", **options: Any) -> "ReplayReport":
    """The report of a replay, or of the part of it that Ctrl-C left."""
    from fpmsdk import replay_trace

    try:
        return replay_trace(trace, **options)
    except ReplayInterrupted as stop:
        typer.echo(f"{stop}; what was simulated until then is partial", err=True)
        if stop.report is None:
            raise typer.Exit(INTERRUPTED) from None
        report: ReplayReport = stop.report
        return report


def _measured_run(path: Path, format: str | None, trace: "Trace", report: "ReplayReport") -> "RecordedRun | None":
    """The measured run to draw beside the replay: a recorded trace that was replayed whole, as it was."""
    from fpmsdk.replay.formats.recorded import read_run

    options = report.options
    is_recorded = format == "recorded" or (format is None and Path(path.name.removesuffix(".gz")).suffix == ".json")
    is_as_measured = options["arrival_speedup_ratio"] == 1.0 and options["concurrency"] is None
    if not is_recorded or not is_as_measured:
        return None
    run = read_run(path)
    is_whole = len(run.trace) == len(trace) == report.summary["completed_requests"]
    return run if is_whole and len(run.token_ms) else None
