"""The regression model beside the public peer wheel: estimates, tuning, diagnostics, import.

    python benchmarks/compare/regression.py [--write-evidence]

needs an environment that holds fpmsdk, the peer (aisimulate) and Dynamo; `make compare-regression` makes one. Exits 1
on a differing answer, a missing peer or a missed ratio.
"""

import importlib.metadata
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from harness import Comparison, compare, largest_difference, report

try:
    import msgspec
    from aisimulate_core.sdk import RustForwardPassPerfModel
    from dynamo.common.forward_pass_metrics import ForwardPassMetrics as DynamoMetrics
except ImportError as error:
    sys.exit(f"FAILED: the peer is not installed ({error}); run `make compare-regression`")

from fpmsdk import ForwardPassPerfModel, FpmBatch, sample

PEER_VERSION = "0.13.0.dev202610270000000085"
NUM_FRAMES = 4000
BASE = {
    "model": "tiny",
    "system": "cpu",
    "backend": "vllm",
    "worker_type": "aggregated",
    "estimation_mode": "fpm_regression",
}
ERROR_THRESHOLD = {
    "kind": "error_threshold",
    "relative_tolerance": 0.1,
    "absolute_tolerance_ms": 0.5,
    "window": 8,
    "trigger": 4,
    "cooldown": 16,
}
CONFIGS = {
    "default": BASE,
    "1024 rows": BASE
    | {"estimator_config": {"fpm_regression": {"sampling": {"bins_per_axis": [16, 16], "max_observations": 1024}}}},
    "error threshold": BASE
    | {"estimator_config": {"fpm_regression": {"fit": {"linear": {"update_policy": ERROR_THRESHOLD}}}}},
}
TOLERANCE = 1e-9

# Deltas of time and resident memory from "numpy and pydantic are imported" to "first regression estimate".
IMPORT_PROBE = """
import resource, time
import numpy, pydantic
def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6
memory, begin = resident_mb(), time.perf_counter()
from fpmsdk import ForwardPassPerfModel
model = ForwardPassPerfModel.best_available({"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode",
    "estimation_mode": "fpm_regression", "estimator_config": {"fpm_regression": {"min_observations": 2}}})
for n in (1, 2):
    model.tune_with_fpms({"wall_time": n / 1000, "scheduled_requests": {"num_decode_requests": n}})
assert model.estimate_forward_pass_time_ms({"scheduled_requests": {"num_decode_requests": 3}}) is not None
print((time.perf_counter() - begin) * 1e3, resident_mb() - memory)
"""


def compare_streams(frames: list[dict[str, Any]], failures: list[str]) -> dict[str, float]:
    """Predict, then tune, frame by frame in both; the largest relative difference per configuration."""
    differences = {}
    for name, config in CONFIGS.items():
        peer, ours = RustForwardPassPerfModel.best_available(config), ForwardPassPerfModel.best_available(config)
        answers: tuple[list[float | None], list[float | None]] = ([], [])
        for frame in frames:
            for model, out in zip((peer, ours), answers, strict=True):
                out.append(model.estimate_forward_pass_time_ms(frame))
                model.tune_with_fpms([[frame]])
        differences[name] = largest_difference(*answers)
        if differences[name] > TOLERANCE:
            failures.append(f"stream of {len(frames)} frames, {name}: answers differ by {differences[name]:.3g}")
    return differences


def import_cost(failures: list[str]) -> dict[str, float]:
    """Least time and memory of several fresh processes."""
    runs = []
    for _ in range(7):
        output = subprocess.run(
            [sys.executable, "-P", "-c", IMPORT_PROBE], capture_output=True, text=True, check=True
        ).stdout
        runs.append(tuple(map(float, output.split())))
    cost = {"import_and_first_estimate_ms": min(t for t, _ in runs), "import_memory_mb": min(m for _, m in runs)}
    if cost["import_and_first_estimate_ms"] > 20.0:
        failures.append(f"import and first estimate take {cost['import_and_first_estimate_ms']:.1f} ms, 20 allowed")
    if cost["import_memory_mb"] > 5.0:
        failures.append(f"import and first estimate take {cost['import_memory_mb']:.1f} MB, 5 allowed")
    return cost


def repeat(call: Callable[[], object], times: int) -> None:
    """Call without keeping the results."""
    for _ in range(times):
        call()


def each(tune: Callable[[Any], object], iterations: list[list[dict[str, Any]]]) -> None:
    """Tune with one iteration a call."""
    for iteration in iterations:
        tune([iteration])


def compare_speed(frames: list[dict[str, Any]], failures: list[str]) -> list[Comparison]:
    """Every gated operation over the same distinct frames in shuffled order."""
    messages = [msgspec.convert(frame, DynamoMetrics) for frame in frames]
    iterations = [[frame] for frame in frames]
    peer, ours = RustForwardPassPerfModel.best_available(BASE), ForwardPassPerfModel.best_available(BASE)
    for model in (peer, ours):
        model.tune_with_fpms(iterations)
    batch = FpmBatch.from_dicts(frames)
    answers: dict[str, list[float | None]] = {}
    learners: dict[str, Any] = {}

    def fresh_learners() -> None:
        learners["peer"] = RustForwardPassPerfModel.best_available(BASE)
        learners["ours"] = ForwardPassPerfModel.best_available(BASE)

    def keep(name: str, values: Any) -> None:
        answers[name] = list(values)

    peer_estimate, our_estimate = peer.estimate_forward_pass_time_ms, ours.estimate_forward_pass_time_ms
    size = len(frames)
    results = [
        compare(
            "estimate, dict",
            lambda: keep("peer dict", map(peer_estimate, frames)),
            lambda: keep("our dict", map(our_estimate, frames)),
            items=size,
            required=8.0,
        ),
        compare(
            "estimate, columnar",
            lambda: keep("peer dict", map(peer_estimate, frames)),
            lambda: keep("our columns", ours.estimate_many(batch)),
            items=size,
            required=60.0,
        ),
        compare(
            "estimate, Dynamo message",
            lambda: keep("peer message", map(peer_estimate, map(msgspec.to_builtins, messages))),
            lambda: keep("our message", map(our_estimate, messages)),
            items=size,
            required=8.0,
        ),
        compare(
            "tune, one batch",
            lambda: learners["peer"].tune_with_fpms(iterations),
            lambda: learners["ours"].tune_with_fpms(iterations),
            items=size,
            required=4.0,
            prepare=fresh_learners,
        ),
        compare(
            "tune, one by one",
            lambda: each(learners["peer"].tune_with_fpms, iterations),
            lambda: each(learners["ours"].tune_with_fpms, iterations),
            items=size,
            required=4.0,
            prepare=fresh_learners,
        ),
        compare(
            "tune, columnar batch",
            lambda: learners["peer"].tune_with_fpms(iterations),
            lambda: learners["ours"].tune_with_fpms(batch),
            items=size,
            required=4.0,
            prepare=fresh_learners,
        ),
        compare(
            "diagnostics()",
            lambda: repeat(peer.diagnostics, 5000),
            lambda: repeat(ours.diagnostics, 5000),
            items=5000,
            required=8.0,
        ),
    ]
    for name, values in answers.items():
        difference = largest_difference(answers["peer dict"], values)
        if difference > TOLERANCE:
            failures.append(f"{name}: answers differ by {difference:.3g}")
    if peer.diagnostics() != ours.diagnostics():
        failures.append("diagnostics() differ")
    return results


def main() -> int:
    """Run everything and write the evidence."""
    failures: list[str] = []
    version = importlib.metadata.version("aisimulate")
    if version != PEER_VERSION:
        failures.append(f"the peer is aisimulate {version}, {PEER_VERSION} is expected")
    streams = {name: [msgspec.msgpack.decode(f) for f in frames()] for name, frames in STREAMS.items()}
    shuffled = random.Random(7).sample([f for f in streams["eval"] if f["wall_time"] > 0], NUM_FRAMES)
    results = compare_speed(shuffled, failures)
    facts: dict[str, Any] = {
        "peer": f"aisimulate {version}",
        "distinct frames": len({msgspec.msgpack.encode(frame) for frame in shuffled}),
        "largest relative difference of predictions after every tune": {
            name: compare_streams(frames, failures) for name, frames in streams.items()
        },
    }
    return report("regression", results, facts | import_cost(failures), failures)


STREAMS = {"train": sample.train_frames, "eval": sample.eval_frames}

if __name__ == "__main__":
    sys.exit(main())
