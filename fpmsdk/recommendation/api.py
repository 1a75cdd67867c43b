"""`recommend` and `merge`: from a file, or the directories of parts, to a recommendation.

Source: predict-recommend.md sections 1, 8 and 17.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.recommendation.config import RecommendConfig, read_recommend_config
from fpmsdk.recommendation.dry_run import dry_run
from fpmsdk.recommendation.journal import JOURNAL, read_journal, same_sweep
from fpmsdk.recommendation.merging import merged_journal
from fpmsdk.recommendation.plan import Limits, Plan
from fpmsdk.recommendation.planning import plan_search, seconds_of_one
from fpmsdk.recommendation.run import DEFAULTS, Options, Recommendation, put_together, search
from fpmsdk.recommendation.shards import parse_shard

Config = RecommendConfig | Mapping[str, Any] | str | os.PathLike[str]


def recommend(
    config: Config,
    output_dir: str | os.PathLike[str] | None = None,
    *,
    options: Options = DEFAULTS,
    shard: str = "1/1",
    overrides: Sequence[str] = (),
) -> Recommendation:
    """Search the deployments that serve a workload best.

    Parameters
    ----------
    config: the search: a path of a YAML file, a mapping, or the model of either.
    output_dir: where the journal and the results go; None for no files.
    options: how it is run.
    shard: `i/n`, the part that is searched; `merge` joins them.
    overrides: `PATH=YAML` each, applied in order before validation.

    Raises
    ------
    OnboardError: the configuration or the directory is rejected; nothing was written or removed.
    EvidenceError: an input is missing, or differs on a worker.
    KeyboardInterrupt: it was interrupted; what came until then is in the journal, for `Options(resume=True)`.

    Source: predict-recommend.md sections 6 to 10.

    >>> import tempfile
    >>> from fpmsdk.sample.quickstart import write_quickstart
    >>> goal = "optimization={target: throughput, constraints: {max_candidate_gpus: 1}}"
    >>> loads = "traffic.load.concurrency={choices: [1, 4]}"
    >>> found = recommend(write_quickstart(tempfile.mkdtemp()), overrides=[goal, loads])
    >>> found.exit_code, found.best.sample.knobs
    (0, (('traffic.load.concurrency', 4),))
    """
    return search(planned(config, output_dir, options=options, shard=shard, overrides=overrides), output_dir, options)


def planned(
    config: Config,
    output_dir: str | os.PathLike[str] | None = None,
    *,
    options: Options = DEFAULTS,
    shard: str = "1/1",
    overrides: Sequence[str] = (),
) -> Plan:
    """What `recommend` would search. Parameters and errors as there.

    >>> import tempfile
    >>> from fpmsdk.sample.quickstart import write_quickstart
    >>> goal = "optimization={target: throughput, constraints: {max_candidate_gpus: 4}}"
    >>> planned(write_quickstart(tempfile.mkdtemp()), overrides=[goal]).planned
    4
    """
    model = config if isinstance(config, RecommendConfig) else read_recommend_config(config, overrides)
    capacity = options.capacity(model.optimizer.parallelism, Limits.of(model.document).workers)
    recorded = _recorded_strategy(output_dir) if options.resume else None
    return plan_search(model, shard=parse_shard(shard), capacity=capacity, recorded=recorded)


def explain(plan: Plan, options: Options = DEFAULTS) -> dict[str, Any]:
    """The document of a dry run (`dry_run.dry_run`): prices a candidate of each branch to say how long all take.

    >>> import tempfile
    >>> from fpmsdk.sample.quickstart import write_quickstart
    >>> goal = "optimization={target: throughput, constraints: {max_candidate_gpus: 4}}"
    >>> document = explain(planned(write_quickstart(tempfile.mkdtemp()), overrides=[goal]))
    >>> document["candidates"], document["algorithm"]
    (4, 'grid')
    """
    each = seconds_of_one(plan.space, plan.objective, plan.materialise)
    return dry_run(plan, each, options.capacity(plan.optimizer.parallelism, Limits.of(plan.document).workers))


def merge(
    folders: Sequence[str | os.PathLike[str]],
    output_dir: str | os.PathLike[str],
    *,
    options: Options = DEFAULTS,
) -> Recommendation:
    """One result from the parts of a sweep, as if it had been searched in one.

    Parameters
    ----------
    folders: output directories of all parts, in any order.
    output_dir: where the results go.
    options: what is written, and whether it takes the place of other results.

    Raises
    ------
    OnboardError: the parts do not belong together, or one is missing or unfinished.
    EvidenceError: a journal is damaged, or the inputs of the sweep are no longer what they were.

    Source: predict-recommend.md section 17.

    >>> import tempfile
    >>> from fpmsdk.sample.quickstart import write_quickstart
    >>> place = tempfile.mkdtemp()
    >>> config = write_quickstart(place)
    >>> goal = "optimization={target: throughput, constraints: {max_candidate_gpus: 4}}"
    >>> parts = [recommend(config, f"{place}/{n}", shard=f"{n}/2", overrides=[goal]).output_dir for n in (1, 2)]
    >>> len(merge(parts, f"{place}/whole").result.candidates)
    4
    """
    journal = merged_journal(folders)
    strategy = journal.head["strategy"]["name"]
    plan = plan_search(RecommendConfig.from_source(journal.head["config"]), recorded=strategy)
    same_sweep(journal.head, plan.head, Path(folders[0]) / JOURNAL, "merge on a machine that has its inputs")
    return put_together(plan, journal, output_dir, options)


def _recorded_strategy(output_dir: str | os.PathLike[str] | None) -> str | None:
    path = None if output_dir is None else Path(output_dir) / JOURNAL
    if path is None or not path.exists():
        return None
    name: str | None = read_journal(path).head.get("strategy", {}).get("name")
    return name
