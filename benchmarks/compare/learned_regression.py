"""Every regression beside the public peer wheel: selected features, splines, update policies, worker types.

    python benchmarks/compare/learned_regression.py [--first N] [--write-evidence]

Predicts, then tunes, iteration by iteration in both, over three recorded streams and random iterations of several
ranks; `make compare-learned` makes the environment. Exits 1 on a differing answer, refusal or counter, a missing peer
or a missed ratio.
"""

import argparse
import importlib.metadata
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from harness import Comparison, compare, largest_difference, report

try:
    import msgspec
    from aisimulate_core.sdk import RustForwardPassPerfModel
except ImportError as error:
    sys.exit(f"FAILED: the peer is not installed ({error}); run `make compare-learned`")

from fpmsdk import ForwardPassPerfModel, sample

PEER_VERSION = "0.13.0.dev202610270000000085"
TOLERANCE = 1e-9
ROLES = ("aggregated", "prefill", "decode")
STREAMS = {"train": sample.train_frames, "eval": sample.eval_frames, "burst": sample.burst_frames}
# The axes that need nothing but counts, then those of the per-request lists.
AXES = ("attention", "moe", "n", "logN", "n2")
AXES += ("E", "P", "maxE", "maxP", "minP", "P2", "F", "nE", "logF", "logP", "meanE", "meanP", "cvE2", "cvP2")

Iteration = list[dict[str, Any]]


class Case(NamedTuple):
    """A named regression and whether its axes read per-request lists."""

    name: str
    section: dict[str, Any]
    lists: bool = False


def spline(name: str, sampling: tuple[int, int] | None = None, interval: int | None = None, **options: Any) -> Case:
    section: dict[str, Any] = {"fit": {"kind": "spline", "rebuild_interval": interval}}
    if options:
        section["fit"]["spline"] = options
    if sampling:
        section["sampling"] = {"bins_per_axis": [sampling[0]] * 2, "max_observations": sampling[1]}
    return Case(f"spline {name}", section)


def adaptive(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "adaptive",
        "window": 16,
        "trigger": 8,
        "tolerance": 0.05,
        "absolute_tolerance_ms": 1.0,
        "cooldown": 64,
    } | changes


def periodic(step: int) -> dict[str, Any]:
    return {"kind": "periodic", "step": step}


SPLINES = [
    spline("adaptive"),
    spline("adaptive, 1,024 rows", (16, 1024)),
    spline("adaptive, 3 knots, 256 rows", (8, 256), knots_per_axis=3),
    spline(
        "adaptive, nervous",
        knots_per_axis=3,
        search=adaptive(window=6, trigger=2, tolerance=0.02, absolute_tolerance_ms=0.1, cooldown=9),
    ),
    spline("adaptive, 32 rows, rebuilt", (2, 32), 40),
    spline("periodic, 3 knots", knots_per_axis=3, search=periodic(50)),
    spline("periodic, 2 knots, rebuilt", (4, 128), 37, search=periodic(333)),
]


def selected(numbers: random.Random, dimensions: int, lists: bool) -> Case:
    """A random choice of axes, retention, signs, update policy and rebuild interval."""
    known = AXES if lists else AXES[:5]
    axes = numbers.sample(known, dimensions)
    sampling_axes = numbers.sample(known, numbers.randint(1, 3))
    policy: dict[str, Any] = {"kind": "always"}
    if numbers.random() < 0.5:
        window = numbers.randint(2, 20)
        policy = {
            "kind": "error_threshold",
            "relative_tolerance": numbers.choice([0.0, 0.05, 0.2]),
            "absolute_tolerance_ms": numbers.choice([0.0, 0.5]),
            "window": window,
            "trigger": numbers.randint(1, window),
            "cooldown": numbers.randint(1, 40),
            "startup_observations": numbers.randint(1, 30),
        }
    signed, interval = numbers.random() < 0.4, numbers.choice([None, None, 1, 17, 500])
    section = {
        "sampling": {
            "axes": sampling_axes,
            "bins_per_axis": [numbers.randint(1, 6) for _ in sampling_axes],
            "max_observations": numbers.choice([16, 64, 300]),
        },
        "min_observations": numbers.randint(1, 12),
        "fit": {
            "rebuild_interval": interval,
            "linear": {"feature_axes": axes, "non_negative": not signed, "update_policy": policy},
        },
    }
    name = f"selected {'+'.join(axes)} over {'+'.join(sampling_axes)}, {policy['kind']}"
    return Case(f"{name}{', signed' if signed else ''}, interval {interval}", section, lists)


def cases() -> list[Case]:
    numbers = random.Random(20261027)
    chosen = [selected(numbers, d, lists) for d in range(1, 7) for lists in (False, True, True) if d < 6 or lists]
    return SPLINES + chosen


def for_role(scheduled: dict[str, Any], role: str) -> dict[str, Any]:
    """What is left for a worker of one role."""
    removed = {"prefill": "decode", "decode": "prefill"}.get(role)
    return {name: 0 if removed is not None and removed in name else value for name, value in scheduled.items()}


def with_lists(scheduled: dict[str, Any], numbers: random.Random) -> dict[str, Any]:
    """Per-request lengths that fit the counts; sums need not."""
    prefills, decodes = scheduled["num_prefill_requests"], scheduled["num_decode_requests"]
    extends = [numbers.randint(1, 300) for _ in range(prefills)] + [1] * decodes
    pasts = [numbers.choice([0, 64, 512]) for _ in range(prefills)] + [numbers.randint(1, 2000) for _ in range(decodes)]
    return scheduled | {"extend_lengths": extends, "past_kv_lengths": pasts}


def recorded(name: str, role: str, lists: bool) -> Iterator[Iteration]:
    """A recorded stream as a worker of one role would have published it."""
    numbers = random.Random(f"{name} {role}")
    for frame in STREAMS[name]():
        metrics = msgspec.msgpack.decode(frame)
        scheduled = for_role(metrics["scheduled_requests"], role)
        yield [metrics | {"scheduled_requests": with_lists(scheduled, numbers) if lists else scheduled}]


def invented(role: str, lists: bool, count: int = 6000) -> Iterator[Iteration]:
    """Random iterations: up to four ranks, idle ones, zeros, collinear phases, outliers, constant phases, faults."""
    numbers = random.Random(f"invented {role}")
    for i in range(count):
        phase = i // 500 % 6
        iteration = []
        for rank in range(numbers.choice([1, 1, 2, 4])):
            prefills = numbers.choice([0, 0, 1, 2, 5]) if role != "decode" else 0
            decodes = numbers.choice([0, 1, 3, 8, 16]) if role != "prefill" else 0
            tokens = prefills and numbers.choice([prefills, 64 * prefills, numbers.randint(prefills, 512)])
            scheduled = {
                "num_prefill_requests": prefills,
                "sum_prefill_tokens": tokens,
                "sum_prefill_kv_tokens": prefills and numbers.choice([0, 0, 256, numbers.randint(0, 4000)]),
                "num_decode_requests": decodes,
                "sum_decode_kv_tokens": 100 * decodes if phase == 1 else decodes and numbers.randint(0, 30_000),
            }
            if phase == 2:  # the same load again and again
                scheduled = dict.fromkeys(scheduled, 0) | ({"num_decode_requests": 4, "sum_decode_kv_tokens": 800})
                scheduled = scheduled if role != "prefill" else {"num_prefill_requests": 1, "sum_prefill_tokens": 100}
                scheduled = {"num_prefill_requests": 0, "num_decode_requests": 0} | scheduled
            if lists and numbers.random() < 0.99:
                scheduled = with_lists(scheduled, numbers)
            wall_s = (
                0.002 + 4e-5 * scheduled.get("sum_prefill_tokens", 0) + 1e-7 * scheduled.get("sum_decode_kv_tokens", 0)
            )
            wall_s *= numbers.lognormvariate(0.0, 0.1)
            if phase == 3:
                wall_s *= numbers.choice([1.0, 1.0, 1e-6, 1e6])
            if numbers.random() < 0.02:
                wall_s = numbers.choice([0.0, -1.0, 1e300])
            iteration.append({"dp_rank": rank, "wall_time": wall_s, "scheduled_requests": scheduled})
        yield iteration


def attempt(call: Any, *arguments: Any) -> tuple[bool, Any]:
    """Whether the call was refused, and its result."""
    try:
        return False, call(*arguments)
    except ValueError:
        return True, None


class Difference(NamedTuple):
    """What one run of both models had apart."""

    relative: float
    bits: int
    refusals: int
    counters: bool


def run(case: Case, role: str, iterations: list[Iteration]) -> Difference:
    config = sample.MODEL | {"worker_type": role, "estimator_config": {"fpm_regression": case.section}}
    peer, ours = RustForwardPassPerfModel.best_available(config), ForwardPassPerfModel.best_available(config)
    answers: tuple[list[float | None], list[float | None]] = ([], [])
    refusals = 0
    for iteration in iterations:
        refused = []
        for model, out in zip((peer, ours), answers, strict=True):
            told, answer = attempt(model.estimate_forward_pass_time_ms, iteration)
            tuned, _ = attempt(model.tune_with_fpms, [iteration])
            out.append(answer)
            refused.append((told, tuned))
        refusals += refused[0] != refused[1]
    counters = peer.regression_store_diagnostics() == ours.regression_store_diagnostics()
    counters &= peer.diagnostics() == ours.diagnostics()
    bits = sum(a != b for a, b in zip(*answers, strict=True))
    return Difference(largest_difference(*answers), bits, refusals, counters)


def compare_streams(first: int | None, failures: list[str]) -> dict[str, Any]:
    """Every case over every stream and role."""
    sources = {
        (f"{name}, {role}", lists): list(recorded(name, role, lists))[:first]
        for name in STREAMS
        for role in ROLES
        for lists in (False, True)
    }
    sources |= {
        (f"invented, {role}", lists): list(invented(role, lists))[:first] for role in ROLES for lists in (False, True)
    }
    worst, compared, differing = 0.0, 0, 0
    for case in cases():
        for (source, lists), iterations in sources.items():
            if lists != case.lists:
                continue
            found = run(case, source.split(", ")[1], iterations)
            compared += len(iterations)
            differing += found.bits
            worst = max(worst, found.relative)
            if found.relative > TOLERANCE or found.refusals or not found.counters:
                failures.append(f"{case.name}; {source}: {found}")
        print(f"{case.name}: done", flush=True)
    return {
        "regressions": len(cases()),
        "answers compared": compared,
        "answers that differ in any bit": differing,
        "largest relative difference": worst,
    }


def compare_speed() -> list[Comparison]:
    """Tuning of splines, whole batches of distinct iterations."""
    iterations = [[msgspec.msgpack.decode(frame)] for frame in sample.eval_frames()[:4000]]
    learners: dict[str, Any] = {}
    results = []
    for case in (SPLINES[0], SPLINES[1], SPLINES[5]):
        config = sample.MODEL | {"estimator_config": {"fpm_regression": case.section}}

        def fresh(config: dict[str, Any] = config) -> None:
            learners["peer"] = RustForwardPassPerfModel.best_available(config)
            learners["ours"] = ForwardPassPerfModel.best_available(config)

        results.append(
            compare(
                f"tune, {case.name}",
                lambda: learners["peer"].tune_with_fpms(iterations),
                lambda: learners["ours"].tune_with_fpms(iterations),
                items=len(iterations),
                required=2.0,
                prepare=fresh,
            )
        )
    return results


def main() -> int:
    """Run everything and write the evidence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=None, help="only so many iterations of each stream")
    parser.add_argument("--write-evidence", action="store_true")
    first = parser.parse_args().first
    failures: list[str] = []
    version = importlib.metadata.version("aisimulate")
    if version != PEER_VERSION:
        failures.append(f"the peer is aisimulate {version}, {PEER_VERSION} is expected")
    facts: dict[str, Any] = {"peer": f"aisimulate {version}"} | compare_streams(first, failures)
    return report("learned_regression", compare_speed(), facts, failures)


if __name__ == "__main__":
    sys.exit(main())
