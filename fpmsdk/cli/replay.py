"""`fpmsdk replay`: serve a trace or a synthetic workload with a simulated engine and report the latencies."""

from collections.abc import Mapping
from functools import partial
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
from fpmsdk.cli.traces import BenchmarkOption, BlockTokensOption, FormatOption, NestedOption, TimeUnitOption
from fpmsdk.errors import ConfigError, ReplayInterrupted

if TYPE_CHECKING:
    from fpmsdk import ReplayReport, Trace
    from fpmsdk.replay.formats.recorded import RecordedRun
    from fpmsdk.replay.trace_stream import TraceStream


def replay(
    trace: Annotated[Path | None, typer.Argument(help="Request trace; without one, --synthetic makes it.")] = None,
    *,
    format: FormatOption = None,
    block_tokens: BlockTokensOption = None,
    time_unit: TimeUnitOption = None,
    benchmark: BenchmarkOption = None,
    nested_timestamps: NestedOption = None,
    head: Annotated[int | None, typer.Option("--head", help="Serve the first so many requests only.")] = None,
    synthetic: Annotated[
        tuple[int, int, int] | None,
        typer.Option(
            "--synthetic", metavar="COUNT INPUT OUTPUT", help="So many requests (or sessions) of such lengths."
        ),
    ] = None,
    random_range_ratio: Annotated[
        float | None, typer.Option("--random-range-ratio", help="Synthetic lengths vary from this share of the given.")
    ] = None,
    random_seed: Annotated[
        int | None, typer.Option("--random-seed", help="Seed of synthetic lengths and prefix groups.")
    ] = None,
    turns_per_session: Annotated[
        int | None, typer.Option("--turns-per-session", help="Turns of each synthetic session.")
    ] = None,
    inter_turn_delay_ms: Annotated[
        float | None, typer.Option("--inter-turn-delay-ms", help="Wait between synthetic turns.")
    ] = None,
    cached_prefix_tokens: Annotated[
        int | None, typer.Option("--cached-prefix-tokens", help="Tokens that all synthetic prompts begin with.")
    ] = None,
    shared_prefix_ratio: Annotated[
        float | None, typer.Option("--shared-prefix-ratio", help="Share of a synthetic prompt that its group shares.")
    ] = None,
    num_prefix_groups: Annotated[
        int | None, typer.Option("--num-prefix-groups", help="Groups of synthetic prompts with a prefix each.")
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option("--request-rate", help="Poisson arrivals of so many requests (or sessions) a second."),
    ] = None,
    arrival_interval_ms: Annotated[
        float | None, typer.Option("--arrival-interval-ms", help="Arrivals at a constant interval.")
    ] = None,
    arrival_seed: Annotated[int | None, typer.Option("--arrival-seed", help="Seed of Poisson arrivals.")] = None,
    launch: Annotated[Path | None, typer.Option("--launch", help="Engine launch configuration (JSON).")] = None,
    fixed: Annotated[
        tuple[float, float] | None,
        typer.Option("--fixed", metavar="PREFILL_MS DECODE_MS", help="Price passes with two constants."),
    ] = None,
    frames: Annotated[
        list[Path] | None,
        typer.Option("--frames", help="Price passes with a model tuned on this telemetry; may be repeated."),
    ] = None,
    snapshot: Annotated[
        Path | None, typer.Option("--snapshot", help="Directory of a saved model that prices the passes.")
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            "--recorded-passes",
            help="Price every pass as it was recorded: what --fpm-stream wrote, or telemetry of an engine (.bin).",
        ),
    ] = None,
    config: ConfigOption = None,
    worker_type: WorkerTypeOption = None,
    attention_dp: AttentionDpOption = None,
    scheduler_rules: Annotated[Literal["vllm", "simulator"], typer.Option("--scheduler-rules")] = "vllm",
    mixed_pass_pricing: Annotated[Literal["composed", "separate"], typer.Option("--mixed-pass-pricing")] = "composed",
    workers: Annotated[int, typer.Option("--workers", help="Identical workers.")] = 1,
    placement: Annotated[
        Literal["round_robin", "kv_aware"],
        typer.Option("--placement", help="Workers take turns, or a prompt goes where most of it is cached."),
    ] = "round_robin",
    prefill_launch: Annotated[
        Path | None,
        typer.Option("--prefill-launch", help="Launch configuration (JSON) of workers that compute prompts."),
    ] = None,
    prefill_workers: Annotated[int, typer.Option("--prefill-workers", help="How many of those.")] = 1,
    handoff_latency_ms: Annotated[
        float, typer.Option("--handoff-latency-ms", help="Duration of a transfer from prefill to decode worker.")
    ] = 0.0,
    speedup: Annotated[float, typer.Option("--speedup", help="Divide arrival times and delays by this.")] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", help="Ignore arrival times; keep so many sessions active.")
    ] = None,
    max_sim_time_ms: Annotated[
        float | None, typer.Option("--max-sim-time-ms", help="Stop at this simulated time.")
    ] = None,
    warm_prefix_cache: Annotated[
        bool, typer.Option("--warm-prefix-cache", help="Shared prefixes are cached before the first arrival.")
    ] = False,
    exact_itl: Annotated[
        bool, typer.Option("--exact-itl", help="Exact percentiles of token gaps, not those of a sketch.")
    ] = False,
    ttft_ms: Annotated[float | None, typer.Option("--ttft-ms", help="Goodput bound.")] = None,
    itl_ms: Annotated[float | None, typer.Option("--itl-ms", help="Goodput bound.")] = None,
    e2e_ms: Annotated[float | None, typer.Option("--e2e-ms", help="Goodput bound.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Write the report here (JSON), without --stream with a record per request."),
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
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Keep a summary and no single request: memory does not grow with the trace."),
    ] = False,
    requests_file: Annotated[
        Path | None, typer.Option("--requests", help="With --stream, write a row per request here (Parquet).")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Replay requests; passes cost what the launch says, --fixed, --recorded-passes, --snapshot, or a tuned model.

    Exits with 1 when no request completed, and with 130 after Ctrl-C, when it has reported what was simulated so far.
    """
    from fpmsdk import ReplayReport, Trace, replay_trace
    from fpmsdk.replay.run_stream import replay_stream
    from fpmsdk.replay.trace_stream import TraceStream

    if sample_interval_ms is not None and series is None:
        raise ConfigError("--sample-interval-ms has no effect without --series; give both")
    _check_one_price({"fixed": fixed, "frames": frames or None, "recorded_passes": recorded, "snapshot": snapshot})
    if not frames and (config is not None or worker_type is not None or attention_dp is not None):
        raise ConfigError("--config and its like describe the model that --frames tunes; give --frames too")
    _check_stream(
        stream,
        requests_file,
        {
            "head": head,
            "fpm_stream": fpm_stream,
            "series": series,
            "html": html,
            "warm_prefix_cache": warm_prefix_cache or None,
        },
    )
    arrivals = _given(
        {
            "request_rate": request_rate,
            "arrival_interval_ms": arrival_interval_ms,
            "arrival_seed": arrival_seed,
        }
    )
    if arrivals and concurrency is not None:
        raise ConfigError(f"{_flag(arrivals)} has no effect with --concurrency, which ignores arrivals; leave one out")
    requests = _requests(
        TraceStream if stream else Trace,
        trace,
        synthetic,
        reading={
            "format": format,
            "time_unit": time_unit,
            "benchmark": benchmark,
            "nested_timestamps": nested_timestamps,
        },
        making={
            "random_range_ratio": random_range_ratio,
            "random_seed": random_seed,
            "turns_per_session": turns_per_session,
            "inter_turn_delay_ms": inter_turn_delay_ms,
            "cached_prefix_tokens": cached_prefix_tokens,
            "shared_prefix_ratio": shared_prefix_ratio,
            "num_prefix_groups": num_prefix_groups,
        },
        block_tokens=block_tokens,
    )
    if head is not None and isinstance(requests, Trace):
        requests = requests.head(head)
    if arrivals:
        requests = requests.with_arrivals(**arrivals)
    timing: Any = None if snapshot is None else _saved_model(snapshot)
    if fixed is not None:
        timing = {"type": "fixed", "prefill_ms": fixed[0], "decode_ms": fixed[1]}
    elif frames:
        timing = tuned_model(frames, config, worker_type, attention_dp)
    # What prices the passes prices those of both kinds of workers, but each has its own recording.
    prefill_timing = timing if prefill_launch is not None else None
    if recorded is not None:
        timing = _recorded_passes(recorded, None if prefill_launch is None else "decode")
        prefill_timing = None if prefill_launch is None else _recorded_passes(recorded, "prefill")
    bounds = {"ttft_ms": ttft_ms, "itl_ms": itl_ms, "e2e_ms": e2e_ms}
    count = requests.num_requests if isinstance(requests, TraceStream) else len(requests)
    serve: Any = (
        partial(replay_stream, requests_path=requests_file)
        if stream
        else partial(
            replay_trace,
            warm_prefix_cache=warm_prefix_cache,
            sample_interval_ms=None if series is None else 1000.0 if sample_interval_ms is None else sample_interval_ms,
        )
    )
    with progress(f"replaying {count:,} requests"):
        report = _whole_or_partial(
            serve,
            requests,
            launch=None if launch is None else read_object(launch, "the launch configuration"),
            timing=timing,
            scheduler_rules=scheduler_rules,
            mixed_pass_pricing=mixed_pass_pricing,
            num_workers=workers,
            placement=placement,
            prefill_launch=None
            if prefill_launch is None
            else read_object(prefill_launch, "the prefill launch configuration"),
            prefill_timing=prefill_timing,
            num_prefill_workers=prefill_workers,
            handoff_latency_ms=handoff_latency_ms,
            arrival_speedup_ratio=speedup,
            concurrency=concurrency,
            max_sim_time_ms=max_sim_time_ms,
            exact_itl=exact_itl,
            sla=None if all(bound is None for bound in bounds.values()) else bounds,
        )
    if output is not None:
        report.write_json(output)
    if isinstance(report, ReplayReport):
        _write_exports(report, fpm_stream, series)
    if html is not None and isinstance(requests, Trace):
        measured = None if trace is None else _measured_run(trace, format, requests, report)
        title = "Replay of synthetic requests" if trace is None else f"Replay of {trace.name}"
        report.write_html(html, measured=measured, title=title)
    show(
        {
            "options": report.options,
            "partial": report.partial,
            **({"trace": requests.summary()} if isinstance(requests, Trace) else {}),
            "summary": report.summary,
        },
        json,
        report.table(),
    )
    if report.partial:
        raise typer.Exit(INTERRUPTED)


def _saved_model(snapshot: Path) -> Any:
    from fpmsdk import ForwardPassPerfModel

    return ForwardPassPerfModel.best_available(state_snapshot=snapshot)


def _check_one_price(given: Mapping[str, Any]) -> None:
    flags = [_flag({name: value}) for name, value in _given(given).items()]
    if len(flags) > 1:
        raise ConfigError(f"{flags[0]} and {flags[1]} both price the passes; give one of them")


def _recorded_passes(path: Path, pool: str | None) -> Any:
    """The passes of a file: messages of the wire, or a table that a replay has written."""
    from fpmsdk.metrics import read_frames
    from fpmsdk.replay import RecordedPasses

    if path.name.endswith((".bin", ".bin.gz")):
        if pool is not None:
            raise ConfigError(f"{path}: messages do not tell prefill from decode workers; give .parquet or .arrow")
        return RecordedPasses.from_frames(read_frames(path))
    return RecordedPasses.from_stream(path, pool)


def _check_stream(stream: bool, requests_file: Path | None, of_a_whole: Mapping[str, Any]) -> None:
    if requests_file is not None and not stream:
        raise ConfigError("--requests has no effect without --stream; --output holds every request")
    if stream and (given := _given(of_a_whole)):
        raise ConfigError(f"{_flag(given)} needs all requests in memory; leave it or --stream out")


def _whole_or_partial(serve: Any, trace: "Trace | TraceStream", **options: Any) -> Any:
    """The report of a replay, or of the part of it that Ctrl-C left."""
    try:
        return serve(trace, **options)
    except ReplayInterrupted as stop:
        typer.echo(f"{stop}; what was simulated until then is partial", err=True)
        if stop.report is None:
            raise typer.Exit(INTERRUPTED) from None
        return stop.report


def _write_exports(report: "ReplayReport", fpm_stream: Path | None, series: Path | None) -> None:
    if fpm_stream is not None:
        report.write_fpm_stream(fpm_stream)
    if series is not None:
        report.write_series(series)


def _measured_run(path: Path, format: str | None, trace: "Trace", report: "ReplayReport") -> "RecordedRun | None":
    """The measured run to draw beside the replay: a recorded trace that was replayed whole, as it was."""
    from fpmsdk.replay.formats import open_trace
    from fpmsdk.replay.formats.recorded import read_run

    options = report.options
    is_as_measured = options["arrival_speedup_ratio"] == 1.0 and options["concurrency"] is None
    if not is_as_measured or open_trace(path, format).form != "recorded":
        return None
    run = read_run(path)
    is_whole = len(run.trace) == len(trace) == report.summary["completed_requests"]
    return run if is_whole and len(run.token_ms) else None


def _requests(
    kind: "type[Trace] | type[TraceStream]",
    trace: Path | None,
    synthetic: tuple[int, int, int] | None,
    *,
    reading: Mapping[str, Any],
    making: Mapping[str, Any],
    block_tokens: int | None,
) -> "Trace | TraceStream":
    """The requests of a file, or made ones; an option that belongs to the other is refused."""
    if (trace is None) == (synthetic is None):
        raise ConfigError("give a trace file or --synthetic COUNT INPUT OUTPUT, one of them")
    reads, makes = _given(reading), _given(making)
    if synthetic is None and makes:
        raise ConfigError(f"{_flag(makes)} has no effect on a trace file; it belongs to --synthetic")
    if trace is None and reads:
        raise ConfigError(f"{_flag(reads)} has no effect on --synthetic; it belongs to a trace file")
    if synthetic is not None:
        return kind.synthetic(*synthetic, **makes, block_tokens=block_tokens)
    assert trace is not None
    return kind.read(trace, **reads, block_tokens=block_tokens)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _flag(options: Mapping[str, Any]) -> str:
    return f"--{next(iter(options)).replace('_', '-')}"
