"""`fpmsdk replay`: serve a trace with a simulated engine and report the latencies."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fpmsdk.cli.console import JsonOption, progress, show
from fpmsdk.cli.inputs import (
    AttentionDpOption,
    ConfigOption,
    WorkerTypeOption,
    read_object,
    tuned_model,
)
from fpmsdk.errors import ConfigError


def replay(
    trace: Annotated[Path, typer.Argument(help="Request trace: .jsonl (Mooncake), .csv (Azure) or .json (recorded).")],
    *,
    format: Annotated[str | None, typer.Option("--format", help="mooncake, azure or recorded.")] = None,
    block_tokens: Annotated[int | None, typer.Option("--block-tokens", help="Prompt tokens per hash id.")] = None,
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
    json: JsonOption = False,
) -> None:
    """Replay a request trace; passes cost what the launch says, --fixed, or a model tuned on --frames.

    Exits with 1 when no request completed.
    """
    from fpmsdk import Trace, replay_trace

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
        report = replay_trace(
            requests,
            launch=None if launch is None else read_object(launch, "the launch configuration"),
            timing=timing,
            scheduler_rules=scheduler_rules,
            mixed_pass_pricing=mixed_pass_pricing,
            num_workers=workers,
            arrival_speedup_ratio=speedup,
            concurrency=concurrency,
            sla=None if all(bound is None for bound in bounds.values()) else bounds,
        )
    if output is not None:
        report.write_json(output)
    show(
        {"options": report.options, "trace": requests.summary(), "summary": report.summary},
        json,
        report.table(),
    )
