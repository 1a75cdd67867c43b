"""A process of its own, for tests: reads one JSON task from its arguments, prints one JSON answer.

Estimates are told as the hexadecimal form of their bits, errors by class and text.
"""

import json
import sys

from fpmsdk import ForwardPassPerfModel
from tests.snapshot.kinds import continued, iterations, without_snapshot

TUNED_AND_CONTINUED, QUERIES = 950, 160


def answers(model, queries):
    found = []
    for query in queries:
        try:
            estimate = model.estimate_forward_pass_time_ms(query)
            found.append("none" if estimate is None else estimate.hex())
        except ValueError as fault:
            found.append(f"{type(fault).__name__}: {fault}")
    return found


def stream(config):
    # What every process of a test tunes on and asks; a function of the configuration alone.
    frames = iterations(without_snapshot(config), "train", TUNED_AND_CONTINUED)
    queries = iterations(without_snapshot(config), "eval", QUERIES)
    some = len(frames) * 3 // 4
    return frames[:some], frames[some:], queries


def uninterrupted(config, folder):
    before, after, queries = stream(config)
    model = ForwardPassPerfModel.best_available(config)
    untuned = answers(model, queries)
    model.tune_with_fpms([[rank] for rank in before])
    pinned = model.save_state_snapshot(f"{folder}/first")
    saved = answers(model, queries)
    model.tune_with_fpms([[rank] for rank in after])
    model.save_state_snapshot(f"{folder}/uninterrupted")
    only_after = ForwardPassPerfModel.best_available(config)
    only_after.tune_with_fpms([[rank] for rank in after])
    return {
        "config": pinned,
        "untuned": untuned,
        "saved": saved,
        "continued": answers(model, queries),
        "only_continued": answers(only_after, queries),
        "reports": reports(model),
    }


def restored(config, folder):
    _, after, queries = stream(config)
    model = ForwardPassPerfModel.best_available(continued(config))
    at_once = answers(model, queries)
    model.tune_with_fpms([[rank] for rank in after])
    model.save_state_snapshot(f"{folder}/restored")
    return {"saved": at_once, "continued": answers(model, queries), "reports": reports(model)}


def attempt(queries, config=None, state_snapshot=None, save=None):
    """What a new process says of a configuration or a snapshot, and of saving it."""
    try:
        model = ForwardPassPerfModel.best_available(config, state_snapshot=state_snapshot)
        found = {"answers": answers(model, queries)}
        if save is not None:
            found["config"] = model.save_state_snapshot(save)
    except (ValueError, OSError, RuntimeError) as fault:
        return {"error": type(fault).__name__, "text": str(fault)}
    return found


def reports(model):
    diagnostics = model.diagnostics()
    del diagnostics["provenance"]
    factors = (model.get_min_correction_factor(), model.get_max_correction_factor(), model.get_avg_correction_factor())
    return [
        diagnostics,
        model.regression_store_diagnostics(),
        model.readiness_report(),
        model.deployment_topology(),
        [None if factor is None else factor.hex() for factor in factors],
    ]


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    print(json.dumps(globals()[task.pop("task")](**task)))
