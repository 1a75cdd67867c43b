"""What subcommands read: JSON documents, recorded telemetry, and the model that a configuration describes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fpmsdk.errors import ConfigError, MetricsError

if TYPE_CHECKING:
    from fpmsdk.metrics import FpmBatch
    from fpmsdk.perfmodel.model import ForwardPassPerfModel

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="Canonical model configuration (JSON). Without it: a regression for vLLM."),
]
WorkerTypeOption = Annotated[
    str | None, typer.Option("--worker-type", help="Role of the worker without --config; aggregated by default.")
]
AttentionDpOption = Annotated[
    int | None, typer.Option("--attention-dp", help="Attention-DP ranks without --config; 1 by default.")
]


def read_json(path: Path, what: str) -> Any:
    """Parse a JSON file, or standard input for `-`, as strictly as a configuration."""
    from fpmsdk.config import jsontext

    text = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    try:
        return jsontext.read_json(text.decode())
    except jsontext.JsonFault as fault:
        at = f" at {fault.path}" if fault.path else ""
        raise ConfigError(f"{path}: {what} is not JSON{at}: {fault}", fault.path) from None
    except UnicodeDecodeError as fault:
        raise ConfigError(f"{path}: {what} is not JSON: {fault}") from None


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Parse a JSON file that holds one object."""
    document = read_json(path, what)
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: {what} is a JSON object, found {type(document).__name__}")
    return document


def build_model(config: Path | None, worker_type: str | None, attention_dp: int | None) -> ForwardPassPerfModel:
    """The model of a configuration file, or a regression that needs no data."""
    from fpmsdk import ForwardPassPerfModel

    if config is None:
        return ForwardPassPerfModel.best_available(
            {
                "model": "unnamed",
                "system": "unprofiled",
                "backend": "vllm",
                "worker_type": "aggregated" if worker_type is None else worker_type,
                "attention_dp": 1 if attention_dp is None else attention_dp,
                "estimation_mode": "fpm_regression",
            }
        )
    if worker_type is not None or attention_dp is not None:
        raise ConfigError("--worker-type and --attention-dp are part of the --config file; give them there")
    return ForwardPassPerfModel.best_available(read_object(config, "the model configuration"))


def tuned_model(
    frames: Sequence[Path], config: Path | None, worker_type: str | None, attention_dp: int | None
) -> ForwardPassPerfModel:
    """The model of `build_model`, tuned on recorded streams."""
    from fpmsdk import FpmBatch

    model = build_model(config, worker_type, attention_dp)
    for path in frames:
        iterations = read_iterations(path, model)
        with blaming(path):
            model.tune_with_fpms(FpmBatch.from_frames(iterations))
    return model


def read_iterations(path: Path, model: ForwardPassPerfModel) -> list[Any]:
    """Iterations of a recorded stream.

    Parameters
    ----------
    path: a frame file (.bin) or a recorder file (.jsonl), possibly with .gz.
    model: says how many attention-DP ranks report each iteration.

    Returns
    -------
    Encoded frames, or for more than one rank lists of messages; at least one.
    """
    from fpmsdk.metrics import FpmStream, group_ranks, read_frames

    attention_dp = model.diagnostics()["provenance"]["config"]["attention_dp"]
    ending = Path(path.name.removesuffix(".gz")).suffix
    if ending == ".bin":
        frames = read_frames(path)
    elif ending == ".jsonl":
        frames = list(FpmStream(path).frames())
    else:
        raise MetricsError(f"{path}: telemetry is a frame file (.bin) or a recorder file (.jsonl), or either with .gz")
    with blaming(path):
        iterations: list[Any] = list(frames) if attention_dp == 1 else list(group_ranks(frames, attention_dp))
    if not iterations:
        raise MetricsError(f"{path}: holds no iteration; give a recording of an engine at work")
    return iterations


def require_ranks(batch: FpmBatch, attention_dp: int, place: str) -> None:
    """Refuse iterations of more or of fewer ranks than the deployment has.

    Parameters
    ----------
    batch: iterations, some of all ranks.
    attention_dp: ranks of the deployment.
    place: which telemetry to blame.

    Raises
    ------
    MetricsError: says both counts.
    """
    import numpy as np

    ranks = int(np.diff(batch.iteration_offsets).max(initial=0))
    if len(batch) and ranks != attention_dp:
        raise MetricsError(
            f"{place}: expected iterations of {attention_dp} ranks, as attention_dp says, found {ranks}; give the "
            "attention_dp of the deployment, or a table (.parquet) whose column iteration groups the ranks"
        )


def require_outputs(outputs: dict[str, Path | None], inputs: Sequence[Path]) -> None:
    """Refuse files to write, by their option, that cannot be written, that are read too, or that are one file.

    Raises
    ------
    ConfigError: names the option; nothing was written.
    """
    taken = {path.resolve(): f"the telemetry {path}" for path in inputs}
    for option, path in outputs.items():
        if path is None:
            continue
        if str(path) == "-":
            raise ConfigError(f"{option}: expected a file to write, found '-'; standard output is the report's", option)
        if path.is_dir() or not path.name:
            raise ConfigError(f"{option}: expected a file to write, found the directory {str(path)!r}", option)
        if not path.parent.is_dir():
            raise ConfigError(f"{option}: {path.parent} is no directory; make it first", option)
        if path.resolve() in taken:
            raise ConfigError(f"{option}: {path} would replace {taken[path.resolve()]}; give another name", option)
        taken[path.resolve()] = f"the file of {option}"


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Name the file in errors about its iterations: with several files a number alone says little."""
    try:
        yield
    except MetricsError as fault:
        raise type(fault)(f"{path}: {fault}") from None
