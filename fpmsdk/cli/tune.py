"""`fpmsdk tune`: feed recorded telemetry to a model and say how well it predicted what came next."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fpmsdk.cli.console import NEGATIVE_RESULT, JsonOption, number, progress, show
from fpmsdk.cli.inputs import (
    AttentionDpOption,
    ConfigOption,
    WorkerTypeOption,
    blaming,
    build_model,
    read_iterations,
)

if TYPE_CHECKING:
    from fpmsdk import ForwardPassPerfModel, FpmBatch


def tune(
    frames: Annotated[list[Path], typer.Argument(help="Telemetry: .bin or .jsonl, possibly with .gz.")],
    *,
    config: ConfigOption = None,
    worker_type: WorkerTypeOption = None,
    attention_dp: AttentionDpOption = None,
    json: JsonOption = False,
) -> None:
    """Predict each recorded iteration, then tune on it; report the error by kind and what was learned.

    Exits with 1 when the model is not ready afterwards.
    """
    import numpy as np

    from fpmsdk import FpmBatch
    from fpmsdk.perfmodel.accuracy import error_by_kind, predict_then_tune

    model = build_model(config, worker_type, attention_dp)
    streams = {path: read_iterations(path, model) for path in frames}
    for path, stream in streams.items():
        with blaming(path):
            FpmBatch.from_frames(stream)
    iterations = [iteration for path in frames for iteration in streams[path]]
    batch = FpmBatch.from_frames(iterations)
    predicted = []
    with progress("tuning", len(iterations)) as advance:
        for path in frames:
            with blaming(path):
                predicted.append(predict_then_tune(model, streams[path], advance=advance))
    predicted_ms = np.concatenate(predicted)
    diagnostics = model.diagnostics()
    document: dict[str, Any] = {
        "iterations": len(iterations),
        "skipped": model.skipped_iterations() | _untrained(model, batch),
        "error": error_by_kind(predicted_ms, batch),
        "stores": model.regression_store_diagnostics(),
        "diagnostics": diagnostics,
    }
    show(document, json, error_table("predict, then tune", document["error"]), *_lines(document))
    if diagnostics["readiness"] != "ready":
        raise typer.Exit(NEGATIVE_RESULT)


def _untrained(model: "ForwardPassPerfModel", batch: "FpmBatch") -> dict[str, int]:
    # Iterations that a learned model has no forest for, which it passes over without a word.
    from fpmsdk._ext.features import WORKLOAD_KINDS

    missing = [
        WORKLOAD_KINDS.index(store["store"])
        for store in model.readiness_report()["stores"]
        if store.get("reason") == "no_trained_store"
    ]
    count = sum(int((batch.workload_kinds() == kind).sum()) for kind in missing)
    return {"untrained": count} if missing else {}


def error_table(title: str, error: dict[str, dict[str, Any]]) -> Table:
    """Prediction error by kind of iteration."""
    table = Table(title=title)
    for name in ("iterations", "count", "MAPE %", "bias %", "not ready"):
        table.add_column(name, justify="left" if name == "iterations" else "right")
    for kind, row in error.items():
        figures = (number(row["mape_percent"]), number(row["bias_percent"]))
        table.add_row(kind, f"{row['iterations']:,}", *figures, f"{row['not_ready']:,}")
    return table


def _lines(document: dict[str, Any]) -> list[str]:
    skipped = ", ".join(f"{count} {reason}" for reason, count in document["skipped"].items() if count)
    stores = ", ".join(
        f"{store['workload_kind']} {store['retained_observations']}{'' if store['ready'] else ' (not ready)'}"
        for store in document["stores"]
    )
    return [
        f"{document['iterations']:,} iterations read; skipped: {skipped or 'none'}",
        f"observations kept: {stores}",
        f"readiness: {document['diagnostics']['readiness']}",
    ]
