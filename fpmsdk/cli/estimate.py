"""`fpmsdk estimate`: the latency of one iteration."""

from pathlib import Path
from typing import Annotated

import typer

from fpmsdk.cli.console import NEGATIVE_RESULT, JsonOption, show
from fpmsdk.cli.inputs import (
    AttentionDpOption,
    ConfigOption,
    WorkerTypeOption,
    build_model,
    read_iterations,
    read_json,
)


def estimate(
    fpm: Annotated[
        Path,
        typer.Argument(help="Forward-pass metrics (JSON): an object, or a list with one per rank; - is stdin."),
    ],
    frames: Annotated[
        list[Path] | None, typer.Option("--frames", help="Telemetry to tune on before; may be repeated.")
    ] = None,
    *,
    config: ConfigOption = None,
    worker_type: WorkerTypeOption = "aggregated",
    attention_dp: AttentionDpOption = 1,
    json: JsonOption = False,
) -> None:
    """Estimate the latency of one iteration in ms.

    Exits with 1 when the model is not ready for such an iteration.
    """
    from fpmsdk import FpmBatch

    model = build_model(config, worker_type, attention_dp)
    iteration = read_json(fpm, "the forward-pass metrics")
    ranks = model.diagnostics()["provenance"]["config"]["attention_dp"]
    model.tune_with_fpms(FpmBatch.from_frames(read_iterations(frames or [], ranks)))
    document = model.estimate_forward_pass_detailed(iteration)
    latency_ms = document["latency_ms"]
    if latency_ms is None:
        readiness = model.diagnostics()["readiness"]
        line = f"not ready for such an iteration ({readiness}); tune the model with --frames first"
    else:
        line = f"{latency_ms:.6f} ms"
    show(document, json, line)
    if latency_ms is None:
        raise typer.Exit(NEGATIVE_RESULT)
