"""The op-level model beside the public peer wheel on its own data: estimates, construction, cold start, memory.

    python benchmarks/compare/op_level.py [--write-evidence]

needs an environment that holds fpmsdk and the peer (aisimulate); `make compare-op-level` makes one. Exits 1 on a
differing answer, a missing peer or a missed ratio.
"""

import importlib.metadata
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import Comparison, compare, largest_difference, report

try:
    from aisimulate_core.sdk import RustForwardPassPerfModel
except ImportError as error:
    sys.exit(f"FAILED: the peer is not installed ({error}); run `make compare-op-level`")

from fpmsdk import ForwardPassPerfModel, FpmBatch

PEER_VERSION = "0.13.0.dev202610270000000085"
TOLERANCE = 1e-9
NUM_SHAPES = 2000
NUM_FAR_SHAPES = 400
STARTS = 7

BASE = {
    "system": "h200_sxm",
    "backend": "vllm",
    "worker_type": "aggregated",
    "estimation_mode": "op_level",
    "fallback_policy": "deny",
}
CONFIGS = {
    "Qwen3-32B tp2": BASE | {"model": "Qwen/Qwen3-32B", "tp": 2},
    "Qwen3-30B-A3B tp4 ep4": BASE | {"model": "Qwen/Qwen3-30B-A3B", "tp": 4, "moe_tp_size": 1, "moe_ep_size": 4},
}

# From a fresh process to the first estimate: seconds and peak resident memory in MB.
START = """
import json, sys, time
begin = time.perf_counter()
{import_line}
config, metrics = json.loads(sys.argv[1])
estimate = Model.best_available(config).estimate_forward_pass_time_ms(metrics)
seconds = time.perf_counter() - begin
with open("/proc/self/status") as file:  # getrusage would count the parent's memory, which exec inherits
    [peak] = [line for line in file if line.startswith("VmHWM")]
print(seconds, int(peak.split()[1]) / 1024, repr(estimate))
"""
# What a process holds that has read nothing yet, but can read Parquet: the floor of a start without cached tables.
FLOOR = """
import numpy, pyarrow, pyarrow._parquet
with open("/proc/self/status") as file:
    [peak] = [line for line in file if line.startswith("VmHWM")]
print(int(peak.split()[1]) / 1024)
"""
PEER_IMPORT = "from aisimulate_core.sdk import RustForwardPassPerfModel as Model"
OUR_IMPORT = "from fpmsdk import ForwardPassPerfModel as Model"


def systems_root() -> str:
    """The peer's own data, so that both sides price from the same rows."""
    package = importlib.util.find_spec("aisimulate_core")
    assert package is not None and package.submodule_search_locations
    return str(Path(package.submodule_search_locations[0]) / "systems")


def shapes(rng: random.Random, count: int, *, far: bool) -> list[dict[str, Any]]:
    """Distinct iterations: prefill, decode and mixed, inside the measured grids or beyond them."""
    found = []
    for number in range(count):
        scheduled: dict[str, int] = {}
        if number % 3 != 0:
            requests = rng.randint(1, 4)
            tokens = rng.randint(40_000, 400_000) if far else rng.randint(64, 8192)
            scheduled |= {"num_prefill_requests": requests, "sum_prefill_tokens": tokens}
            scheduled["sum_prefill_kv_tokens"] = rng.randint(0, 2000)
        if number % 3 != 1:
            requests = rng.randint(2000, 5000) if far else rng.randint(1, 256)
            # The measured grids end where batch times length exceeds what a GPU holds.
            length = rng.randint(200_000, 400_000) if far else rng.randint(64, min(16_000, 110_000 // requests))
            scheduled |= {"num_decode_requests": requests, "sum_decode_kv_tokens": min(requests * length, 2**32 - 1)}
        found.append({"scheduled_requests": scheduled})
    return found


def compare_config(name: str, config: dict[str, Any], failures: list[str]) -> tuple[list[Comparison], dict[str, float]]:
    """Estimates of one configuration; the largest relative difference of each set of shapes."""
    peer, ours = RustForwardPassPerfModel.best_available(config), ForwardPassPerfModel.best_available(config)
    results, differences = [], {}
    rng = random.Random(11)
    for label, count, far, ratio in (("in the grid", NUM_SHAPES, False, 4.0), ("beyond it", NUM_FAR_SHAPES, True, 5.0)):
        iterations = shapes(rng, count, far=far)
        batch = FpmBatch.from_dicts(iterations)
        answers: dict[str, Any] = {}

        def ask_peer(items: list[dict[str, Any]] = iterations, into: dict[str, Any] = answers) -> None:
            into["peer"] = list(map(peer.estimate_forward_pass_time_ms, items))

        def ask_ours(items: list[dict[str, Any]] = iterations, into: dict[str, Any] = answers) -> None:
            into["dict"] = list(map(ours.estimate_forward_pass_time_ms, items))

        def ask_columns(columns: FpmBatch = batch, into: dict[str, Any] = answers) -> None:
            into["columns"] = ours.estimate_many(columns)

        ask_peer()
        ask_ours()
        results.append(compare(f"{name}, {label}", ask_peer, ask_ours, items=count, required=ratio))
        results.append(compare(f"{name}, {label}, columnar", ask_peer, ask_columns, items=count, required=15.0))
        for form in ("dict", "columns"):
            difference = largest_difference(answers["peer"], list(map(float, answers[form])))
            differences[f"{name}, {label}, {form}"] = difference
            if difference > TOLERANCE:
                failures.append(f"{name}, {label}, {form}: answers differ by {difference:.3g}")
    results.append(
        compare(
            f"{name}, second construction",
            lambda: RustForwardPassPerfModel.best_available(config),
            lambda: ForwardPassPerfModel.best_available(config),
            items=1,
            required=3.0,
        )
    )
    return results, differences


def start(import_line: str, config: dict[str, Any], cache: str) -> tuple[float, float, str]:
    """Seconds, peak memory in MB and first estimate of a fresh process."""
    argument = json.dumps([config, {"scheduled_requests": {"num_decode_requests": 8, "sum_decode_kv_tokens": 16384}}])
    output = subprocess.run(
        [sys.executable, "-P", "-c", START.format(import_line=import_line), argument],
        env=os.environ | {"FPMSDK_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[-1]
    seconds, memory_mb, estimate = output.split()
    return float(seconds), float(memory_mb), estimate


def compare_starts(config: dict[str, Any], failures: list[str]) -> dict[str, Any]:
    """Cold starts in turn: the peer, ours without a compiled-table cache, ours with one."""
    runs: dict[str, list[tuple[float, float, str]]] = {"peer": [], "ours": [], "ours, cached tables": []}
    with tempfile.TemporaryDirectory() as warm:
        start(OUR_IMPORT, config, warm)
        for _ in range(STARTS):
            with tempfile.TemporaryDirectory() as cold:
                runs["peer"].append(start(PEER_IMPORT, config, cold))
                runs["ours"].append(start(OUR_IMPORT, config, cold))
            runs["ours, cached tables"].append(start(OUR_IMPORT, config, warm))
    seconds = {side: statistics.median(run[0] for run in found) for side, found in runs.items()}
    memory = {side: statistics.median(run[1] for run in found) for side, found in runs.items()}
    floor = subprocess.run([sys.executable, "-P", "-c", FLOOR], capture_output=True, text=True, check=True).stdout
    memory["floor: numpy and pyarrow imported"] = float(floor)
    for side, share in (("ours", 0.5), ("ours, cached tables", 0.25)):
        if seconds[side] > share * seconds["peer"]:
            failures.append(f"cold start, {side}: {seconds[side]:.3f} s, more than {share} of {seconds['peer']:.3f} s")
        if memory[side] > memory["peer"]:
            failures.append(f"peak memory, {side}: {memory[side]:.0f} MB, more than {memory['peer']:.0f} MB")
    return {"cold start, s": seconds, "peak memory, MB": memory}


def main() -> int:
    """Run everything and write the evidence."""
    failures: list[str] = []
    version = importlib.metadata.version("aisimulate")
    if version != PEER_VERSION:
        failures.append(f"the peer is aisimulate {version}, {PEER_VERSION} is expected")
    root = {"systems_paths": [systems_root()]}
    results: list[Comparison] = []
    differences: dict[str, float] = {}
    for name, config in CONFIGS.items():
        found, worst = compare_config(name, config | root, failures)
        results += found
        differences |= worst
    facts: dict[str, Any] = {"peer": f"aisimulate {version}", "largest relative differences": differences}
    facts |= compare_starts(CONFIGS["Qwen3-32B tp2"] | root, failures)
    return report("op_level", results, facts, failures)


if __name__ == "__main__":
    sys.exit(main())
