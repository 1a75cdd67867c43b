"""A finished campaign of a real engine's recorded launches, and launches of it that tests script."""

import json
import shutil
from types import SimpleNamespace

from fpmsdk.collect.checkpoint import SCHEMA
from fpmsdk.collect.render import LAUNCH_FILES
from fpmsdk.documents.canonical import digest
from tests.collect.native import PLAN, RECORDED, recorded, recorded_attempt

INPUTS = {
    "K8sConfig": {
        "extra_env": [
            {"name": "DYN_BENCH_KV_WARMUP", "value": "on"},
            {"name": "DYN_BENCH_PREFILL_REAL_SEED", "value": "on"},
        ]
    }
}


# Points of each sweep that are kept, so that tests are quick.
POINTS = 8


def keep(count):
    """A change of an artifact that leaves its first points only."""

    def change(document):
        document["results"] = [entry for entry in document["results"] if entry["point"]["benchmark_id"] <= count]
        groups = [entry for entry in document["iteration_groups"] if entry["benchmark_id"] <= count]
        document["iteration_groups"] = groups
        document["coverage"].update(expected_points=count, completed_points=count)
        in_order = sorted(groups, key=lambda group: group["benchmark_id"])
        document["timing"]["measured_iteration_seconds"] = sum(group["wall_time"] for group in in_order)

    return change


def campaign(folder):
    """The folder of the campaign and its checkpoint."""
    root = folder / "campaign"
    root.mkdir()
    shutil.copy(RECORDED / "plan.json", root / "collection-plan.json")
    (root / "generator-overrides.json").write_text(json.dumps(INPUTS))
    entries = {}
    for cell in PLAN.cells:
        recorded(root, cell, 1, keep(POINTS))
        entries[cell.cell_id] = {"status": "passed", "attempt_id": recorded_attempt(cell.workload_kind, 1)}
    checkpoint = folder / "fpm_forward.json"
    checkpoint.write_text(json.dumps({"schema": SCHEMA, "plan_sha256": PLAN.sha256, "cells": entries}))
    return root, checkpoint


class Launches:
    """Stands in for `run_campaign`: every launch replays a recorded one under new identities, or what is scripted.

    `script` holds what the next launches do instead of succeeding: an exception, or a function that is given what
    was written (`folder` of the cell, `entry` of the checkpoint, `errors`) and changes it.
    """

    def __init__(self):
        self.count, self.script = 0, []

    def __call__(self, plan, *, artifact_root, checkpoint_dir, publish, **options):
        assert publish is False
        self.count += 1
        number, [cell] = self.count, plan.cells
        event = self.script.pop(0) if self.script else None
        if isinstance(event, BaseException):
            raise event
        attempt, errors = f"{number:032x}", []

        def rename(document):
            keep(POINTS)(document)
            document["run_id"] = f"run-{number}"

        folder = recorded(artifact_root / plan.sha256[:16], cell, 2, rename, attempt)
        provenance = folder / "raw" / "node0000" / "collector-provenance.json"
        provenance.write_text(json.dumps(json.loads(provenance.read_text()) | {"plan_sha256": plan.sha256}))
        for name in LAUNCH_FILES:
            (folder / name).write_text("")
        entry = {"status": "passed", "attempt_id": attempt}
        if event is not None:
            event(SimpleNamespace(folder=folder, entry=entry, errors=errors))
        checkpoint_dir.mkdir()
        document = {"schema": SCHEMA, "plan_sha256": plan.sha256, "cells": {cell.cell_id: entry}}
        (checkpoint_dir / "fpm_forward.json").write_text(json.dumps(document))
        return SimpleNamespace(errors=errors)


def change_artifact(change):
    """A script entry that changes the result file of a launch."""

    def event(launch):
        path = launch.folder / "raw" / "node0000" / "benchmark.json"
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return event


assert digest(INPUTS) == PLAN.document["generator_config_sha256"]
