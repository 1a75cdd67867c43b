"""Side-by-side timing: two implementations in one process, in alternating blocks, with their answers compared.

The scripts beside this file are run by path, so that they measure the installed package and not a source tree.
"""

import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EVIDENCE = Path(__file__).parent.parent / "evidence"
ROUNDS = 9

Block = Callable[[], Any]


@dataclass(frozen=True)
class Comparison:
    """Times in microseconds per item, and how many times faster ours is; `required` is the ratio that must hold."""

    name: str
    items: int
    peer_min_us: float
    peer_median_us: float
    ours_min_us: float
    ours_median_us: float
    required: float

    @property
    def ratio_of_minima(self) -> float:
        return self.peer_min_us / self.ours_min_us

    @property
    def ratio_of_medians(self) -> float:
        return self.peer_median_us / self.ours_median_us

    @property
    def holds(self) -> bool:
        return min(self.ratio_of_minima, self.ratio_of_medians) >= self.required


def compare(
    name: str,
    peer: Block,
    ours: Block,
    *,
    items: int,
    required: float,
    prepare: Callable[[], None] = lambda: None,
    rounds: int = ROUNDS,
) -> Comparison:
    """Time both blocks alternately; `prepare` runs untimed before each of them."""
    times: dict[str, list[float]] = {"peer": [], "ours": []}
    for _ in range(rounds):
        for side, block in (("peer", peer), ("ours", ours)):
            prepare()
            gc.collect()
            gc.disable()
            begin = time.perf_counter()
            block()
            times[side].append((time.perf_counter() - begin) / items * 1e6)
            gc.enable()
    return Comparison(
        name,
        items,
        min(times["peer"]),
        statistics.median(times["peer"]),
        min(times["ours"]),
        statistics.median(times["ours"]),
        required,
    )


def largest_difference(peer: list[float | None], ours: list[float | None]) -> float:
    """Largest relative difference; infinite when one side has an answer and the other has none."""
    worst = 0.0
    for a, b in zip(peer, ours, strict=True):
        if (a is None) != (b is None):
            return float("inf")
        if a is not None and b is not None and a != b:
            worst = max(worst, abs(a - b) / max(abs(a), abs(b)))
    return worst


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    models = {line.split(":", 1)[1].strip() for line in _cpu_lines() if line.startswith("model name")}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": sorted(models) or platform.processor(),
        "cores": os.cpu_count(),
    }


def _cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def report(title: str, comparisons: list[Comparison], facts: dict[str, Any], failures: list[str]) -> int:
    """Print the table, write the evidence file when `--write-evidence` asks for it, and return the exit code."""
    print(f"{'':44}{'peer min':>10}{'median':>10}{'ours min':>10}{'median':>10}{'ratio':>9}{'needed':>8}")
    for item in comparisons:
        ratio = min(item.ratio_of_minima, item.ratio_of_medians)
        print(
            f"{item.name:44}{item.peer_min_us:10.3f}{item.peer_median_us:10.3f}{item.ours_min_us:10.3f}"
            f"{item.ours_median_us:10.3f}{ratio:9.1f}{item.required:8.1f}{'' if item.holds else '  MISSED'}"
        )
        if not item.holds:
            failures.append(f"{item.name}: {ratio:.2f} times faster, {item.required} needed")
    print("microseconds per item; ratio: the smaller of those of minima and medians")
    for name, value in facts.items():
        print(f"{name}: {value}")
    rows = [
        asdict(item) | {"ratio_of_minima": item.ratio_of_minima, "ratio_of_medians": item.ratio_of_medians}
        for item in comparisons
    ]
    if "--write-evidence" in sys.argv:
        document = {"machine": machine(), "comparisons": rows, "facts": facts, "failures": failures}
        (EVIDENCE / f"{title}.json").write_text(json.dumps(document, indent=1) + "\n")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0
