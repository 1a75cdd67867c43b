"""Replay the recorded decisions of a real vLLM scheduler through the compiled one, step by step.

    python -m fpmsdk.engine.conformance FILE...

prints of every scenario the first step that differs, in words, and how many fields of steps do, and last
`scenarios N, steps M, differences D`; exits 0 only when D is 0. Files are those of `fpmsdk.engine.record`.
Not a replay: no time passes, the engine is stepped as the recording says. Source: vllm-facts.md 1 to 3.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.hybrid import HybridCache
from fpmsdk._ext.pages import KvCache, PrefixKeys
from fpmsdk._ext.scheduler import Requests, Scheduler
from fpmsdk.engine.record import prompt_ids
from fpmsdk.engine.recordings import read_recording
from fpmsdk.errors import TraceError

Scenario = Mapping[str, Any]


def vllm_version(document: Mapping[str, Any]) -> tuple[int, int]:
    """Return (major, minor) of the vLLM that made a recording, from its note.

    Raises
    ------
    TraceError: the note names none.

    Source: vllm-facts.md section 1.5.

    >>> vllm_version({"note": "Per-step decisions of the real vLLM 0.28.0 (CPU build) V1 scheduler"})
    (0, 28)
    """
    match = re.search(r"vLLM (\d+)\.(\d+)", str(document.get("note", "")))
    if match is None:
        raise TraceError("recording: field `note` does not name the vLLM version; expected 'vLLM MAJOR.MINOR'")
    return int(match[1]), int(match[2])


def build_scheduler(scenario: Scenario, version: tuple[int, int]) -> Scheduler:
    """Return a rank configured as the recorded engine was, its requests known but not yet submitted.

    Parameters: `scenario`, an entry of a recording; `version`, (major, minor) of the vLLM that made it.
    Source: vllm-facts.md section 1.6.

    >>> engine = {"enable_prefix_caching": False, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
    >>> request = {"id": "r", "step": 0, "prompt": 40, "output": 2, "seed": 1}
    >>> scenario = {"engine": engine, "requests": [request], "num_blocks": 9, "block_size": 16}
    >>> scheduler = build_scheduler(scenario, (0, 32))
    >>> scheduler.enqueue(0), scheduler.schedule_pass()["tokens"]
    (True, {0: 40})
    """
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
            np.array([token for request in requests for token in prompt_ids(request)], np.int64),
            1,
            block_sizes(scenario)[0],
        )
    return Scheduler(
        Requests(prompts, outputs, [request.get("priority", 0) for request in requests]),
        "vllm",
        num_gpu_blocks=scenario["num_blocks"],
        block_size=block_sizes(scenario)[0],
        kv_cache=hybrid_cache(scenario, prompts, keys, version),
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


def block_sizes(scenario: Scenario) -> list[int]:
    """Return the block size in tokens of every KV cache group.

    >>> block_sizes({"groups": [{"block_size": 16}, {"block_size": 32}]})
    [16, 32]
    """
    groups = scenario.get("groups")
    return [scenario["block_size"]] if groups is None else [group["block_size"] for group in groups]


def hybrid_cache(
    scenario: Scenario, prompts: NDArray[np.int64], keys: PrefixKeys | None, version: tuple[int, int]
) -> KvCache | None:
    """Return the cache of a recording that lists KV cache groups; None for one full-attention group.

    Parameters: `prompts`, int64[requests], their lengths in tokens; `keys` of their prefixes, None without a
    prefix cache.
    Source: vllm-facts.md section 2.

    >>> hybrid_cache({"block_size": 16}, np.array([40]), None, (0, 32)) is None
    True
    """
    if "groups" not in scenario:
        return None
    engine = scenario["engine"]
    windows = [
        group["sliding_window"] if group["spec"] == "SlidingWindowSpec" else None for group in scenario["groups"]
    ]
    return HybridCache(
        prompts,
        scenario["num_blocks"] - 1,
        list(zip(block_sizes(scenario), windows, strict=True)),
        keys,
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        max_model_len=engine["max_model_len"],
        keeps_every_block=version < (0, 31),
    )


def simulated_steps(scenario: Scenario, version: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield the scheduler's decisions in the form of a recorded step, driven as the recording was.

    Source: vllm-facts.md section 1.

    >>> engine = {"enable_prefix_caching": False, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
    >>> request = {"id": "r", "step": 0, "prompt": 40, "output": 2, "seed": 1}
    >>> scenario = {"engine": engine, "requests": [request], "num_blocks": 9, "block_size": 16}
    >>> [(step["tokens"], step["free_blocks"]) for step in simulated_steps(scenario, (0, 32))]
    [({'r': 40}, 5), ({'r': 1}, 5)]
    """
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
            running = [names[index] for index in scheduler.running_requests()]
            held = {}
            if isinstance(scheduler.kv, HybridCache):
                held = {"held": {name: scheduler.kv.holdings(names.index(name)) for name in running}}
            yield {
                "tokens": {names[index]: tokens for index, tokens in decided["tokens"].items()},
                "new": {names[index]: tokens for index, tokens in decided["reused"].items() if index not in seen},
                "total": sum(decided["tokens"].values()),
                "preempted": sorted(names[index] for index in decided["preempted"]),
                "finished": sorted(names[index] for index in finished),
                "free_blocks": decided["free_blocks"],
                "running": running if held else len(running),
                "waiting": decided["num_waiting"],
                **held,
            }
            seen.update(decided["reused"])
            finished = scheduler.complete_pass()[1]
        step += 1


def scenario_differences(scenario: Scenario, version: tuple[int, int]) -> list[str]:
    """Return one line per recorded field of a step that the compiled rank does not reproduce.

    Parameters: `scenario`, an entry of a recording; `version`, (major, minor) of the vLLM that made it.

    Source: vllm-facts.md sections 1 to 3.

    >>> engine = {"enable_prefix_caching": False, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
    >>> request = {"id": "r", "step": 0, "prompt": 40, "output": 2, "seed": 1}
    >>> scenario = {"engine": engine, "requests": [request], "num_blocks": 9, "block_size": 16}
    >>> recorded = scenario | {"steps": list(simulated_steps(scenario, (0, 32)))}
    >>> recorded["steps"][1]["free_blocks"] = 4
    >>> scenario_differences(recorded, (0, 32))
    ['step 1 free_blocks: recorded 4, simulated 5']
    """
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
            if field in expected and expected[field] != found[field]
        ]
    return differences


def first_difference(scenario: Scenario, version: tuple[int, int]) -> str | None:
    """Return in words what differs in the first step that the compiled rank does not reproduce; None for nothing.

    Parameters: `scenario`, an entry of a recording; `version`, (major, minor) of the vLLM that made it.

    Source: vllm-facts.md sections 1 to 3.

    >>> engine = {"enable_prefix_caching": False, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
    >>> request = {"id": "r", "step": 0, "prompt": 40, "output": 2, "seed": 1}
    >>> scenario = {"engine": engine, "requests": [request], "num_blocks": 9, "block_size": 16}
    >>> recorded = scenario | {"steps": list(simulated_steps(scenario, (0, 32)))}
    >>> recorded["steps"][1]["free_blocks"] = 4
    >>> first_difference(recorded, (0, 32))
    'step 1: 4 blocks are free, simulated 5'
    """
    recorded = scenario["steps"]
    simulated = simulated_steps(scenario, version)
    for number, expected in enumerate(recorded):
        found = next(simulated, None)
        if found is None:
            return f"step {number}: the simulated rank has nothing left to do, {_work(expected)} was recorded"
        words = [*_different_work(expected, found), *_different_state(expected, found)]
        if words:
            return f"step {number}: " + "; ".join(words)
    beyond = next(simulated, None)
    return None if beyond is None else f"step {len(recorded)}: nothing was recorded any more, simulated {_work(beyond)}"


def _work(step: Mapping[str, Any]) -> str:
    scheduled = ", ".join(f"{request}: {tokens}" for request, tokens in step["tokens"].items())
    return f"a step of tokens {scheduled}" if scheduled else "an empty step"


def _different_work(expected: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Requests that compute something else, start elsewhere in their prompt, or leave."""
    for request in sorted(expected["tokens"].keys() | found["tokens"].keys()):
        recorded, simulated = expected["tokens"].get(request, 0), found["tokens"].get(request, 0)
        if recorded != simulated:
            yield f"{request} computes {recorded} tokens, simulated {simulated}"
    if list(expected["tokens"]) != list(found["tokens"]) and expected["tokens"] == found["tokens"]:
        yield f"the order is {', '.join(expected['tokens'])}, simulated {', '.join(found['tokens'])}"
    for request in sorted(expected["new"].keys() & found["new"].keys()):
        if expected["new"][request] != found["new"][request]:
            yield f"{request} reuses {expected['new'][request]} tokens, simulated {found['new'][request]}"
    for field, verb in (("preempted", "is preempted"), ("finished", "is reported as finished")):
        for request in sorted(set(expected[field]) ^ set(found[field])):
            yield f"{request} {verb} {'in the recording' if request in expected[field] else 'in the simulation'} only"


def _different_state(expected: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    for field, what in (("free_blocks", "blocks are free"), ("waiting", "requests wait")):
        if expected[field] != found[field]:
            yield f"{expected[field]} {what}, simulated {found[field]}"
    if expected["running"] != found["running"]:
        yield f"running is {expected['running']}, simulated {found['running']}"
    if "held" in expected and "held" in found:
        for request in sorted(expected["held"].keys() & found["held"].keys()):
            if expected["held"][request] != found["held"][request]:
                yield f"{request} holds {expected['held'][request]} blocks, simulated {found['held'][request]}"


def main(paths: list[str]) -> int:
    """Check every file, print the differences and the totals; return the exit code.

    0 for no difference, 1 for some, 2 for a file that is no recording.

    >>> main([])
    2
    """
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
            first = first_difference(scenario, version)
            if first is not None:
                print(f"{scenario['name']}: {first}")
            print(f"{scenario['name']}: {len(scenario['steps'])} steps, {len(differences)} differences")
            scenarios += 1
            steps += len(scenario["steps"])
            total += max(len(differences), first is not None)
    print(f"scenarios {scenarios}, steps {steps}, differences {total}")
    return 0 if total == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
