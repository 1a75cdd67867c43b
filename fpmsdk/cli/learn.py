"""`fpmsdk learn`: train forests; set estimators beside each other on a recorded stream."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fpmsdk.cli.console import number, progress, reports_errors, show
from fpmsdk.cli.inputs import AttentionDpOption, WorkerTypeOption, read_object, require_outputs, require_ranks
from fpmsdk.cli.learn_train import train_forests
from fpmsdk.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fpmsdk.metrics import FpmBatch
    from fpmsdk.perfmodel.model import ForwardPassPerfModel

learn = typer.Typer(name="learn", help="Estimators that learn from telemetry.", no_args_is_help=True)


def compare(
    stream: Annotated[Path, typer.Argument(help="Telemetry: .bin or .jsonl, possibly with .gz, or .parquet.")],
    *,
    train: Annotated[
        list[Path] | None, typer.Option(help="A stream that all learn from first, without being judged; repeatable.")
    ] = None,
    estimator: Annotated[
        list[str] | None, typer.Option(help="Only this one of the known estimators; repeatable.")
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(help="Also the model of this configuration (JSON), named after the file; repeatable."),
    ] = None,
    worker_type: WorkerTypeOption = None,
    attention_dp: AttentionDpOption = None,
    plot: Annotated[Path | None, typer.Option(help="Write the errors as an HTML page; needs the extra report.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures as JSON to this file; - is stdout.")] = None,
) -> None:
    """Predict each iteration of a stream, then learn from it, with every estimator; compare their errors.

    With --config and without --estimator only the given configurations are compared.
    """
    import msgspec

    from fpmsdk.cli.learn_plot import require_plot, write_plot
    from fpmsdk.files import whole_file
    from fpmsdk.perfmodel.prequential import compare_estimators

    for path in (*(train or []), stream):
        path.open("rb").close()  # a missing one is reported before the others take their time
    written = None if json is None or str(json) == "-" else json
    require_outputs({"--plot": plot, "--json": written}, [*(train or []), stream])
    if plot is not None:
        require_plot(plot)
    if config and not estimator and (worker_type is not None or attention_dp is not None):
        raise ConfigError("--worker-type and --attention-dp are part of the --config files; give them there")
    models = _models(estimator, config or [], worker_type or "aggregated", 1 if attention_dp is None else attention_dp)
    ranks = _ranks(models)
    with progress("comparing") as advance:
        document = {"stream": str(stream), "train": [str(path) for path in train or []]} | compare_estimators(
            models,
            _portions(stream, ranks),
            train=(portion for path in train or [] for portion in _portions(path, ranks)),
            advance=advance,
        )
    if plot is not None:
        write_plot(document, plot)
    if written is not None:
        with whole_file(written) as file:
            file.write(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    show(document, str(json) == "-", _table(document), *_lines(document))


def _models(
    names: list[str] | None, configs: list[Path], worker_type: str, attention_dp: int
) -> dict[str, ForwardPassPerfModel]:
    from fpmsdk import ForwardPassPerfModel
    from fpmsdk.perfmodel.prequential import build_estimators

    identity = {
        "model": "unnamed",
        "system": "unprofiled",
        "backend": "vllm",
        "worker_type": worker_type,
        "attention_dp": attention_dp,
    }
    models = {} if configs and names is None else build_estimators(identity, names)
    for path in configs:
        if path.stem in models:
            raise ConfigError(f"{path}: there is an estimator {path.stem!r} already; rename the file", "config")
        models[path.stem] = ForwardPassPerfModel.best_available(read_object(path, "the model configuration"))
    return models


def _ranks(models: dict[str, ForwardPassPerfModel]) -> int:
    # The stream is that of one deployment.
    ranks = {name: model.diagnostics()["provenance"]["config"]["attention_dp"] for name, model in models.items()}
    if len(set(ranks.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in ranks.items())
        raise ConfigError(f"attention_dp: expected the same of all that are compared, found {told}", "attention_dp")
    return int(next(iter(ranks.values())))


def _portions(path: Path, attention_dp: int) -> Iterator[FpmBatch]:
    from fpmsdk.metrics.portions import read_portions

    for portion in read_portions(path, attention_dp=attention_dp):
        require_ranks(portion, attention_dp, str(path))
        yield portion


_COLUMNS = {
    "iterations": ("measured", 0),
    "cold_start_iterations": ("cold", 0),
    "mape_percent": ("MAPE %", 2),
    "median_error_ms": ("med ms", 3),
    "p95_error_ms": ("p95 ms", 3),
    "update_us": ("update us", 2),
}


def _table(document: dict[str, Any]) -> Table:
    table = Table(padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("kind")
    table.add_column("estimator", no_wrap=True)
    for title, _ in _COLUMNS.values():
        table.add_column(title, justify="right")
    for kind in next(iter(document["estimators"].values()))["error"]:
        shown = kind
        for name, told in document["estimators"].items():
            row = told["error"][kind]
            table.add_row(shown, name, *(number(row[field], digits) for field, (_, digits) in _COLUMNS.items()))
            shown = ""
        table.add_section()
    return table


def _lines(document: dict[str, Any]) -> list[str]:
    learned = f" after learning from {document['train_iterations']:,}" if document["train"] else ""
    return [
        f"{document['iterations']:,} iterations, each predicted before it was learned from{learned}",
        "cold: iterations before the first answer; med, p95: of the absolute error; update: mean time of learning one",
    ]


for name, command in (("train", train_forests), ("compare", compare)):
    learn.command(name)(reports_errors(command))
