"""Capacity searches of the real Dynamo Planner over fpmsdk and over the public peer, and the import of its models.

    python benchmarks/compare/planner.py [--write-evidence]

needs an environment that holds fpmsdk, the peer (aisimulate) and Dynamo; `make compare-planner` makes one. Exits 1 on a
differing answer, a missing peer or a missed ratio.
"""

import importlib.metadata
import importlib.util
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import Comparison, compare, largest_difference, report

try:
    import aisimulate_core
    from aisimulate_core.sdk import ForwardPassPerfModelConfig as PeerConfig
    from aisimulate_core.sdk import RustForwardPassPerfModel as PeerModel
    from dynamo.common.forward_pass_metrics import ForwardPassMetrics, ScheduledRequestMetrics
    from dynamo.planner.config.planner_config import AISPerfModelSpec, PlannerConfig
    from dynamo.planner.core.perf_model import ais_adapter, engine_query
    from dynamo.planner.core.types import EngineCapabilities
except ImportError as error:
    sys.exit(f"FAILED: the peer or Dynamo is not installed ({error}); run `make compare-planner`")

import fpmsdk
from fpmsdk.compat.dynamo import alias_directory

TOLERANCE = 1e-9
NUM_SHAPES = 12
STARTS = 9
# At most so much of the peer's time.
ALLOWED = {"op_level": 0.45, "fpm_regression": 0.4}
ROLES = ("prefill", "decode", "aggregated")
IMPORT = "import time; begin = time.perf_counter(); import {}; print(time.perf_counter() - begin)"
MODELS_OF_THE_PLANNER = "dynamo.planner.core.perf_model.ais_adapter"


def planner_config(mode: str) -> PlannerConfig:
    """A Planner over one deployment for every role."""
    served = {"model": "Qwen/Qwen3-32B", "system": "h200_sxm", "backend": "vllm", "backend_version": "current", "tp": 4}
    request = served | {"estimation_mode": mode}
    if mode == "fpm_regression":
        del request["backend_version"]
    return PlannerConfig.model_construct(
        ais_perf_model=AISPerfModelSpec(roles={role: request | {"worker_type": role} for role in ROLES}),
        model_name="Qwen/Qwen3-32B",
        namespace="benchmark",
        backend="vllm",
        max_num_fpm_samples=64,
        load_min_observations=5,
        fpm_sample_bucket_size=16,
        ttft_ms=500.0,
        itl_ms=50.0,
        speculative_nextn=0,
    )


def planner_model(side: str, mode: str, role: str) -> Any:
    """The Planner's own object over one side's model."""
    ours = side == "ours"
    engine_query.AISForwardPassPerfModel = fpmsdk.ForwardPassPerfModel if ours else PeerModel
    ais_adapter.ForwardPassPerfModelConfig = fpmsdk.ForwardPassPerfModelConfig if ours else PeerConfig
    limits = EngineCapabilities(max_num_batched_tokens=8192, max_num_seqs=512, max_kv_tokens=2_000_000)
    model = ais_adapter.PlannerEnginePerfModel(worker_type=role, config=planner_config(mode), capabilities=limits)
    for i in range(40):
        if mode == "fpm_regression":
            model.add_observations({("w", 0): observation(role, i)})
    if not model.has_sufficient_data():
        sys.exit(f"FAILED: {side} {mode} {role} is not ready: {model._engine_diagnostics()}")
    return model


def observation(role: str, i: int) -> ForwardPassMetrics:
    """One of forty distinct iterations of a made-up engine."""
    decodes, tokens = 8 * (i % 10 + 1), 256 * (i % 8 + 1)
    kv_tokens = decodes * (500 + 100 * (i % 7))
    scheduled: dict[str, int] = {}
    if role != "prefill":
        scheduled |= {"num_decode_requests": decodes, "sum_decode_kv_tokens": kv_tokens}
    if role == "prefill" or (role == "aggregated" and i % 3):
        scheduled |= {"num_prefill_requests": 1, "sum_prefill_tokens": tokens}
    seconds = 0.003 + 2e-5 * scheduled.get("num_decode_requests", 0) + 1.2e-8 * scheduled.get("sum_decode_kv_tokens", 0)
    seconds += 2.5e-5 * scheduled.get("sum_prefill_tokens", 0)
    return ForwardPassMetrics(
        worker_id="w", counter_id=i + 1, wall_time=seconds, scheduled_requests=ScheduledRequestMetrics(**scheduled)
    )


def search(model: Any, into: list[float | None]) -> None:
    """Capacity searches over distinct request shapes."""
    into.clear()
    for i in range(NUM_SHAPES):
        found = model.find_engine_capacity_rps(
            isl=1000 + 317 * i, osl=100 + 23 * i, ttft_sla_ms=2000.0, itl_sla_ms=50.0, kv_hit_rate=0.05 * (i % 4)
        )
        into += [None] * 3 if found is None else [found.rps, found.ttft_ms, found.itl_ms]


def compare_searches(failures: list[str]) -> tuple[list[Comparison], dict[str, float]]:
    """Searches of every role in both estimation modes."""
    results, differences = [], {}
    for mode, allowed in ALLOWED.items():
        sides = {side: [planner_model(side, mode, role) for role in ROLES] for side in ("peer", "ours")}
        answers: dict[str, list[list[float | None]]] = {side: [[] for _ in ROLES] for side in sides}

        def ask(side: str, models: dict[str, Any] = sides, into: dict[str, Any] = answers) -> None:
            for model, found in zip(models[side], into[side], strict=True):
                search(model, found)

        ask("peer")
        ask("ours")
        name = f"capacity search, {mode}"
        results.append(
            compare(
                name,
                lambda ask=ask: ask("peer"),
                lambda ask=ask: ask("ours"),
                items=NUM_SHAPES * len(ROLES),
                required=1 / allowed,
            )
        )
        for role, peer, ours in zip(ROLES, answers["peer"], answers["ours"], strict=True):
            differences[f"{mode}, {role}"] = difference = largest_difference(peer, ours)
            if difference > TOLERANCE:
                failures.append(f"{name}, {role}: answers differ by {difference:.3g}")
    return results, differences


def import_seconds(paths: list[str]) -> float:
    """Time of importing the Planner's models in a fresh process that looks into these directories first."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    program = [sys.executable, "-c", IMPORT.format(MODELS_OF_THE_PLANNER)]
    return float(subprocess.run(program, env=environment, capture_output=True, check=True, text=True).stdout)


def compare_imports(failures: list[str]) -> dict[str, float]:
    """Median import times of both sides, measured alternately."""
    times: dict[str, list[float]] = {"peer": [], "ours": []}
    for _ in range(STARTS):
        times["peer"].append(import_seconds([]))
        times["ours"].append(import_seconds([str(alias_directory())]))
    found = {side: statistics.median(seconds) for side, seconds in times.items()}
    found |= {f"{side}, least": min(seconds) for side, seconds in times.items()}
    # Nearly all of it is the Planner's own: a difference within the spread of one side is none.
    spread = statistics.median(sorted(times["peer"])[-3:]) - min(times["peer"])
    if found["ours, least"] > found["peer, least"] and found["ours"] > found["peer"] + spread:
        failures.append(f"import: {found['ours']:.3f} s, the peer takes {found['peer']:.3f} s")
    return found


def main() -> int:
    """Run everything and report."""
    if hasattr(aisimulate_core, "FPMSDK_ALIAS"):
        sys.exit("FAILED: aisimulate_core is fpmsdk's own alias here; run `make compare-planner`")
    os.environ["FPMSDK_SYSTEMS_PATH"] = str(Path(aisimulate_core.__path__[0]) / "systems")
    failures: list[str] = []
    comparisons, differences = compare_searches(failures)
    imports = compare_imports(failures)
    print("import of the Planner's models, s:", imports)
    versions = {name: importlib.metadata.version(name) for name in ("aisimulate", "ai-dynamo")}
    facts = {"peers": versions, "largest_relative_differences": differences, "import_s": imports}
    return report("planner", comparisons, facts, failures)


if __name__ == "__main__":
    sys.exit(main())
