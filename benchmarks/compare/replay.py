"""Replays beside the public simulators: equal reports, and how many times more requests a second.

    python benchmarks/compare/replay.py [--trace FILE] [--write-evidence]

needs an environment that holds fpmsdk and the peers (aisimulate 0.13, ai-dynamo-runtime 1.6.1); `make compare-replay`
makes one. FILE is a Mooncake trace (JSON lines); without it one of the same statistics is generated. Timed is what a
user waits for, from requests in memory or a trace file to the summary, in one thread on both sides. Exits 1 on a
differing answer, a missing peer or a missed ratio.
"""

import importlib.metadata
import importlib.util
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Comparison, compare, report

try:
    import aisimulate._runtime as newer_peer
    import dynamo._core as older_peer
except ImportError as error:
    sys.exit(f"FAILED: a peer is not installed ({error}); run `make compare-replay`")

from replay_cases import aggregated, first_difference, system

from fpmsdk import ForwardPassPerfModel, Trace, replay_trace
from fpmsdk.replay.report import ReplayReport

PEER_VERSIONS = {"aisimulate": "0.13.0.dev202610270000000085", "ai-dynamo-runtime": "1.6.1"}
PEER_RULES = {"scheduler_rules": "simulator", "mixed_pass_pricing": "separate", "record_passes": False}
NUM_REQUESTS = 10_000
PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 128
TRACE_ROUNDS = 3

LENGTHS_ONLY = {"backend": "vllm", "enable_prefix_caching": False, "timing_model": {"type": "polynomial"}}
GROUPED = LENGTHS_ONLY | {
    "kv_cache_groups": [
        {"name": "full", "kind": "attention", "num_layers": 8, "block_size_tokens": 64, "page_size_bytes": 1_048_576},
        {
            "name": "window",
            "kind": "attention",
            "num_layers": 24,
            "block_size_tokens": 16,
            "page_size_bytes": 262_144,
            "sliding_window": 512,
        },
        {
            "name": "conv",
            "kind": "convolution",
            "num_layers": 4,
            "block_size_tokens": 4,
            "page_size_bytes": 4096,
            "sliding_window": 4,
        },
    ],
    "kv_cache_capacity_bytes": 60_000_000_000,
}
OP_LEVEL = {
    "model": "Qwen/Qwen3-32B",
    "system": "h200_sxm",
    "backend": "vllm",
    "backend_version": "0.24.0",
    "tp": 4,
    "worker_type": "aggregated",
    "estimation_mode": "op_level",
}

# Figures of real time, and of energy, which no timing model here knows.
UNCOMPARED = ("wall_time_ms", "processed_tokens_per_s", "processed_output_tokens_per_s", "power_w", "power_coverage")
TOLERANCE = 1e-9  # means and deviations: the last bit depends on the order of a sum


def summary_differences(name: str, peer: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Figures of both summaries that are not equal."""
    faults = []
    for key in sorted(peer.keys() & ours.keys() - set(UNCOMPARED)):
        expected, found = peer[key], ours[key]
        if isinstance(expected, float) and isinstance(found, float):
            equal = math.isclose(expected, found, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        else:
            equal = expected == found
        if not equal:
            faults.append(f"{name}: {key} is {expected} at the peer, {found} here")
    if not {"duration_ms", "p99_ttft_ms", "p99_itl_ms", "prefix_cache_reused_ratio"} <= peer.keys() & ours.keys():
        faults.append(f"{name}: the reports have too few figures in common")
    return faults


def poisson_ms(rate_rps: float) -> list[float]:
    """Arrival times in ms, the first at 0."""
    rng = random.Random(42)
    times = [0.0]
    while len(times) < NUM_REQUESTS:
        times.append(times[-1] + rng.expovariate(rate_rps) * 1e3)
    return times


def with_newer_peer(
    name: str, rank: dict[str, Any], arrivals_ms: list[float], required: float, failures: list[str], **options: Any
) -> Comparison:
    """Requests of one length against aisimulate 0.13; per-request figures must be equal to the bit."""
    requests = [
        {"id": f"r{number}", "arrival_time_ms": at_ms, "input_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
        for number, at_ms in enumerate(arrivals_ms)
    ]
    spec = aggregated(rank, requests, **options)
    difference = first_difference(spec)
    if difference is not None:
        failures.append(f"{name}: {difference}")
    document = json.dumps({"spec": spec | {"record_per_request": False}, "determinism": "canonical_v1"})
    lengths = [PROMPT_TOKENS] * NUM_REQUESTS, [OUTPUT_TOKENS] * NUM_REQUESTS
    answers: dict[str, dict[str, Any]] = {}

    def ask_peer() -> None:
        answers["peer"] = json.loads(newer_peer.run_replay_json(document))

    def ask_ours() -> None:
        trace = Trace.from_arrays(arrivals_ms, *lengths)
        outcome = replay_trace(trace, **system(spec), concurrency=spec.get("max_in_flight"), **PEER_RULES)
        answers["ours"] = outcome.summary

    result = compare(name, ask_peer, ask_ours, items=NUM_REQUESTS, required=required)
    failures += summary_differences(name, answers["peer"], answers["ours"])
    return result


def with_older_peer(
    name: str, rank: dict[str, Any], required: float, failures: list[str], *, concurrency: int | None = None
) -> Comparison:
    """The same requests, in a closed loop or 50 ms apart, against ai-dynamo-runtime 1.6.1."""
    load = {"arrival_interval_ms": 50.0} if concurrency is None else {"replay_concurrency": concurrency}
    lengths = [PROMPT_TOKENS] * NUM_REQUESTS, [OUTPUT_TOKENS] * NUM_REQUESTS
    arrivals_ms = [50.0 * number if concurrency is None else 0.0 for number in range(NUM_REQUESTS)]
    answers: dict[str, dict[str, Any]] = {}

    def ask_peer() -> None:
        outcome = older_peer.run_mocker_synthetic_trace_replay(
            PROMPT_TOKENS, OUTPUT_TOKENS, NUM_REQUESTS, extra_engine_args={"engine": rank}, **load
        )
        answers["peer"] = outcome.summary

    def ask_ours() -> None:
        trace = Trace.from_arrays(arrivals_ms, *lengths)
        answers["ours"] = replay_trace(trace, launch={"engine": rank}, concurrency=concurrency, **PEER_RULES).summary

    result = compare(name, ask_peer, ask_ours, items=NUM_REQUESTS, required=required)
    failures += summary_differences(name, answers["peer"], answers["ours"])
    return result


def systems_root() -> str:
    """The peer's own data, so that both sides price from the same rows."""
    package = importlib.util.find_spec("aisimulate_core")
    assert package is not None and package.submodule_search_locations
    return str(Path(package.submodule_search_locations[0]) / "systems")


def conversation_trace(folder: Path) -> Path:
    """A trace like the public Mooncake conversation one: as many requests, their mean lengths, growing prompts."""
    rng = random.Random(7)
    path, block, next_hash = folder / "conversation.jsonl", 512, 1
    chats: list[tuple[list[int], int]] = []
    with path.open("w") as file:
        for number in range(12_031):
            # A chat goes on with all it said before, a new one starts with the common system prompt.
            hashes, tokens = chats.pop(rng.randrange(len(chats))) if chats and rng.random() < 0.44 else ([0], block)
            tokens += round(rng.lognormvariate(8.35, 0.95))
            if tokens > 120_000:
                hashes, tokens = [0], block + 1000
            kept = hashes if tokens - len(hashes) * block >= 0 else hashes[: tokens // block]
            grown = list(range(next_hash, next_hash + -(-tokens // block) - len(kept)))
            next_hash += len(grown)
            row = {
                "timestamp": number * 294,
                "input_length": tokens,
                "output_length": max(1, round(rng.expovariate(1 / 343))),
                "hash_ids": kept + grown,
            }
            file.write(json.dumps(row) + "\n")
            chats.append(((kept + grown)[: tokens // block], tokens // block * block))
            if len(chats) > 200:
                chats.pop(0)
    return path


def request_times(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What became of the requests, in an order that does not need their names."""
    keys = ("arrival_time_ms", "input_length", "output_length", "first_token_ms", "terminal_time_ms")
    return sorted((tuple(row[key] for key in (*keys, "reused_input_tokens")) for row in rows), key=repr)


def with_trace(path: Path, workers: int, failures: list[str]) -> Comparison:
    """A conversation trace with op-level timing and prefix caching against aisimulate 0.13."""
    name = f"conversation, op_level, {workers} worker{'s' if workers > 1 else ''}"
    rank = {"backend": "vllm", "block_size": 64, "num_gpu_blocks": 16_384}
    timing = {"type": "external", "provider": "aic", "config": OP_LEVEL}
    spec = aggregated(rank | {"timing_model": timing}, [], workers=workers)
    spec["engine"]["tensor_parallel_size"] = 4
    traffic = {
        "source_type": "trace",
        "load_type": "trace_timestamps",
        "trace_path": str(path),
        "trace_format": "mooncake",
        "trace_block_size": 512,
        "arrival_speedup_ratio": 1.0,
    }
    document = {"spec": spec, "traffic": traffic, "determinism": "canonical_v1"}
    model = ForwardPassPerfModel.best_available(
        OP_LEVEL | {"fallback_policy": "deny", "systems_paths": [systems_root()]}
    )
    timed = json.dumps(document | {"spec": spec | {"record_per_request": False}})
    answers: dict[str, Any] = {}

    def ours() -> ReplayReport:
        launch = {"engine": rank, "tensor_parallel_size": 4}
        return replay_trace(Trace.read(path), launch=launch, timing=model, num_workers=workers, **PEER_RULES)

    def ask_peer() -> None:
        answers["peer"] = json.loads(newer_peer.run_replay_json(timed))

    def ask_ours() -> None:
        answers["ours"] = ours().summary

    recorded = json.loads(
        newer_peer.run_replay_json(json.dumps(document | {"spec": spec | {"record_per_request": True}}))
    )
    if request_times(recorded["per_request"]) != request_times(json.loads(ours().to_json())["per_request"]):
        failures.append(f"{name}: the times of single requests differ")
    requests = recorded["num_requests"]
    result = compare(name, ask_peer, ask_ours, items=requests, required=5.0, rounds=TRACE_ROUNDS)
    failures += summary_differences(name, answers["peer"], answers["ours"])
    return result


def main() -> int:
    """Run everything and write the evidence."""
    failures: list[str] = []
    for package, expected in PEER_VERSIONS.items():
        if (version := importlib.metadata.version(package)) != expected:
            failures.append(f"the peer is {package} {version}, {expected} is expected")
    runs: list[Callable[[], Comparison]] = [
        lambda: with_newer_peer(
            "closed loop of 128", LENGTHS_ONLY, [0.0] * NUM_REQUESTS, 15.0, failures, max_in_flight=128
        ),
        lambda: with_newer_peer("20 requests/s", LENGTHS_ONLY, poisson_ms(20.0), 15.0, failures),
        lambda: with_newer_peer("80 requests/s, 4 workers", LENGTHS_ONLY, poisson_ms(80.0), 15.0, failures, workers=4),
        lambda: with_older_peer("closed loop of 128, 1.6.1", LENGTHS_ONLY, 15.0, failures, concurrency=128),
        lambda: with_older_peer("20 requests/s, 1.6.1", LENGTHS_ONLY, 15.0, failures),
        lambda: with_newer_peer(
            "grouped caches, closed loop of 128", GROUPED, [0.0] * NUM_REQUESTS, 10.0, failures, max_in_flight=128
        ),
        lambda: with_newer_peer("grouped caches, 20 requests/s", GROUPED, poisson_ms(20.0), 10.0, failures),
    ]
    given = sys.argv[sys.argv.index("--trace") + 1] if "--trace" in sys.argv else None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(given) if given else conversation_trace(Path(folder))
        runs += [lambda: with_trace(path, 1, failures), lambda: with_trace(path, 4, failures)]
        results = [run() for run in runs]
    facts = {
        "peers": PEER_VERSIONS,
        "requests of fixed length": f"{NUM_REQUESTS} of {PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output tokens",
        "conversation trace": Path(given).name if given else "generated",
    }
    return report("replay", results, facts, failures)


if __name__ == "__main__":
    sys.exit(main())
