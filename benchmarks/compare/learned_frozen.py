"""Frozen forests beside the public peer wheel: estimates one by one and in a batch, and answers through tuning.

    python benchmarks/compare/learned_frozen.py [--write-evidence]

needs an environment that holds fpmsdk with its extra `train` and the peer (aisimulate); `make compare-learned` makes
one. The forests are trained on the recorded training stream (150 trees of 15 leaves, features fpm5) and given to both.
Exits 1 on a differing bit, a missing peer or a missed ratio.
"""

import dataclasses
import importlib.metadata
import random
import sys
from typing import Any

from harness import Comparison, compare, report

try:
    import msgspec
    from aisimulate_core.sdk.rust_engine_step import RustForwardPassPerfModel
except ImportError as error:
    sys.exit(f"FAILED: the peer is not installed ({error}); run `make compare-learned`")

from fpmsdk import ForwardPassPerfModel, FpmBatch, sample
from fpmsdk.learned.boosting import BoostingOptions
from fpmsdk.learned.trainer import feature_names, train

PEER_VERSION = "0.13.0.dev202610270000000085"
NUM_FRAMES = 4000
OPTIONS = BoostingOptions(max_iter=150, max_leaf_nodes=15)
# Presets of features; the recorded frames carry no lists, so request features get some made up.
PRESETS = ("fpm5", "v1", "atomic10")
STREAM_FRAMES = 2000
# How often a batch holds every iteration: a single pass over them ends within one time slice of the machine.
REPEATED = 20


def with_lists(frame: dict[str, Any]) -> dict[str, Any]:
    """The frame with per-request lists that agree with its sums."""
    requests = frame["scheduled_requests"]
    parts = (
        (requests["num_prefill_requests"], requests["sum_prefill_tokens"], requests["sum_prefill_kv_tokens"]),
        (requests["num_decode_requests"], requests["num_decode_requests"], requests["sum_decode_kv_tokens"]),
    )
    extend, past = [], []
    for count, tokens, kv in parts:
        for i in range(count):
            extend.append(tokens // count + (i < tokens % count))
            past.append(kv // count + (i < kv % count))
    return frame | {"scheduled_requests": requests | {"extend_lengths": extend, "past_kv_lengths": past}}


def artifact_of(preset: str, frames: list[dict[str, Any]]) -> str:
    """JSON text of forests trained on the frames."""
    batch = FpmBatch.from_dicts(frames)
    made = train(batch, batch[:0], "aggregated", feature_names(preset, "aggregated"), OPTIONS)
    return made.artifact.to_json_bytes().decode()


def differing(peer: list[float | None], ours: list[float | None]) -> int:
    """How many answers differ in some bit."""
    return sum(one != other for one, other in zip(peer, ours, strict=True))


def compare_speed(preset: str, artifact: str, frames: list[dict[str, Any]], failures: list[str]) -> list[Comparison]:
    """Estimates of distinct frames in shuffled order; answers are compared bit by bit."""
    peer, ours = (model.from_learned(artifact) for model in (RustForwardPassPerfModel, ForwardPassPerfModel))
    repeated = FpmBatch.from_dicts(frames * REPEATED)
    answers: dict[str, list[float | None]] = {}

    def keep(name: str, values: Any) -> None:
        answers[name] = values if isinstance(values, list) else values[: len(frames)].tolist()

    peer_estimate, our_estimate = peer.estimate_forward_pass_time_ms, ours.estimate_forward_pass_time_ms
    results = [
        compare(
            f"{preset}: estimate, dict",
            lambda: keep("peer", list(map(peer_estimate, frames))),
            lambda: keep("our dict", list(map(our_estimate, frames))),
            items=len(frames),
            required=10.0,
            rounds=41,  # our blocks are short next to what else the machine does
        ),
        compare(
            f"{preset}: estimate, columnar",
            lambda: keep("peer", list(map(peer_estimate, frames))),
            lambda: keep("our columns", ours.estimate_many(repeated)),
            items=len(frames),
            required=50.0,
        ),
    ]
    results[1] = dataclasses.replace(
        results[1],
        ours_min_us=results[1].ours_min_us / REPEATED,
        ours_median_us=results[1].ours_median_us / REPEATED,
    )
    counts = {name: differing(answers["peer"], answers[name]) for name in ("our dict", "our columns")}
    failures += [f"{preset}, {name}: {count} answers differ" for name, count in counts.items() if count]
    return results


def compare_streams(preset: str, artifact: str, frames: list[dict[str, Any]], failures: list[str]) -> int:
    """Predict, then tune the hybrid correction, frame by frame in both; returns how many answers differ."""
    answers: list[list[float | None]] = []
    models = [model.from_learned(artifact) for model in (RustForwardPassPerfModel, ForwardPassPerfModel)]
    for model in models:
        predicted = []
        for frame in frames:
            predicted.append(model.estimate_forward_pass_time_ms(frame))
            model.tune_with_fpms([[frame]])
        answers.append(predicted)
    count = differing(*answers)
    if count:
        failures.append(f"{preset}: {count} of {len(frames)} answers differ while both learn")
    if models[0].diagnostics() != models[1].diagnostics():
        failures.append(f"{preset}: diagnostics() differ")
    return count


def main() -> int:
    """Run everything and write the evidence."""
    failures: list[str] = []
    version = importlib.metadata.version("aisimulate")
    if version != PEER_VERSION:
        failures.append(f"the peer is aisimulate {version}, {PEER_VERSION} is expected")
    training, later = (
        [frame for frame in map(msgspec.msgpack.decode, frames()) if frame["wall_time"] > 0]
        for frames in (sample.train_frames, sample.eval_frames)
    )
    chosen = random.Random(7).sample(later, NUM_FRAMES)
    results: list[Comparison] = []
    streams, distinct = {}, {}
    for preset in PRESETS:
        adapt = with_lists if preset.startswith("atomic") else dict
        artifact = artifact_of(preset, list(map(adapt, training)))
        asked = list(map(adapt, chosen))
        distinct[preset] = len({msgspec.msgpack.encode(frame["scheduled_requests"]) for frame in asked})
        results += compare_speed(preset, artifact, asked, failures)
        streams[preset] = compare_streams(preset, artifact, list(map(adapt, later[:STREAM_FRAMES])), failures)
    facts: dict[str, Any] = {
        "peer": f"aisimulate {version}",
        "forests": f"{OPTIONS.max_iter} trees of {OPTIONS.max_leaf_nodes} leaves for each workload kind",
        "distinct scheduled requests asked for": distinct,
        f"answers that differ over {STREAM_FRAMES} frames while both learn": streams,
    }
    return report("learned_frozen", results, facts, failures)


if __name__ == "__main__":
    sys.exit(main())
