"""Prepare a serving run: a recipe bound to the play, its prediction and the collection; nothing is started.

The requests themselves are made in the environment of the benchmark, on the machine that serves. Without that step a
recipe stays incomplete, and says so.
Source: onboarding.md section 8.5 (prepare).
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fpmsdk.documents.canonical import write_document
from fpmsdk.documents.evidence import file_evidence
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.policy import ServingPolicy
from fpmsdk.onboard.serving_play import read_play, timing_subset
from fpmsdk.onboard.serving_recipe import BENCHMARK, EXECUTION_FIELDS, SCHEMA, serving_scope
from fpmsdk.prediction.config import DefaultTiming, PredictConfig, read_config

_TOKENIZER_SUFFIXES = frozenset((".json", ".model", ".txt", ".tiktoken", ".jinja", ".jinja2", ".vocab", ".bpe"))
_WORKER_CLASS = "fpm_memory_worker.FpmExecutionWorker"
_PROBE = (
    "import importlib.metadata as m, json; d = m.distribution('aiperf'); "
    "print(json.dumps({'version': d.version, 'source': json.loads(d.read_text('direct_url.json') or '{}')}))"
)
_PROBE_TIMEOUT_S = 60


def prepare_serving(
    folder: Path,
    *,
    trace: Path,
    prediction_config: Path,
    prediction_report: Path,
    endpoint: str,
    tokenizer: Path,
    expected_execution: Mapping[str, Any],
    policy: ServingPolicy,
    benchmark_python: Path | None = None,
) -> dict[str, Any]:
    """Write `recipe.json` with the play, the observer's provenance and a template of what is to be observed.

    Parameters
    ----------
    folder: where nothing is yet.
    trace, prediction_config, prediction_report: the play, and the replay of it that `validate-fpm` has kept.
    endpoint: HTTP(S) address of the server.
    tokenizer: folder of the checkpoint's tokenizer.
    expected_execution: what the collection ran with, by `EXECUTION_FIELDS`.
    benchmark_python: Python of the environment that has the benchmark.

    Returns
    -------
    The recipe, `incomplete` with its `issues` or `ready`.

    Raises
    ------
    OnboardError: the endpoint is no plain address, the tokenizer no folder, the benchmark another one than the
        qualified, or the prediction none that serving can be matched with.
    """
    _check_endpoint(endpoint)
    if not tokenizer.is_dir():
        raise OnboardError(f"--tokenizer {tokenizer}: give the local tokenizer folder of the checkpoint", "--tokenizer")
    config = read_config(prediction_config)
    scope = serving_scope(config, trace)
    play, issues = read_play(trace)
    subset = timing_subset(play) if play is not None and not issues else None
    if play is not None and not issues and subset is None:
        issues.append(
            "the play has both recorded request times and idle gaps, and the benchmark can keep one of the two bounds; "
            "choose a play without one of them, and edit no timestamps"
        )
    issues += _execution_issues(config, expected_execution)
    tokenizer_files = [path for path in sorted(tokenizer.rglob("*")) if path.suffix in _TOKENIZER_SUFFIXES]
    timing_files = sorted(_timing_files(config))
    issues += [] if tokenizer_files else [f"{tokenizer} holds no tokenizer files"]
    issues += [] if timing_files else ["the tables of the prediction are not below its systems_paths"]
    if benchmark_python is None:
        issues.append("--aiperf-python is needed to make the requests in the environment of the benchmark")
    else:
        benchmark_installation(benchmark_python)
        issues.append("the requests of the play are not materialised yet: that is done where the server runs")

    folder.mkdir(parents=True)
    if play is not None:
        write_document(folder / "play.json", play)
    recipe = {
        "schema_version": SCHEMA,
        "status": "incomplete" if issues else "ready",
        "issues": issues,
        "trace": file_evidence(trace),
        "prediction_config": file_evidence(prediction_config),
        "prediction_report": file_evidence(prediction_report),
        "benchmark_trace": None if play is None else file_evidence(folder / "play.json"),
        "scope": scope,
        "play_id": None if play is None else play.get("id"),
        "timing_subset": subset,
        "request_count": 0 if play is None else len(play["requests"]),
        "aiperf": BENCHMARK,
        "endpoint": endpoint,
        "tokenizer": str(tokenizer.absolute()),
        "tokenizer_files": [file_evidence(path) for path in tokenizer_files if path.is_file()],
        "timing_artifacts": [file_evidence(path) for path in timing_files],
        "expected_execution": dict(expected_execution),
        "policy": policy.model_dump(mode="json"),
        "artifacts_dir": str(folder / "aiperf"),
        "serving_observer": _observer(folder),
        "command_arguments": None,
    }
    write_document(folder / "recipe.json", recipe)
    _write_bound(folder, recipe)
    return recipe


def benchmark_installation(python: Path) -> dict[str, Any]:
    """Version and source of the benchmark in an environment.

    Raises
    ------
    OnboardError: it is not there, or not installed from the qualified revision.
    """
    wanted = f"install {BENCHMARK['repository']}.git@{BENCHMARK['revision']} there"
    try:
        probe = subprocess.run(
            [str(python), "-c", _PROBE], capture_output=True, text=True, check=True, timeout=_PROBE_TIMEOUT_S
        )
        found: dict[str, Any] = json.loads(probe.stdout)
        source = found["source"]
        revision, url = source["vcs_info"]["commit_id"], source["url"].removesuffix(".git").rstrip("/")
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as fault:
        raise OnboardError(f"--aiperf-python {python}: no benchmark from git there ({fault}); {wanted}") from None
    if (url, revision) != (BENCHMARK["repository"], BENCHMARK["revision"]):
        raise OnboardError(f"--aiperf-python {python}: found the benchmark of {url} at {revision}; {wanted}")
    return found


def _check_endpoint(endpoint: str) -> None:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
        raise OnboardError("--endpoint: expected an HTTP(S) address without credentials", "--endpoint")


def _execution_issues(config: PredictConfig, expected: Mapping[str, Any]) -> list[str]:
    engine, worker = config.engine, config.roles["aggregated"]
    predicted = {
        "model": engine.model,
        "model_revision": (engine.fpm_profile or {}).get("model_revision"),
        "backend": engine.backend,
        "backend_version": engine.backend_version,
        "hardware": engine.hardware,
        "context_length": engine.context_length,
        "parallelism": worker.parallelism.model_dump(exclude_none=True),
        "scheduler": worker.scheduler.model_dump(include={"max_batched_tokens", "max_sequences"}, exclude_none=True),
        "gpu_memory_utilization": worker.kv_cache.capacity.memory_fraction,
    }
    differing = [name for name, value in predicted.items() if value is not None and expected.get(name) != value]
    unresolved = [name for name in EXECUTION_FIELDS if expected.get(name) in (None, "", {}, [])]
    issues = [f"the collection's {name} is not that of the prediction" for name in differing]
    return issues + [f"the collection has no one {name} over all phases and ranks" for name in unresolved]


def _timing_files(config: PredictConfig) -> Iterator[Path]:
    timing = config.roles["aggregated"].timing
    own = timing.systems_paths if isinstance(timing, DefaultTiming) else None
    paths = own or config.engine.systems_paths or []
    for root in paths if isinstance(paths, list) else []:
        yield from (path for path in Path(root).rglob("fpm_forward_perf.*") if path.is_file())


def _observer(folder: Path) -> dict[str, Any]:
    provenance, output = folder / "serving-provenance.json", folder / "runtime-observations"
    return {
        "module_files": [],
        "worker_class": _WORKER_CLASS,
        "provenance_path": str(provenance),
        "output_dir": str(output),
        "launch_arguments": ["--worker-cls", _WORKER_CLASS],
        "environment": {
            "PYTHONPATH": str(folder / "observer"),
            "FPM_EXECUTION_OUTPUT_DIR": str(output),
            "FPM_EXECUTION_PROVENANCE_FILE": str(provenance),
        },
    }


def _write_bound(folder: Path, recipe: Mapping[str, Any]) -> None:
    """What refers to the recipe by its digest."""
    reference = file_evidence(os.fspath(folder / "recipe.json"))
    write_document(
        folder / "serving-provenance.json",
        {
            "schema_version": SCHEMA,
            "run_id": str(uuid.uuid4()),
            "purpose": "matched_serving_accuracy",
            "recipe": reference,
            "trace": recipe["trace"],
            "observer_modules": recipe["serving_observer"]["module_files"],
        },
    )
    write_document(
        folder / "observed-execution.template.json",
        {
            "schema_version": SCHEMA,
            "recipe": reference,
            "observed_execution": dict.fromkeys(EXECUTION_FIELDS),
            "scope": dict.fromkeys(recipe["scope"]),
            "sources": [],
        },
    )
