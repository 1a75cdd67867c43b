"""`fpmsdk estimate`: the latency of one iteration."""

from pathlib import Path
from typing import Annotated

import typer

from fpmsdk.cli.console import NEGATIVE_RESULT, JsonOption, show
from fpmsdk.cli.inputs import (
    AttentionDpOption,
    ConfigOption,
    WorkerTypeOption,
    read_json,
    tuned_model,
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
    worker_type: WorkerTypeOption = None,
    attention_dp: AttentionDpOption = None,
    json: JsonOption = False,
) -> None:
    """Estimate the latency of one iteration in ms.

    Exits with 1 when the model is not ready for such an iteration.
    """
    iteration = read_json(fpm, "the forward-pass metrics")
    model = tuned_model(frames or [], config, worker_type, attention_dp)
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
