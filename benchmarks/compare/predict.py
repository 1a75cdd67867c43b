"""`predict` and `recommend` beside the public peer's commands: whole processes, from cold start to the result on disk.

    python benchmarks/compare/predict.py [--write-evidence]

needs an environment that holds fpmsdk and the peer (aisimulate with all it requires); `make compare-predict` makes one.
Exits 1 on a differing answer, a missing peer or a missed ratio.
"""

import copy
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from harness import Comparison, compare, largest_difference, report
from predict_cases import PEER_RULES, predictions, sweep_of_12, sweep_of_200

BIN = Path(sys.executable).parent
SIDES = {"peer": BIN / "aisimulate", "ours": BIN / "fpmsdk"}
TOLERANCE = 1e-9
ROUNDS_OF_A_PREDICTION = 7
ROUNDS_OF_A_SWEEP = {"12 candidates": 3, "200 candidates of 2,000 requests": 1}
PREDICT, SWEEP, LARGE_SWEEP = 1 / 0.3, 30.0, 10.0
KNOBS = ("replicas", "tensor", "max_batched_tokens", "max_sequences")
# What no command of ours can be faster than: a process that has imported the libraries it needs.
LIBRARIES = "import numpy, pyarrow.parquet, pydantic, rich.console, typer, yaml; from pydantic import BaseModel, Field"
# What depends on the wall clock is each side's own.
OWN_FIGURES = ("wall_time_ms", "processed_tokens_per_s", "processed_output_tokens_per_s")


class Command:
    """One command of one side on one file; its output is kept for the comparison of the answers."""

    def __init__(self, side: str, command: str, document: dict[str, Any], place: Path) -> None:
        self.side, self.folder = side, place / f"{side}-output"
        if side == "ours":
            document = copy.deepcopy(document) | {"execution": document.get("execution", {}) | PEER_RULES}
        config = place / f"{side}.yaml"
        config.write_text(yaml.safe_dump(document, sort_keys=False))
        self.arguments = [SIDES[side], command, "--config", config, "--output-dir", self.folder, "--overwrite"]

    def __call__(self) -> None:
        done = subprocess.run(self.arguments, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"FAILED: {self.side} exits with {done.returncode}: {done.stderr.strip()[-2000:]}")


def both(command: str, document: dict[str, Any], place: Path) -> dict[str, Command]:
    place.mkdir()
    return {side: Command(side, command, document, place) for side in SIDES}


def differing_figures(sides: dict[str, Command]) -> list[str]:
    """Numbers of the peer's report that ours lacks or has otherwise."""
    peer, ours = (json.loads((sides[side].folder / "prediction.json").read_text()) for side in ("peer", "ours"))
    names = [name for name, value in peer.items() if type(value) in (int, float) and name not in OWN_FIGURES]
    # Deviations of equal values are rounding, 1e-15 ms on either side.
    return [
        f"{name}: {peer[name]} and {ours.get(name)}"
        for name in names
        if ours.get(name) is None or not math.isclose(peer[name], ours[name], rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    ]


def ranking(command: Command) -> list[tuple[float, frozenset[tuple[str, Any]]]]:
    """Score and settings of every feasible deployment, best first."""
    ledger = json.loads((command.folder / "recommendation.json").read_text())
    candidates = {row["candidate_id"]: row for row in ledger["candidates"]}
    rows = []
    for name in ledger["views"]["top_n"]:
        worker = candidates[name]["prediction_config"]["engine"]["workers"]["aggregated"]
        settings = {**worker["parallelism"], **worker["scheduler"]}
        rows.append((candidates[name]["score"], frozenset((knob, settings[knob]) for knob in KNOBS)))
    return rows


def differing_ranks(sides: dict[str, Command]) -> list[str]:
    """Ranks at which the two sides name another deployment or score; equal scores may stand in either order."""
    peer, ours = ranking(sides["peer"]), ranking(sides["ours"])
    if len(peer) != len(ours):
        return [f"{len(peer)} and {len(ours)} deployments are ranked"]
    faults = []
    scores = {settings: score for score, settings in ours}
    for rank, ((score, settings), (own, _)) in enumerate(zip(peer, ours, strict=True), 1):
        if largest_difference([score, score], [own, scores.get(settings)]) > TOLERANCE:
            faults.append(f"rank {rank}: {sorted(settings)} with {score}, ours {own} and {scores.get(settings)}")
    return faults


def seconds_of_libraries() -> float:
    """The shortest of some processes that only import, in s."""
    taken = []
    for _ in range(ROUNDS_OF_A_PREDICTION):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", LIBRARIES], check=True)
        taken.append(time.perf_counter() - begun)
    return min(taken)


def main() -> int:
    if importlib.util.find_spec("aisimulate") is None:
        sys.exit("FAILED: the peer is not installed; run `make compare-predict`")
    comparisons: list[Comparison] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name, document in predictions(place).items():
            sides = both("predict", document, place / name.replace(" ", "-"))
            comparisons.append(
                compare(
                    f"predict, {name}",
                    sides["peer"],
                    sides["ours"],
                    items=1,
                    required=PREDICT,
                    rounds=ROUNDS_OF_A_PREDICTION,
                )
            )
            failures += [f"predict, {name}: {fault}" for fault in differing_figures(sides)]
        sweeps = {
            "12 candidates": (sweep_of_12(place), SWEEP),
            "200 candidates of 2,000 requests": (sweep_of_200(place), LARGE_SWEEP),
        }
        ranked = {}
        for name, (document, required) in sweeps.items():
            sides = both("recommend", document, place / name.replace(" ", "-"))
            comparisons.append(
                compare(
                    f"recommend, {name}",
                    sides["peer"],
                    sides["ours"],
                    items=1,
                    required=required,
                    rounds=ROUNDS_OF_A_SWEEP[name],
                )
            )
            ranked[name] = len(ranking(sides["ours"]))
            failures += [f"recommend, {name}: {fault}" for fault in differing_ranks(sides)]
    facts = {
        "deployments ranked by both": ranked,
        "unit": "one process from its start to its end",
        "floor: a process that imports the libraries, s": round(seconds_of_libraries(), 3),
    }
    return report("predict", comparisons, facts, failures)


if __name__ == "__main__":
    sys.exit(main())
