"""Whole-forward lookups beside the public peer wheel: answers, estimates from dicts and columns, construction.

    python benchmarks/compare/interpolation.py [--write-evidence]

needs an environment that holds fpmsdk and the peer (aisimulate); `make compare-interpolation` makes one. Exits 1 on a
differing answer, a missing peer or a missed ratio.
"""

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from harness import Comparison, compare, largest_difference, report
from table_rows import MODES, SIZES, table_row

try:
    from aisimulate_core.sdk import RustForwardPassPerfModel
except ImportError as error:
    sys.exit(f"FAILED: the peer is not installed ({error}); run `make compare-interpolation`")

from fpmsdk import ForwardPassPerfModel, FpmBatch
from fpmsdk.perfdb.forward_writer import publish_rows

VERSION = "9.9.9-bench"
NUM_PASSES = 4000
NUM_MODELS = 50  # built one after the other, over one table that both sides have open
NUM_TABLES = 5  # opened one after the other, each by a model of its own
NUM_PROCESSES = 5  # that import a package and build one model
CAPTURES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ORIGIN = {"system": "x100", "backend": "vllm", "backend_version": VERSION}
HARDWARE = """\
data_dir: data/x100
gpu: {mem_bw: 4.8e+12, mem_capacity: 151397597184, mem_bw_empirical_scaling_factor: 0.8,
      mem_empirical_constant_latency: 3.0e-6, bfloat16_tc_flops: 9.89e+14, fp8_tc_flops: 1.978e+15,
      int8_tc_flops: 1.978e+15, power: 700, sm_version: 90}
node: {num_gpus_per_node: 8, inter_node_bw: 5.0e+10, intra_node_bw: 4.5e+11, p2p_latency: 1.0e-5}
misc: {nccl_mem: {1: 0}, other_mem: 0, nccl_version: '2.26.2'}
"""


def table_rows(model: str) -> list[dict[str, Any]]:
    """A table as it is measured: dense curves up to the captured sizes, doubling beyond them."""

    def row(kind: str, batch: int, tokens: int, kv: int, latency_ms: float) -> dict[str, Any]:
        return table_row(model, ORIGIN, kind, batch, tokens, kv, latency_ms)

    lengths = sorted({*range(8, 513, 8), 513, *(2**i for i in range(10, 14))})
    contexts = (0, 16, *(2**i for i in range(10, 16)))
    rows = [
        row("prefill", batch, tokens, kv, (2 + 0.004 * tokens + 0.0005 * kv) * (1 + 0.01 * batch))
        for batch in (1, 2, 4, 8)
        for kv in contexts
        for tokens in lengths
        if tokens >= batch
    ]
    for batch in sorted({size + extra for size in CAPTURES for extra in (0, 1)}):
        kv = 2 * batch
        while kv <= 2**20:
            rows.append(row("decode", batch, 0, kv, 3 + 0.05 * batch + 0.0002 * kv))
            kv *= 2
    return rows


def passes() -> list[dict[str, Any]]:
    """Distinct passes inside the table: pure prefill, pure decode, mixed."""
    source = random.Random(7)
    found = []
    for _ in range(NUM_PASSES):
        kind = source.choice(("prefill", "decode", "mixed"))
        scheduled: dict[str, int] = {}
        if kind != "decode":
            scheduled |= {
                "num_prefill_requests": source.choice((1, 2, 4, 8)),
                "sum_prefill_tokens": source.randint(16, 8000),
                "sum_prefill_kv_tokens": source.randint(0, 30000),
            }
        if kind != "prefill":
            batch = source.randint(1, 250)
            scheduled |= {"num_decode_requests": batch, "sum_decode_kv_tokens": source.randint(1024, 500_000)}
        found.append({"scheduled_requests": scheduled})
    return found


def configuration(folder: Path) -> dict[str, Any]:
    """A direct model over a pair in `folder`."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["BenchForCausalLM"]}))
    (folder / "systems").mkdir()
    (folder / "systems" / "x100.yaml").write_text(HARDWARE)
    pair = str(folder / "pair.parquet")
    publish_rows(pair, table_rows(str(model)))
    resources = {
        "cache_layout": "linear",
        "kv_bytes_per_token": 1024,
        "max_num_tokens": 8192,
        "max_batch_size": 256,
        "provenance": "benchmark",
    }
    profile = {
        "schema_version": 1,
        "model": str(model),
        "model_revision": "0" * 40,
        "architecture": "BenchForCausalLM",
        "context_length": 65536,
        "num_experts": 0,
        "provenance": "benchmark",
        "deployments": [ORIGIN | MODES | SIZES | {"resources": resources}],
    }
    return {
        **ORIGIN,
        "model": str(model),
        "worker_type": "aggregated",
        "fpm_profile": profile,
        "estimation_mode": "fpm_interpolation",
        "systems_paths": [str(folder / "systems")],
        "estimator_config": {"fpm_interpolation": {"method": "direct", "fpm_parquet_path": pair}},
    }


def answers(estimate: Callable[[Any], float | None], asked: list[dict[str, Any]]) -> list[float | None]:
    """Latencies, None where an implementation refuses."""
    found: list[float | None] = []
    for item in asked:
        try:
            found.append(estimate(item))
        except RuntimeError:
            found.append(None)
    return found


def unopened_tables(config: dict[str, Any], folder: Path) -> Callable[[], list[dict[str, Any]]]:
    """Configurations over copies of the pair that no process has opened yet."""
    numbers = count()
    interpolation = config["estimator_config"]["fpm_interpolation"]
    pair = Path(interpolation["fpm_parquet_path"])

    def make() -> list[dict[str, Any]]:
        made = []
        for _ in range(NUM_TABLES):
            copy = folder / f"copy-{next(numbers)}"
            copy.mkdir()
            for suffix in (".parquet", ".metadata.json"):
                shutil.copy(pair.with_suffix(suffix), copy)
            changed = interpolation | {"fpm_parquet_path": str(copy / pair.name)}
            made.append(config | {"estimator_config": {"fpm_interpolation": changed}})
        return made

    return make


_FIRST_MODEL = """
import json, sys, time
begin = time.perf_counter()
module, name, path = sys.argv[1:]
built = getattr(__import__(module, fromlist=[name]), name).best_available(json.load(open(path)))
print(time.perf_counter() - begin)
"""


def first_models(config: dict[str, Any], folder: Path) -> dict[str, float]:
    """Median ms of a fresh process to import a package and build its first model."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    sides = {"peer": ("aisimulate_core.sdk", "RustForwardPassPerfModel"), "ours": ("fpmsdk", "ForwardPassPerfModel")}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(NUM_PROCESSES):
        for side, names in sides.items():
            command = [sys.executable, "-c", _FIRST_MODEL, *names, str(path)]
            # From another directory: the package that is installed, not a source tree.
            ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
            times[side].append(float(ran.stdout) * 1e3)
    return {f"import_and_first_model_{side}_ms": round(statistics.median(found), 1) for side, found in times.items()}


def compare_speed(config: dict[str, Any], asked: list[dict[str, Any]], folder: Path) -> list[Comparison]:
    """Estimates of distinct passes that both answer, and construction."""
    peer = RustForwardPassPerfModel.best_available(config).estimate_forward_pass_time_ms
    ours = ForwardPassPerfModel.best_available(config)
    estimate, batch = ours.estimate_forward_pass_time_ms, FpmBatch.from_dicts(asked)

    def each(call: Callable[[Any], object]) -> Callable[[], None]:
        def run() -> None:
            for item in asked:
                call(item)

        return run

    def each_time(build: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(NUM_MODELS):
                build()

        return run

    size = len(asked)
    tables: list[dict[str, Any]] = []
    unopened = unopened_tables(config, folder)

    def over_each_table(model: Any) -> Callable[[], None]:
        def run() -> None:
            for other in tables:
                model.best_available(other)

        return run

    def renew() -> None:
        tables[:] = unopened()

    return [
        compare("estimate, dict", each(peer), each(estimate), items=size, required=6.0),
        compare("estimate, columns", each(peer), lambda: ours.estimate_many(batch), items=size, required=30.0),
        compare(
            "construction, table open",
            each_time(lambda: RustForwardPassPerfModel.best_available(config)),
            each_time(lambda: ForwardPassPerfModel.best_available(config)),
            items=NUM_MODELS,
            required=3.0,
        ),
        compare(
            "construction, table not open",
            over_each_table(RustForwardPassPerfModel),
            over_each_table(ForwardPassPerfModel),
            items=NUM_TABLES,
            required=3.0,
            prepare=renew,
        ),
    ]


def main() -> int:
    """Compare answers, then speed."""
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(Path(folder))
        asked = passes()
        peer = answers(RustForwardPassPerfModel.best_available(config).estimate_forward_pass_time_ms, asked)
        ours = answers(ForwardPassPerfModel.best_available(config).estimate_forward_pass_time_ms, asked)
        difference = largest_difference(peer, ours)
        if difference != 0.0:
            failures.append(f"answers differ by {difference:.3g}")
        answered = [item for item, latency in zip(asked, peer, strict=True) if latency is not None]
        facts = {"passes": len(asked), "answered": len(answered), "largest_difference": difference}
        facts |= first_models(config, Path(folder))
        return report("interpolation", compare_speed(config, answered, Path(folder)), facts, failures)


if __name__ == "__main__":
    sys.exit(main())
