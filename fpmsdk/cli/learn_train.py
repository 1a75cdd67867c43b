"""`fpmsdk learn train`: forests trained on recorded telemetry."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fpmsdk.cli.console import JsonOption, number, progress, show
from fpmsdk.cli.inputs import read_object, require_outputs, require_ranks
from fpmsdk.errors import ConfigError

if TYPE_CHECKING:
    from fpmsdk.metrics import FpmBatch


def train_forests(
    streams: Annotated[
        list[Path], typer.Argument(help="Telemetry in time order: .bin or .jsonl, possibly with .gz, or .parquet.")
    ],
    output: Annotated[Path, typer.Option("--output", help="The artifact to write (JSON).")],
    *,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Model configuration (JSON) of the deployment; its identity is kept."),
    ] = None,
    worker_type: Annotated[
        str | None, typer.Option("--worker-type", help="Role of the worker without --config.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="A new directory that an online learner starts from; needs --config."),
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(
            "--features",
            help="v1, fpm5, atomic5, atomic10, sglang18, hisim, all, or names with commas between; by default atomic5 "
            "for decode workers, else atomic10.",
        ),
    ] = None,
    validation: Annotated[
        list[Path] | None, typer.Option("--validation", help="Later telemetry to measure errors on; may be repeated.")
    ] = None,
    validation_fraction: Annotated[
        float | None,
        typer.Option(
            "--validation-fraction", help="Without --validation: the last part of the streams; 0.2 by default."
        ),
    ] = None,
    grouping: Annotated[
        str, typer.Option("--grouping", help="none: a message is an iteration; counter: by worker_id and counter_id.")
    ] = "none",
    target: Annotated[str, typer.Option("--target", help="log_ms or ms.")] = "log_ms",
    max_iter: Annotated[int, typer.Option("--max-iter", help="Trees of each workload kind.")] = 600,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Shrinkage of every tree.")] = 0.05,
    max_leaf_nodes: Annotated[int, typer.Option("--max-leaf-nodes", help="Leaves of a tree at most.")] = 31,
    min_samples_leaf: Annotated[int, typer.Option("--min-samples-leaf", help="Rows of a leaf at least.")] = 5,
    min_store_rows: Annotated[
        int, typer.Option("--min-store-rows", help="Workload kinds with fewer rows are not trained.")
    ] = 20,
    seed: Annotated[int, typer.Option("--seed", help="Of the sample that bins are found on, beyond 200,000 rows.")] = 0,
    json: JsonOption = False,
) -> None:
    """Train a forest per workload kind; report its errors on later iterations beside those of two simple predictors."""
    from fpmsdk.files import whole_file
    from fpmsdk.learned.boosting import BoostingOptions
    from fpmsdk.learned.streams import read_stream
    from fpmsdk.learned.trainer import feature_names, train, training_checkpoint
    from fpmsdk.learned.training_checkpoint import write_training_checkpoint
    from fpmsdk.metrics import FpmBatch

    role, identity = _deployment(config, worker_type)
    if checkpoint is not None:
        _check_checkpoint(checkpoint, identity)
    require_outputs({"--output": output, "--checkpoint": checkpoint}, [*streams, *(validation or [])])
    if validation and validation_fraction is not None:
        raise ConfigError("--validation-fraction has no effect beside --validation; give one of them", "validation")
    names = feature_names(features, role)
    parts = {path: read_stream(path, grouping) for path in (*streams, *(validation or []))}
    if identity is not None:
        for path, part in parts.items():
            require_ranks(part, identity["attention_dp"], str(path))
    batch = FpmBatch.concatenate([parts[path] for path in streams])
    if validation:
        later = FpmBatch.concatenate([parts[path] for path in validation])
    else:
        batch, later = _split(batch, 0.2 if validation_fraction is None else validation_fraction)
    options = BoostingOptions(
        target, max_iter, learning_rate, max_leaf_nodes, min_samples_leaf=min_samples_leaf, seed=seed
    )
    with progress("training") as advance:
        trained = train(
            batch, later, role, names, options, identity=identity, min_store_rows=min_store_rows, advance=advance
        )
    content = trained.artifact.to_json_bytes()
    with whole_file(output) as file:
        file.write(content)
        if checkpoint is not None:  # both or neither
            write_training_checkpoint(checkpoint, training_checkpoint(trained))
    document: dict[str, Any] = {
        "artifact": str(output),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "bytes": len(content),
        "features": list(names),
        "training_iterations": len(batch),
        "validation_iterations": len(later),
        "train_rows": trained.artifact.metadata["train_rows"],
        "train_left_out": trained.left_out,
        "report": trained.report,
    }
    show(document, json, _table(trained.report), *_lines(document))


def _deployment(config: Path | None, worker_type: str | None) -> tuple[str, dict[str, Any] | None]:
    """Role and identity of the deployment."""
    from fpmsdk._ext.features import ROLES
    from fpmsdk.learned.identity import learned_identity
    from fpmsdk.perfmodel.model import ForwardPassPerfModel

    if config is None:
        if worker_type not in ROLES:
            raise ConfigError(
                f"--worker-type: expected one of {', '.join(ROLES)}, or --config, found {worker_type!r}", "worker_type"
            )
        return worker_type, None
    if worker_type is not None:
        raise ConfigError("--worker-type is part of the --config file; give it there", "worker_type")
    written = read_object(config, "the model configuration")
    # The identity does not depend on the estimator, and an artifact that is about to be trained cannot be read.
    written = {name: value for name, value in written.items() if name not in ("estimator_config", "forward_model")}
    canonical = ForwardPassPerfModel.normalize_config(written | {"estimation_mode": "fpm_regression"})
    return canonical["worker_type"], learned_identity(canonical)


def _check_checkpoint(checkpoint: Path, identity: dict[str, Any] | None) -> None:
    # Before training, which takes long.
    if identity is None:
        raise ConfigError(
            "--checkpoint needs --config: only the deployment that it is of may go on from it", "checkpoint"
        )
    if os.path.lexists(checkpoint):
        raise ConfigError(f"--checkpoint: {checkpoint} exists; one is only written where nothing is", "checkpoint")


def _split(batch: "FpmBatch", fraction: float) -> "tuple[FpmBatch, FpmBatch]":
    if not 0.0 <= fraction < 1.0:
        raise ConfigError(f"--validation-fraction: expected 0 up to, not including, 1, found {fraction}")
    training = len(batch) - round(len(batch) * fraction)
    return batch[:training], batch[training:]


_PREDICTORS = {"forest": "forest", "last_value": "last value", "linear": "linear"}
_FIGURES = ("mape", "median", "p95")


def _table(report: dict[str, Any]) -> Table:
    table = Table(title="errors on later iterations, %")
    for name in ("iterations", "predictor"):
        table.add_column(name)
    for name in ("count", "mean", "median", "p95"):
        table.add_column(name, justify="right")
    for kind in report["forest"]:
        shown = kind
        for predictor, title in _PREDICTORS.items():
            row = report[predictor][kind]
            table.add_row(
                shown, title, f"{row['iterations']:,}", *(number(row[f"{figure}_percent"]) for figure in _FIGURES)
            )
            shown = ""
        table.add_section()
    return table


def _lines(document: dict[str, Any]) -> list[str]:
    report = document["report"]
    rows = ", ".join(f"{kind} {count:,}" for kind, count in document["train_rows"].items())
    before = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in document["train_left_out"].items())
    after = ", ".join(f"{report[name]:,} {name}" for name in ("refused", "unpredicted", "untimed", "idle"))
    return [
        f"trained on {sum(document['train_rows'].values()):,} iterations: {rows}",
        f"of {document['training_iterations']:,} left out: {before}",
        f"of {document['validation_iterations']:,} later ones left out: {after}",
        f"wrote {document['artifact']} ({document['bytes']:,} bytes)",
        *([f"wrote {document['checkpoint']}"] if document["checkpoint"] else []),
    ]
