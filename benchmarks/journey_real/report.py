"""The report of a real journey: its figures, whether they hold, and digests of everything they come from.

    python benchmarks/journey_real/report.py --work FOLDER [--write-evidence]
    python benchmarks/journey_real/report.py --check

The first reports what a journey left in its folder. The second recomputes every figure of the committed report from the
committed artifacts: the served requests, the telemetry, the published table and the raw results of every launch. Exits
with 1 when a figure or a digest differs; gates and limits that are missed are told and are results.
"""

import argparse
import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from launches import repeatability
from replay import FRAMES, REQUESTS, TABLE, compare_run
from work import ROOT, digest_of

sys.path.insert(0, str(ROOT / "benchmarks/compare"))
from harness import machine

EVIDENCE = ROOT / "benchmarks/evidence"
REPORT, KEPT = EVIDENCE / "journey_real.json", EVIDENCE / "journey_real"
ARTIFACTS = (REQUESTS, FRAMES, TABLE, "fpm_forward_perf.metadata.json")
RAW, ASSESSED = "launches.tar.gz", "collection-validation.json"


def figures(folder: Path) -> dict[str, Any]:
    """Everything that follows from the artifacts in a folder."""
    gates = json.loads((folder / ASSESSED).read_text())["gates"]
    with tempfile.TemporaryDirectory() as place:
        with tarfile.open(folder / RAW) as archive:
            archive.extractall(place, filter="data")
        launches = repeatability(Path(place))
    return {"gates": gates, "launches": launches, "served": compare_run(folder)}


def keep(work: Path) -> None:
    """Copy the artifacts of a journey beside the report."""
    KEPT.mkdir(exist_ok=True)
    for name in ARTIFACTS:
        (KEPT / name).write_bytes((work / "serving" / name).read_bytes())
    (KEPT / ASSESSED).write_bytes((work / "quality" / ASSESSED).read_bytes())
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for part in ("collection", "quality"):
            for path in sorted((work / part).rglob("raw/node0000/benchmark.json")):
                if "cells" in path.parts and "smoke" not in path.parts:
                    archive.add(path, str(path.relative_to(work)))
    (KEPT / RAW).write_bytes(raw.getvalue())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--write-evidence", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.check:
        told = json.loads(REPORT.read_text())
        digests = {path.name: digest_of(path) for path in sorted(KEPT.iterdir())}
        now = json.loads(json.dumps(figures(KEPT)))
        differing = [name for name in told["artifacts"] if digests.get(name) != told["artifacts"][name]]
        differing += [name for name in now if now[name] != told["figures"][name]]
        print("\n".join(f"DIFFERS: {name}" for name in differing) or "every figure is that of the artifacts")
        return 1 if differing else 0
    keep(given.work)
    found = figures(KEPT)
    document = {
        "machine": machine(),
        "steps": {path.stem: json.loads(path.read_text()) for path in sorted((given.work / "results").glob("*.json"))},
        "figures": found,
        "artifacts": {path.name: digest_of(path) for path in sorted(KEPT.iterdir())},
        "recompute": "python benchmarks/journey_real/report.py --check",
    }
    if given.write_evidence:
        REPORT.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    for name, gate in found["gates"].items():
        print(f"{name}: {gate['status']}")
    print("\n".join(found["served"]["missed"]) or "the replay is within its limits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
