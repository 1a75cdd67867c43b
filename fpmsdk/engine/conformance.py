"""Replay the recorded decisions of a real vLLM scheduler through the compiled one, step by step.

    python -m fpmsdk.engine.conformance FILE...

prints every difference, a line per scenario, and last `scenarios N, steps M, differences D`; exits 0 only
when D is 0.
Not a replay: no time passes, the engine is stepped as the recording says. Source: vllm-facts.md 1 to 3.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fpmsdk._ext.pages import PrefixKeys
from fpmsdk._ext.scheduler import Requests, Scheduler
from fpmsdk.errors import TraceError

Scenario = Mapping[str, Any]


def vllm_version(document: Mapping[str, Any]) -> tuple[int, int]:
    """Return (major, minor) of the vLLM that made a recording, from its note.

    >>> vllm_version({"note": "Per-step decisions of the real vLLM 0.28.0 (CPU build) V1 scheduler"})
    (0, 28)
    """
    match = re.search(r"vLLM (\d+)\.(\d+)", str(document.get("note", "")))
    if match is None:
        raise TraceError("recording: field `note` does not name the vLLM version; expected 'vLLM MAJOR.MINOR'")
    return int(match[1]), int(match[2])


def prompt_token_ids(request: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the prompt of a recorded request: an optional common prefix, then ids made from its seed."""
    prefix = int(request.get("prefix", 0))
    common = np.arange(prefix, dtype=np.int64) * 3 % 500 + 3
    own = (np.arange(request["prompt"] - prefix, dtype=np.int64) * 7 + request["seed"]) % 500 + 3
    return np.concatenate([common, own])


def build_scheduler(scenario: Scenario, version: tuple[int, int]) -> Scheduler:
    """Return a rank configured as the recorded engine was, its requests known but not yet submitted."""
    engine = scenario["engine"]
    requests = scenario["requests"]
    prompts = np.array([request["prompt"] for request in requests], np.int64)
    outputs = np.array([request["output"] for request in requests], np.int64)
    keys = None
    if engine["enable_prefix_caching"]:
        keys = PrefixKeys(
            prompts,
            outputs,
            np.concatenate([np.zeros(1, np.int64), np.cumsum(prompts)]),
            np.concatenate([prompt_token_ids(request) for request in requests]),
            1,
            scenario["block_size"],
        )
    return Scheduler(
        Requests(prompts, outputs, [request.get("priority", 0) for request in requests]),
        "vllm",
        num_gpu_blocks=scenario["num_blocks"],
        block_size=scenario["block_size"],
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        max_model_len=engine["max_model_len"],
        enable_chunked_prefill=engine.get("enable_chunked_prefill", True),
        scheduling_policy=engine.get("scheduling_policy", "fcfs"),
        keys=keys,
        long_prefill_token_threshold=engine.get("long_prefill_token_threshold", 0),
        long_prefill_token_threshold_adaptive=engine.get("long_prefill_token_threshold_adaptive", False),
        vllm_version=version,
        watermark=engine.get("watermark", 0.0),
        scheduler_reserve_full_isl=engine.get("scheduler_reserve_full_isl", True),
    )


def simulated_steps(scenario: Scenario, version: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield the scheduler's decisions in the form of a recorded step, driven as the recording was."""
    scheduler = build_scheduler(scenario, version)
    names = [request["id"] for request in scenario["requests"]]
    arrivals = sorted(range(len(names)), key=lambda index: scenario["requests"][index]["step"])
    finished: list[int] = []
    seen: set[int] = set()
    step = 0
    while arrivals or scheduler.has_unfinished():
        while arrivals and scenario["requests"][arrivals[0]]["step"] <= step:
            scheduler.enqueue(arrivals.pop(0))
        # An idle engine runs one more step to report what finished, then none.
        if scheduler.has_unfinished() or finished:
            decided = scheduler.schedule_pass()
            yield {
                "tokens": {names[index]: tokens for index, tokens in decided["tokens"].items()},
                "new": {names[index]: tokens for index, tokens in decided["reused"].items() if index not in seen},
                "total": sum(decided["tokens"].values()),
                "preempted": sorted(names[index] for index in decided["preempted"]),
                "finished": sorted(names[index] for index in finished),
                "free_blocks": decided["free_blocks"],
                "running": decided["num_running"],
                "waiting": decided["num_waiting"],
            }
            seen.update(decided["reused"])
            finished = scheduler.complete_pass()[1]
        step += 1


def scenario_differences(scenario: Scenario, version: tuple[int, int]) -> list[str]:
    """Return one line per recorded field of a step that the compiled rank does not reproduce."""
    differences = []
    recorded = scenario["steps"]
    # One step more shows that the rank goes on; a rank that went wrong might do so for ever.
    simulated = list(islice(simulated_steps(scenario, version), len(recorded) + 1))
    if len(simulated) != len(recorded):
        more_or_less = "fewer" if len(simulated) < len(recorded) else "more"
        differences.append(f"{len(recorded)} steps recorded, {more_or_less} simulated")
    for number, (expected, found) in enumerate(zip(recorded, simulated, strict=False)):
        differences += [
            f"step {number} {field}: recorded {expected[field]}, simulated {found[field]}"
            for field in found
            if expected[field] != found[field]
        ]
    return differences


def read_recording(path: str) -> dict[str, Any]:
    """Return a recording whose fields are all there.

    Raises TraceError when the file is something else; names the field.
    """
    document = json.loads(Path(path).read_text())
    if not isinstance(document, dict) or "scenarios" not in document:
        raise TraceError("field `scenarios` is missing; expected recorded scheduler decisions")
    for scenario in document["scenarios"]:
        for field in ("name", "engine", "requests", "num_blocks", "block_size", "steps"):
            if field not in scenario:
                raise TraceError(f"scenario {scenario.get('name')}: field `{field}` is missing")
    return document


def main(paths: list[str]) -> int:
    """Check every file, print the differences and the totals; return the exit code."""
    if not paths:
        print("usage: python -m fpmsdk.engine.conformance FILE...", file=sys.stderr)
        return 2
    scenarios = steps = total = 0
    for path in paths:
        try:
            document = read_recording(path)
            version = vllm_version(document)
        except (OSError, ValueError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        for scenario in document["scenarios"]:
            differences = scenario_differences(scenario, version)
            for line in differences:
                print(f"{scenario['name']}: {line}")
            print(f"{scenario['name']}: {len(scenario['steps'])} steps, {len(differences)} differences")
            scenarios += 1
            steps += len(scenario["steps"])
            total += len(differences)
    print(f"scenarios {scenarios}, steps {steps}, differences {total}")
    return 0 if total == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
