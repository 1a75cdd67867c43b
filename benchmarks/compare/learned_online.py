"""Online forests beside the public peer wheel: updates, state, answers, and errors where candidates are drawn.

    python benchmarks/compare/learned_online.py [--write-evidence]

needs an environment that holds fpmsdk with its extra `train` and the peer (aisimulate); `make compare-learned` makes
one. Both learn from the same checkpoints: 150 trees of 15 leaves over 2,000 and 20,000 decode iterations made from a
seed, and forests of the recorded training stream. Exits 1 on a differing answer, a missing peer or a missed ratio.
"""

import importlib.metadata
import math
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Comparison, compare, largest_difference, report

try:
    import msgspec
    from aisimulate_core.sdk import RustForwardPassPerfModel
except ImportError as error:
    sys.exit(f"FAILED: the peer is not installed ({error}); run `make compare-learned`")

from fpmsdk import ForwardPassPerfModel, FpmBatch, sample
from fpmsdk.learned.boosting import BoostingOptions
from fpmsdk.learned.trainer import feature_names, train, training_checkpoint
from fpmsdk.learned.training_checkpoint import write_training_checkpoint

PEER_VERSION = "0.13.0.dev202610270000000085"
BASE = {"model": "tiny", "system": "cpu", "backend": "vllm", "worker_type": "decode"}
LARGE = BoostingOptions(max_iter=150, max_leaf_nodes=15)
SMALL = BoostingOptions(max_iter=20, max_leaf_nodes=8, learning_rate=0.1)
ROUNDS = 3
# Updates of a block: those of the peer take a second where rows are many.
UPDATES = {"structural": 8, "leaf_only": 60}
REQUIRED = {"structural": 10.0, "leaf_only": 5.0}
TOLERANCE = 1e-9
STREAM_FRAMES, SEEDS = 1500, 5
MOST_WORSE = 0.02
# Every candidate is tried, so that both build the same trees.
EXACT = {"split_sampling_rate": 1.0, "split_rank_tolerance": 0.0}


def decode_iterations(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Decode iterations of random sizes, whose times have a spread of five per cent."""
    numbers = random.Random(seed)
    for _ in range(count):
        requests = numbers.randint(1, 64)
        kv_tokens = requests * numbers.randint(50, 4000)
        milliseconds = (3.0 + 0.1 * requests + 2e-4 * kv_tokens) * math.exp(numbers.gauss(0.0, 0.05))
        work = {"num_decode_requests": requests, "sum_decode_kv_tokens": kv_tokens}
        yield {"wall_time": milliseconds / 1e3, "scheduled_requests": work}


def checkpoint(path: Path, frames: list[dict[str, Any]], worker_type: str, options: BoostingOptions) -> str:
    """Train forests on the frames and write them with their rows."""
    identity = ForwardPassPerfModel.learned_identity(BASE | {"worker_type": worker_type})
    batch = FpmBatch.from_dicts([[frame] for frame in frames])
    features = feature_names("fpm5", worker_type)
    made = train(batch, batch[:0], worker_type, features, options, identity=identity)
    write_training_checkpoint(path, training_checkpoint(made))
    return str(path)


def both(path: str, worker_type: str, **controls: Any) -> list[Any]:
    """The peer's model and ours over a checkpoint."""
    config = BASE | {
        "worker_type": worker_type,
        "estimation_mode": "fpm_learned",
        "fallback_policy": "deny",
        "estimator_config": {"fpm_learned": {"checkpoint_path": path} | controls},
    }
    return [model.best_available(config) for model in (RustForwardPassPerfModel, ForwardPassPerfModel)]


def compare_updates(path: str, rows: int, mode: str, facts: dict[str, Any], failures: list[str]) -> Comparison:
    """Time the updates of one mode; both are fed the same iterations."""
    models = both(path, "decode", update_mode=mode)
    items = UPDATES[mode]
    streams = [decode_iterations(items * ROUNDS + 10, 7) for _ in models]

    def feed(side: int, count: int) -> None:
        for _ in range(count):
            models[side].tune_with_fpms(next(streams[side]))

    for side in range(2):
        feed(side, 10)
    result = compare(
        f"{mode} update, {rows} rows of the past",
        lambda: feed(0, items),
        lambda: feed(1, items),
        items=items,
        required=REQUIRED[mode],
        rounds=ROUNDS,
    )
    sizes = [model.learned_online_diagnostics()["training_state_bytes"] for model in models]
    facts[f"learner state, {mode}, {rows} rows of the past (bytes)"] = {"peer": sizes[0], "ours": sizes[1]}
    if 4 * sizes[1] > sizes[0]:
        failures.append(
            f"learner state of {rows} rows, {mode}: {sizes[1]} bytes, at most a quarter of {sizes[0]} is needed"
        )
    return result


def predicted(model: Any, frames: list[dict[str, Any]]) -> list[float | None]:
    """Predict every frame before it is learned."""
    answers = []
    for frame in frames:
        answers.append(model.estimate_forward_pass_time_ms([frame]))
        model.tune_with_fpms([[frame]])
    return answers


def compare_answers(path: str, frames: list[dict[str, Any]], failures: list[str]) -> dict[str, float]:
    """Largest relative difference of answers, where both must build the same trees."""
    found = {}
    for name, controls in {
        "structural": EXACT,
        "structural, batches of 4": EXACT | {"update_every": 4, "recent_max_age_observations": 80},
        "leaf_only": {"update_mode": "leaf_only"},
        "causal_selector": EXACT | {"adaptation": "causal_selector"},
    }.items():
        found[name] = largest_difference(*(predicted(model, frames) for model in both(path, "aggregated", **controls)))
        if not found[name] <= TOLERANCE:
            failures.append(f"{name}: answers differ by {found[name]:.1e}, {TOLERANCE} is allowed")
    return found


def mean_errors(path: str, frames: list[dict[str, Any]], failures: list[str]) -> dict[str, float]:
    """Mean relative error of predictions before their tune, in per cent, over seeds of the default draw."""
    errors: list[list[float]] = [[], []]
    for seed in range(SEEDS):
        for side, model in enumerate(both(path, "aggregated", seed=seed)):
            for frame, answer in zip(frames, predicted(model, frames), strict=True):
                wall_ms = frame["wall_time"] * 1e3
                if answer is not None and wall_ms > 0:
                    errors[side].append(abs(answer - wall_ms) / wall_ms)
    peer, ours = (100.0 * sum(side) / len(side) for side in errors)
    if ours > (1.0 + MOST_WORSE) * peer:
        failures.append(f"mean error {ours:.3f} %, at most {MOST_WORSE:.0%} above the peer's {peer:.3f} % is needed")
    return {"peer": peer, "ours": ours}


def main() -> int:
    """Run everything and write the evidence."""
    failures: list[str] = []
    facts: dict[str, Any] = {}
    version = importlib.metadata.version("aisimulate")
    if version != PEER_VERSION:
        failures.append(f"the peer is aisimulate {version}, {PEER_VERSION} is expected")
    training, later = (
        [msgspec.msgpack.decode(frame) for frame in frames()] for frames in (sample.train_frames, sample.eval_frames)
    )
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for rows in (2_000, 20_000):
            path = checkpoint(Path(folder) / f"{rows} rows", list(decode_iterations(rows, 1)), "decode", LARGE)
            results += [compare_updates(path, rows, mode, facts, failures) for mode in UPDATES]
        path = checkpoint(Path(folder) / "recorded", training[:1200], "aggregated", SMALL)
        frames = later[:STREAM_FRAMES]
        facts["largest relative difference of answers while both learn"] = compare_answers(path, frames, failures)
        facts[f"mean error over {SEEDS} seeds of drawn candidates (per cent)"] = mean_errors(path, frames, failures)
    facts["peer"] = f"aisimulate {version}"
    return report("learned_online", results, facts, failures)


if __name__ == "__main__":
    sys.exit(main())
