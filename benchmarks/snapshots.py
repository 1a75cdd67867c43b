"""Times of saving and restoring, next to the raw floor; exits with 1 when a bound is missed.

    python -m benchmarks.snapshots [--write-evidence]

The floor of a save writes the same files with the same bytes and the same fsyncs, in the same run and directory; that
of a native model also looks at its data. The floor of a large state is a copy of its bytes with an fsync. Rounds of
both sides alternate; the best times are told, and the median ratio of neighbours is held against a bound.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fpmsdk import ForwardPassPerfModel, FpmBatch, sample
from fpmsdk.perfdb import SystemsRoot
from fpmsdk.perfdb.fingerprint import measure_fingerprint
from tests.snapshot.kinds import corrected, iterations, op_level_config, prepare

EVIDENCE = Path(__file__).parent / "evidence" / "snapshots.json"
SAVE_OVER_FLOOR = 1.5
RESTORE_REGRESSION_MS = 1.0
HASHING_GB_PER_S = 1.0
LARGE_OVER_COPY = 2.0


def times_ms(rounds: int, *sides: Callable[[int], Any]) -> np.ndarray:
    """Time of each side in each of alternating rounds, in ms: [sides, rounds]."""
    times = np.empty((len(sides), rounds))
    for number in range(rounds):
        for place, side in enumerate(sides):
            started = time.perf_counter()
            side(number)
            times[place, number] = (time.perf_counter() - started) * 1e3
    return times


def best_ms(rounds: int, *sides: Callable[[int], Any]) -> list[float]:
    """Best time of each side over alternating rounds, in ms."""
    return [float(best) for best in times_ms(rounds, *sides).min(axis=1)]


def beside(rounds: int, side: Callable[[int], Any], floor: Callable[[int], Any]) -> tuple[float, float, float]:
    """Best times of a side and its floor, and the median of their ratio in neighbouring rounds.

    A disk is fast and slow by turns, for both alike.
    """
    times = times_ms(rounds, side, floor)
    return float(times[0].min()), float(times[1].min()), float(np.median(times[0] / times[1]))


def write_raw(folder: Path, files: dict[str, bytes]) -> None:
    """The floor of a save: the same files, bytes, fsyncs and the rename, and nothing else."""
    staging = folder.with_name(folder.name + ".staging")
    staging.mkdir()
    for name, content in files.items():
        with open(staging / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    sync(staging)
    os.rename(staging, folder)
    sync(folder.parent)


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def read_and_hash(folder: Path) -> list[str]:
    return [hashlib.sha256(content).hexdigest() for content in contents(folder).values()]


def measure_kind(name: str, config: dict[str, Any], folder: Path, rounds: int) -> dict[str, float]:
    """Save, its floor, and restore of one kind."""
    model = ForwardPassPerfModel.best_available(config)
    model.tune_with_fpms([[rank] for rank in iterations(config, "train", 400)])
    pinned = model.save_state_snapshot(folder / f"{name} snapshot")
    files = contents(folder / f"{name} snapshot")

    def floor(number: int) -> None:
        if config.get("systems_paths"):  # a save over data that it did not look at would be no save
            measure_fingerprint(SystemsRoot(config["systems_paths"][0]), config["system"])
        write_raw(folder / f"{name} raw {number}", files)

    save_ms, floor_ms, save_over_floor = beside(
        rounds, lambda number: model.save_state_snapshot(folder / f"{name} save {number}"), floor
    )
    restore_ms, reading_ms, cold_ms = best_ms(
        5 * rounds,
        lambda _number: ForwardPassPerfModel.best_available(pinned),
        lambda _number: [
            hashlib.sha256(content).hexdigest() for content in contents(folder / f"{name} snapshot").values()
        ],
        lambda _number: ForwardPassPerfModel.best_available(config),
    )
    return {
        "bytes": sum(map(len, files.values())),
        "save_ms": save_ms,
        "raw_save_ms": floor_ms,
        "save_over_raw": save_over_floor,
        "restore_ms": restore_ms,
        "reading_ms": reading_ms,
        "cold_construction_ms": cold_ms,
    }


def measure_native(folder: Path, ballast_mb: int) -> dict[str, float]:
    """Restore of a native model whose data are large: how much of it is hashing, and how fast that is."""
    config = corrected(op_level_config(folder / "native data"), "fixed")
    root = Path(config["systems_paths"][0])
    chunk = np.random.default_rng(1).bytes(1 << 20)
    for number in range(ballast_mb):
        path = root / f"data/x100/ballast/vllm/1.0/part{number}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(number.to_bytes(4, "little") + chunk)
    model = ForwardPassPerfModel.best_available(config)
    model.tune_with_fpms([[rank] for rank in iterations(config, "train", 400)])
    pinned = model.save_state_snapshot(folder / "native")
    restore_ms, hashing_ms, digests_ms = best_ms(
        7,
        lambda _number: ForwardPassPerfModel.best_available(pinned),
        lambda _number: measure_fingerprint(SystemsRoot(root), config["system"]),
        lambda _number: [hashlib.sha256(chunk).digest() for _ in range(ballast_mb)],
    )
    data_bytes = sum(entry.size_bytes for entry in measure_fingerprint(SystemsRoot(root), config["system"]).entries)
    return {
        "data_bytes": data_bytes,
        "restore_ms": restore_ms,
        "hashing_ms": hashing_ms,
        "hashing_share": hashing_ms / restore_ms,
        "hashing_gb_per_s": data_bytes / hashing_ms / 1e6,
        "sha256_alone_gb_per_s": ballast_mb * len(chunk) / digests_ms / 1e6,
    }


def iteration(num_prefill: int, tokens: int, kv: int, num_decode: int, past: int, wall: float) -> dict[str, Any]:
    scheduled = {
        "num_prefill_requests": num_prefill,
        "sum_prefill_tokens": tokens,
        "sum_prefill_kv_tokens": kv,
        "num_decode_requests": num_decode,
        "sum_decode_kv_tokens": past,
    }
    return {"wall_time": wall, "scheduled_requests": scheduled}


def measure_large(folder: Path, rows: int) -> dict[str, float]:
    """A state of many rows against a copy of its bytes with an fsync."""
    sampling = {"max_observations": rows}
    config = sample.MODEL | {"estimator_config": {"fpm_regression": {"sampling": sampling}}}
    numbers = np.random.default_rng(7)
    model = ForwardPassPerfModel.best_available(config)
    for prefill, decode in ((0, 1), (1, 0), (1, 1)):  # a store for each kind of work
        tokens, kv = numbers.integers(1, 8192, (2, rows)) * prefill
        requests = numbers.integers(1, 256, rows) * decode
        past = requests * numbers.integers(16, 4096, rows)
        wall = numbers.uniform(0.005, 0.05, rows)
        columns = (tokens.tolist(), kv.tolist(), requests.tolist(), past.tolist(), wall.tolist())
        model.tune_with_fpms(FpmBatch.from_dicts([[iteration(prefill, *row)] for row in zip(*columns, strict=True)]))
    pinned = model.save_state_snapshot(folder / "large")
    state = (folder / "large" / "state.bin").read_bytes()

    def copied(number: int) -> None:
        target = folder / f"copy {number}"
        with open(folder / "large" / "state.bin", "rb") as source, open(target, "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())

    save_ms, copy_ms, save_over_copy = beside(
        15, lambda number: model.save_state_snapshot(folder / f"large {number}"), copied
    )
    restore_ms, _, restore_over_copy = beside(
        15, lambda _number: ForwardPassPerfModel.best_available(pinned), lambda number: copied(number + 15)
    )
    return {
        "state_bytes": len(state),
        "save_ms": save_ms,
        "save_over_copy": save_over_copy,
        "restore_ms": restore_ms,
        "restore_over_copy": restore_over_copy,
        "copy_with_fsync_ms": copy_ms,
    }


def verdicts(found: dict[str, Any]) -> dict[str, bool]:
    """Each bound and whether it holds."""
    kinds, native, large = found["kinds"], found["native"], found["large"]
    holds = {
        f"save of {name} at most {SAVE_OVER_FLOOR} times the raw floor": row["save_over_raw"] <= SAVE_OVER_FLOOR
        for name, row in kinds.items()
    }
    holds |= {
        f"restore of {name} under {RESTORE_REGRESSION_MS} ms beyond reading": row["restore_ms"] - row["reading_ms"]
        < RESTORE_REGRESSION_MS
        for name, row in kinds.items()
        if name.startswith("regression")
    }
    holds["native restore mostly hashing"] = native["hashing_share"] > 0.5
    holds[f"native hashing at least {HASHING_GB_PER_S} GB/s"] = native["hashing_gb_per_s"] >= HASHING_GB_PER_S
    for side in ("save", "restore"):
        holds[f"large {side} at least half the speed of a copy with fsync"] = (
            large[f"{side}_over_copy"] <= LARGE_OVER_COPY
        )
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-evidence", action="store_true")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of each store of the large state")
    parser.add_argument("--ballast-mb", type=int, default=256, help="size of the data of the native model")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("FPMSDK_BENCH_DIR")) as name:
        folder = Path(name)
        configs = prepare(folder / "data")
        kinds = ("regression linear", "regression linear threshold", "regression selected", "op_level hybrid")
        found: dict[str, Any] = {
            "kinds": {kind: measure_kind(kind, configs[kind], folder, given.rounds) for kind in kinds},
            "large": measure_large(folder, given.rows),
            "native": measure_native(folder, given.ballast_mb),
        }
    holds = verdicts(found)
    for kind, row in found["kinds"].items():
        print(
            f"{kind}: {row['bytes']:,} bytes, save {row['save_ms']:.2f} ms (raw {row['raw_save_ms']:.2f}, "
            f"ratio {row['save_over_raw']:.2f}), restore "
            f"{row['restore_ms']:.3f} ms (reading {row['reading_ms']:.3f}, cold {row['cold_construction_ms']:.3f})"
        )
    large, native = found["large"], found["native"]
    print(
        f"large state: {large['state_bytes']:,} bytes, save {large['save_ms']:.1f} ms, restore "
        f"{large['restore_ms']:.1f} ms, copy with fsync {large['copy_with_fsync_ms']:.1f} ms; ratios "
        f"{large['save_over_copy']:.2f} and {large['restore_over_copy']:.2f}"
    )
    print(
        f"native: {native['data_bytes']:,} bytes of data, restore {native['restore_ms']:.1f} ms, of which hashing "
        f"{native['hashing_ms']:.1f} ms at {native['hashing_gb_per_s']:.2f} GB/s (SHA-256 alone "
        f"{native['sha256_alone_gb_per_s']:.2f})"
    )
    for bound, held in holds.items():
        print(f"{'holds' if held else 'MISSED'}: {bound}")
    if given.write_evidence:
        machine = {"machine": platform.machine(), "python": platform.python_version(), "cpus": os.cpu_count()}
        EVIDENCE.write_text(json.dumps(machine | found | {"bounds": holds}, indent=1) + "\n")
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
