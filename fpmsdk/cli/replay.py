"""`fpmsdk replay`: serve a trace or a synthetic workload with a simulated engine and report the latencies."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fpmsdk.cli.console import JsonOption, progress, show
from fpmsdk.cli.inputs import (
    AttentionDpOption,
    ConfigOption,
    WorkerTypeOption,
    read_object,
    tuned_model,
)
from fpmsdk.cli.traces import BenchmarkOption, BlockTokensOption, FormatOption, NestedOption, TimeUnitOption
from fpmsdk.errors import ConfigError

if TYPE_CHECKING:
    from fpmsdk import Trace


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
        Path | None, typer.Option("--output", help="Write the report with a record per request here (JSON).")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Replay requests; passes cost what the launch says, --fixed, or a model tuned on --frames.

    Exits with 1 when no request completed.
    """
    from fpmsdk import replay_trace

    if fixed is not None and frames:
        raise ConfigError("--fixed and --frames both price the passes; give one of them")
    if not frames and (config is not None or worker_type is not None or attention_dp is not None):
        raise ConfigError("--config and its like describe the model that --frames tunes; give --frames too")
    requests = _requests(
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
    arrivals = _given(
        {
            "request_rate": request_rate,
            "arrival_interval_ms": arrival_interval_ms,
            "arrival_seed": arrival_seed,
        }
    )
    if arrivals and concurrency is not None:
        raise ConfigError(f"{_flag(arrivals)} has no effect with --concurrency, which ignores arrivals; leave one out")
    if head is not None:
        requests = requests.head(head)
    if arrivals:
        requests = requests.with_arrivals(**arrivals)
    timing: Any = None
    if fixed is not None:
        timing = {"type": "fixed", "prefill_ms": fixed[0], "decode_ms": fixed[1]}
    elif frames:
        timing = tuned_model(frames, config, worker_type, attention_dp)
    bounds = {"ttft_ms": ttft_ms, "itl_ms": itl_ms, "e2e_ms": e2e_ms}
    with progress(f"replaying {len(requests):,} requests"):
        report = replay_trace(
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
            # What prices the passes prices those of both kinds of workers.
            prefill_timing=timing if prefill_launch is not None else None,
            num_prefill_workers=prefill_workers,
            handoff_latency_ms=handoff_latency_ms,
            arrival_speedup_ratio=speedup,
            concurrency=concurrency,
            max_sim_time_ms=max_sim_time_ms,
            warm_prefix_cache=warm_prefix_cache,
            exact_itl=exact_itl,
            sla=None if all(bound is None for bound in bounds.values()) else bounds,
        )
    if output is not None:
        report.write_json(output)
    show(
        {"options": report.options, "trace": requests.summary(), "summary": report.summary},
        json,
        report.table(),
    )


def _requests(
    trace: Path | None,
    synthetic: tuple[int, int, int] | None,
    *,
    reading: Mapping[str, Any],
    making: Mapping[str, Any],
    block_tokens: int | None,
) -> "Trace":
    """The requests of a file, or made ones; an option that belongs to the other is refused."""
    from fpmsdk import Trace

    if (trace is None) == (synthetic is None):
        raise ConfigError("give a trace file or --synthetic COUNT INPUT OUTPUT, one of them")
    reads, makes = _given(reading), _given(making)
    if synthetic is None and makes:
        raise ConfigError(f"{_flag(makes)} has no effect on a trace file; it belongs to --synthetic")
    if trace is None and reads:
        raise ConfigError(f"{_flag(reads)} has no effect on --synthetic; it belongs to a trace file")
    if synthetic is not None:
        return Trace.synthetic(*synthetic, **makes, block_tokens=block_tokens)
    assert trace is not None
    return Trace.read(trace, **reads, block_tokens=block_tokens)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _flag(options: Mapping[str, Any]) -> str:
    return f"--{next(iter(options)).replace('_', '-')}"
