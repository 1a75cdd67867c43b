"""Recorded telemetry and requests of a real vLLM engine, shipped for the demo, tests and first steps.

See README.md beside this file for how they came about.
"""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fpmsdk.replay.formats.recorded import RecordedRun

# What a model of the recorded deployment is configured with; nothing but telemetry is known of it.
MODEL = {
    "model": "qwen3-small-random",
    "system": "cpu-2-cores",
    "backend": "vllm",
    "worker_type": "aggregated",
    "estimation_mode": "fpm_regression",
}


def train_frames() -> list[bytes]:
    """The msgpack frames of the training run, in the order in which they were published.

    >>> frames = train_frames()
    >>> len(frames), frames[0][:9]
    (15066, b'\\x87\\xa7version')
    """
    return _frames("fpm_train.bin.gz")


def eval_frames() -> list[bytes]:
    """The msgpack frames of the evaluation run.

    >>> len(eval_frames())
    9330
    """
    return _frames("fpm_eval.bin.gz")


def eval_run() -> RecordedRun:
    """The evaluation run: the engine's settings, the planned arrivals, and when each token came out.

    >>> run = eval_run()
    >>> len(run.trace), run.engine["max_num_seqs"]
    (220, 16)
    """
    return _run("requests_eval.json.gz")


def burst_frames() -> list[bytes]:
    """The msgpack frames of a run whose arrivals overload the engine.

    >>> len(burst_frames())
    1654
    """
    return _frames("fpm_burst.bin.gz")


def train_run() -> RecordedRun:
    """The requests of the training run.

    >>> len(train_run().trace)
    240
    """
    return _run("requests_train.json.gz")


def burst_run() -> RecordedRun:
    """The requests of the run that overloads the engine.

    >>> len(burst_run().trace)
    160
    """
    return _run("requests_burst.json.gz")


def launch(run: RecordedRun) -> dict[str, Any]:
    """The launch configuration with which a replay simulates the recorded engine.

    >>> launch(eval_run())["engine"]["num_gpu_blocks"]
    400
    """
    settings = dict(run.engine)
    settings.pop("enforce_eager")  # how a pass is executed, not how it is scheduled
    settings["num_gpu_blocks"] = settings.pop("num_gpu_blocks_override")
    return {"engine": {"backend": "vllm", **settings}}


def forward_pair() -> str:
    """Path of the table of the engine's self-benchmark, a whole-forward pair.

    >>> from fpmsdk.perfdb.forward_cells import open_forward_table
    >>> table = open_forward_table(forward_pair(), "cpu-2-cores", "vllm", "0.31.0")
    >>> [(len(cell.prefill), len(cell.decode)) for cell in table.cells]
    [(162, 55)]
    """
    return str(files(__name__) / "fpm_forward_perf.parquet")


def _run(name: str) -> RecordedRun:
    from fpmsdk.replay.formats.recorded import read_run

    with as_file(files(__name__) / name) as path:
        return read_run(path)


def _frames(name: str) -> list[bytes]:
    from fpmsdk.metrics import read_frames

    with as_file(files(__name__) / name) as path:
        return read_frames(path)
