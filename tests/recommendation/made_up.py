"""Sweeps whose candidates are worth what a formula says: no table and no replay."""

from pathlib import Path

import pytest

from fpmsdk.recommendation import sweep
from fpmsdk.recommendation.branches import Space
from fpmsdk.recommendation.objectives import Objective
from fpmsdk.recommendation.plan import Plan
from fpmsdk.recommendation.run import Options, search
from fpmsdk.recommendation.search.choice import choose
from fpmsdk.recommendation.shards import WHOLE
from tests.recommendation.search.spaces import Optimizer, branch
from tests.recommendation.worth import evaluate

SPACE = Space(
    (
        branch({"knobs.a": {"choices": [1, 2, 3, 4, 5, 6]}, "knobs.b": {"choices": [10, 20]}}, gpus=(1, 2)),
        branch({"knobs.a": {"choices": [1, 2, 3]}}, gpus=(2, 4), mode="disaggregated", seed_offset=1),
    )
)


def materialise(happens, branch, sample):
    knobs = {path.removeprefix("knobs."): value for path, value in sample.knobs}
    workers = {"aggregated": {"parallelism": dict(branch.arms[sample.arm].parallelism[branch.mode])}}
    return {"engine": {"mode": branch.mode, "workers": workers}, "knobs": knobs, "happens": happens}


def plan(*, shard=WHOLE, space=SPACE, happens=None, inputs=None, config=None, **optimizer):
    settings = {"algorithm": "random", "parallelism": 4} | optimizer
    chosen = Optimizer(**settings)
    strategy = choose(chosen, space.branches, lambda: 1.0, sharded=shard != WHOLE)
    document = {"name": "made up", "optimizer": settings} | (config or {})
    objective = Objective("throughput")
    return Plan(
        document,
        chosen,
        space,
        strategy,
        objective,
        lambda branch, sample: materialise(happens or {}, branch, sample),
        inputs or {},
        shard,
    )


def run(output_dir, *, options=None, **of_plan):
    """Search with made-up candidates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "evaluate", evaluate)
        return search(plan(**of_plan), output_dir, options or Options())


def ledger(found):
    """A ledger without the one field that differs between runs."""
    provenance = {name: value for name, value in found.ledger["provenance"].items() if name != "created_at"}
    return found.ledger | {"provenance": provenance}


def written(folder):
    """Every result file with its content, without the ledger and what is about the run."""
    skipped = (
        "recommendation.json",
        "candidates.jsonl",
        ".recommend.lock",
        "execution-events.jsonl",
        "resource-runtime.json",
    )
    files = (path for path in Path(folder).rglob("*") if path.is_file() and path.name not in skipped)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
