"""The configuration that reproduces a candidate later: nothing in it is left to what is newest or fits best.

Source: predict-recommend.md section 10.2.
"""

from __future__ import annotations

from typing import Any

from fpmsdk.recommendation.candidate import Candidate


def concrete_config(candidate: Candidate) -> dict[str, Any]:
    """The configuration of a candidate with what its evaluation resolved.

    A load relative to the cache is the requests in flight that it came to, the version of the backend is the one whose
    data were read, and every worker names the estimator that priced it, without a fallback.

    Parameters
    ----------
    candidate: that was evaluated.

    Returns
    -------
    A new configuration; parts that did not change are shared with the candidate's.

    Source: predict-recommend.md section 10.2.

    >>> from fpmsdk.recommendation.candidate import Outcome, Sample
    >>> load = {"concurrency": 4, "capacity_requests": 9, "capacity_tokens": 2400}
    >>> document = {"traffic": {"load": {"type": "kv_capacity_fraction", "fraction": 0.5}}}
    >>> sample = Sample("aggregated", "vllm", 0)
    >>> concrete_config(Candidate("candidate-000001", sample, document, Outcome("feasible", kv_load=load)))
    {'traffic': {'load': {'type': 'concurrency', 'concurrency': 4}}}
    """
    document, outcome = dict(candidate.document), candidate.outcome
    if outcome.kv_load is not None:
        load = {"type": "concurrency", "concurrency": outcome.kv_load["concurrency"]}
        document["traffic"] = {**document["traffic"], "load": load}
    estimated = {role: source for role, source in outcome.provenance.items() if "data_identity" in source}
    if not estimated:
        return document
    engine = dict(document["engine"])
    workers = dict(engine.get("workers", {}))
    for role, source in estimated.items():
        worker = dict(workers.get(role, {}))
        pinned = {"estimation_mode": source["estimator"], "fallback_policy": "deny"}
        worker["timing"] = {**(worker.get("timing") or {"type": "default"}), **pinned}
        workers[role] = worker
    versions = {source["data_identity"]["backend_version"] for source in estimated.values()}
    # Roles agree on the version, or the evaluation had refused them.
    if len(versions) == 1 and None not in versions:
        engine["backend_version"] = versions.pop()
    document["engine"] = engine | {"workers": workers}
    return document
