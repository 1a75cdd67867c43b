"""The last steps: the resolved model is served for real, and the replay of the same arrivals is compared with it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from budget import compare_budget
from replay import FRAMES, REQUESTS, TABLE, compare_run
from steps import LOCAL
from work import LIMITS, SYSTEM, VERSION, Work

from fpmsdk import __version__, sample

# Of the recorded run whose arrivals are served: so many requests, from its first one.
ARRIVALS = 160
# Four rounds or five.
BUDGET_MINUTES = 15
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
    return {"served": told.stdout.splitlines()[-1], "fpmsdk": __version__}


def budget(work: Work) -> dict[str, Any]:
    """A collection on a budget on the same engine, for the traffic that was served, beside the whole grid.

    It is asked for more than it can reach, so that it goes on until its time is used up.
    """
    source = {"type": "trace", "format": "recorded", "paths": [str(work.serving / REQUESTS)]}
    traffic = {"source": source, "load": {"type": "trace_timestamps"}}
    file = work.folder / "traffic.yaml"
    file.write_text(json.dumps({"traffic": traffic}))
    report = work.collected / "budget/budget-report.json"
    resume = ["--resume"] if (report.parent / "budget.json").exists() else []
    work.onboard(
        *("collect-fpm", "-c", work.request, "--output-dir", work.collection, *LOCAL, "--execute", *resume),
        *("--budget", BUDGET_MINUTES, "--traffic", file, "--holdout-error", "0.001"),
        codes=(0, 1),
    )
    return compare_budget(json.loads(report.read_text()), work.collected)


def compare(work: Work) -> dict[str, Any]:
    """The replay on the collected table, and tuned on the first half of the run, beside what was served."""
    return compare_run(work.folder)
