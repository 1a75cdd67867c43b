"""Recorded telemetry and requests of a real vLLM engine, shipped for the demo, tests and first steps.

See README.md beside this file for how they came about.
"""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fpmsdk.replay.formats.recorded import RecordedRun

MODEL = {
    "model": "qwen3-small-random",
    "system": "cpu-2-cores",
    "backend": "vllm",
    "worker_type": "aggregated",
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
    from fpmsdk.replay.formats.recorded import read_run

    with as_file(files(__name__) / "requests_eval.json.gz") as path:
        return read_run(path)


def _frames(name: str) -> list[bytes]:
    from fpmsdk.metrics import read_frames

    with as_file(files(__name__) / name) as path:
        return read_frames(path)
