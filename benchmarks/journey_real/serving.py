"""The last steps: the resolved model is served for real, and the replay of the same arrivals is compared with it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from replay import FRAMES, TABLE, compare_run
from work import LIMITS, SYSTEM, VERSION, Work

from fpmsdk import sample

# Of the recorded run whose arrivals are served: so many requests, from its first one.
ARRIVALS = 160
PAIR = (TABLE, "fpm_forward_perf.metadata.json")


def serve(work: Work) -> dict[str, Any]:
    """Serve recorded arrivals with the engine that was measured: the same limits, compiled, no prefix cache."""
    work.fresh(work.serving).mkdir()
    run = sample.eval_run()
    trace = run.trace
    requests = [
        {"id": str(name), "arrival": at / 1e3, "prompt": int(prompt), "output": int(output)}
        for name, at, prompt, output in zip(
            trace.request_ids, trace.arrival_ms, trace.prompt_tokens, trace.output_tokens, strict=True
        )
    ][:ARRIVALS]
    rate = round(len(requests) / requests[-1]["arrival"], 3)
    (work.serving / "arrivals.json").write_text(json.dumps({"rate": rate, "seed": 0, "requests": requests}))
    arguments = {
        "model": str(work.model),
        "max_model_len": LIMITS["context_length"],
        "max_num_seqs": LIMITS["max_batch_size"],
        "max_num_batched_tokens": LIMITS["max_num_tokens"],
        "gpu_memory_utilization": LIMITS["gpu_memory_utilization"],
        "kv_cache_dtype": "bfloat16",
        "distributed_executor_backend": "mp",
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "skip_tokenizer_init": True,
        "scheduler_cls": "dynamo.vllm.instrumented_scheduler.InstrumentedScheduler",
    }
    versions = {"vllm": VERSION, "dynamo": "1.6.1"}
    (work.serving / "engine.json").write_text(json.dumps({"arguments": arguments, "versions": versions}))
    script = Path(__file__).with_name("serve.py")
    command = [work.engine / "bin/python", script, work.serving / "engine.json", work.serving / "arrivals.json"]
    told = subprocess.run(
        [*map(str, command), str(work.serving)], env=work.environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if told.returncode:
        sys.exit(f"serving ended with {told.returncode}\n{told.stdout}")
    raw = work.serving / "fpm_eval.bin"
    (work.serving / FRAMES).write_bytes(gzip.compress(raw.read_bytes(), mtime=0))
    raw.unlink()
    published = work.resolved / "systems/data" / SYSTEM / "vllm" / VERSION
    for name in PAIR:
        (work.serving / name).write_bytes((published / name).read_bytes())
    return {"served": told.stdout.splitlines()[-1], "fpmsdk": version("fpmsdk")}


def compare(work: Work) -> dict[str, Any]:
    """The replay on the collected table, and tuned on the first half of the run, beside what was served."""
    return compare_run(work.serving)
