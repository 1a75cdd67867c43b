"""What a serving run left behind, held against its recipe: workers, server tokenisation, benchmark receipt.

Source: onboarding.md section 8.5 (run, assess).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from fpmsdk.documents.canonical import read_document
from fpmsdk.documents.evidence import file_evidence, verify_evidence
from fpmsdk.onboard.serving_findings import Findings
from fpmsdk.onboard.serving_recipe import BENCHMARK, EXECUTION_FIELDS, benchmark_arguments

WORKER_SCHEMA = ("aisimulate_fpm_runtime_execution", 1)
_PAYLOAD_FIELDS = ("model", "messages", "add_generation_prompt", "continue_final_message")
_UNRESOLVED: tuple[Any, ...] = (None, "", {}, [])


def normalized_runtime(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved engine configuration without what may differ between collection and serving.

    Where the checkpoint is mounted may differ, its identity is compared elsewhere; prefix caching is set by the phase
    in a collection and by the scope in serving.

    >>> normalized_runtime({"model_config": {"model": "/mnt/m", "dtype": "bfloat16"}, "cache_config": {}})
    {'model_config': {'dtype': 'bfloat16'}, 'cache_config': {}}
    """
    sections: dict[str, Any] = {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in config.items()
    }
    for name in ("model", "tokenizer"):
        sections.get("model_config", {}).pop(name, None)
    sections.get("cache_config", {}).pop("enable_prefix_caching", None)
    return sections


def check_receipt(recipe: Mapping[str, Any], receipt: Mapping[str, Any], findings: Findings) -> None:
    """The benchmark ran as prepared, to its end, from the qualified sources."""
    if receipt.get("status") != "completed" or receipt.get("exit_code") != 0:
        findings.missing.append(
            f"the benchmark did not complete: status {receipt.get('status')!r}, exit code {receipt.get('exit_code')!r}"
        )
    findings.expect(
        benchmark_arguments(recipe), (receipt.get("command") or [None])[1:], "the executed benchmark command"
    )
    source = (receipt.get("installation") or {}).get("source") or {}
    revision = (source.get("vcs_info") or {}).get("commit_id")
    if revision != BENCHMARK["revision"]:
        findings.missing.append(f"the benchmark must be installed from {BENCHMARK['revision']}, found {revision!r}")


def check_execution(recipe: Mapping[str, Any], observed: Mapping[str, Any], findings: Findings) -> None:
    """Every field of the effective execution and of the scope was observed and is what the collection had."""
    expected, found = recipe["expected_execution"], observed.get("observed_execution") or {}
    for name in EXECUTION_FIELDS:
        if expected.get(name) in _UNRESOLVED or found.get(name) in _UNRESOLVED:
            findings.missing.append(f"execution {name}: expected {expected.get(name)!r}, observed {found.get(name)!r}")
        else:
            findings.expect(expected[name], found[name], f"execution {name}")
    scope = observed.get("scope") or {}
    for name, value in recipe["scope"].items():
        if scope.get(name) is None:
            findings.missing.append(f"scope {name} was not observed")
        else:
            findings.expect(value, scope[name], f"scope {name}")


def check_workers(
    recipe: Mapping[str, Any], receipt: Mapping[str, Any], execution: Mapping[str, Any], findings: Findings
) -> None:
    """Files of every worker rank, of this launch, that say what the execution claims.

    Parameters
    ----------
    execution: the observed (or, before a run, the expected) execution.
    """
    sources = receipt.get("runtime_observations")
    findings.sources(sources, "worker observations")
    if not sources:
        return
    observer = recipe["serving_observer"]
    provenance = file_evidence(observer["provenance_path"])
    findings.expect(provenance, receipt.get("serving_provenance"), "the provenance of the benchmark receipt")
    findings.expect(observer["module_files"], receipt.get("observer_modules"), "the observer of the benchmark receipt")
    launch = read_document(observer["provenance_path"])
    ranks: list[tuple[Any, ...]] = []
    for source in sources:
        with findings.unavailable("a worker observation"):
            worker = read_document(source["path"])
            ranks.append(tuple(worker.get(f"{axis}_rank") for axis in ("dp", "tp", "pp")))
            _check_worker(worker, (launch, provenance), execution, recipe["scope"]["prefix_caching"], findings)
    sizes = recipe["expected_execution"].get("parallelism") or {}
    axes = (range(sizes.get(name, 1)) for name in ("attention_data", "tensor", "pipeline"))
    expected = sorted(product(*axes))
    if sorted(ranks, key=str) != sorted(expected, key=str):
        findings.missing.append(f"worker observations: expected the ranks (dp, tp, pp) {expected}, found {ranks}")


def check_server_tokens(
    recipe_path: Path, recipe: Mapping[str, Any], receipt: Mapping[str, Any], findings: Findings
) -> None:
    """The server turned every prepared prompt into the prepared tokens."""
    source = receipt.get("server_tokenization")
    if source is None:
        findings.missing.append("the tokens that the server makes of the prompts are not recorded")
        return
    findings.sources([source], "the server's tokenisation")
    with findings.unavailable("the server's tokenisation"):
        recorded = read_document(source["path"])
        findings.expect(file_evidence(recipe_path), recorded["recipe"], "the recipe of the server's tokenisation")
        findings.expect("matched", recorded["status"], "the status of the server's tokenisation")
        expected = prepared_requests(recipe)
        if len(recorded["requests"]) != len(expected):
            findings.missing.append(f"the server tokenised {len(recorded['requests'])} of {len(expected)} prompts")
            return
        for turn, (found, (body, tokens)) in enumerate(zip(recorded["requests"], expected, strict=True)):
            answer = found["response"]
            same = (found["turn_index"], found["request"]) == (turn, body)
            if not same or (answer.get("tokens"), answer.get("count")) != (tokens, len(tokens)):
                findings.failures.append(f"request {turn}: the server makes other tokens of it than were prepared")


def prepared_requests(recipe: Mapping[str, Any]) -> list[tuple[dict[str, Any], list[int]]]:
    """What `/tokenize` is asked for every turn, and the token ids it must answer."""
    matched = recipe["matched_workload"]
    for name in ("payloads", "tokenization"):
        verify_evidence(matched[name])
    lines = Path(matched["payloads"]["path"]).read_text().splitlines()
    frozen: Sequence[Mapping[str, Any]] = read_document(matched["tokenization"]["path"])["requests"]
    return [
        (
            {name: json.loads(line)["payload"][name] for name in _PAYLOAD_FIELDS} | {"add_special_tokens": False},
            tokens["input_token_ids"],
        )
        for line, tokens in zip(lines, frozen, strict=True)
    ]


def _check_worker(
    worker: Mapping[str, Any],
    launch: tuple[Any, dict[str, Any]],
    execution: Mapping[str, Any],
    prefix_caching: bool,
    findings: Findings,
) -> None:
    schema = (worker.get("schema_name"), worker.get("schema_version"))
    if schema != WORKER_SCHEMA or worker.get("status") != "observed":
        raise ValueError(f"expected an observed {WORKER_SCHEMA}, found {schema} with status {worker.get('status')!r}")
    found = (worker.get("execution_provenance"), worker.get("provenance_source"))
    if found != launch:
        findings.failures.append("a worker observation belongs to another prepared launch")
    for name in ("attention_groups", "graph_config", "backend_version"):
        if execution.get(name) is not None:
            findings.expect(execution[name], worker.get(name), f"{name} of a worker")
    config = worker.get("resolved_config")
    if not isinstance(config, Mapping) or not config:
        findings.missing.append("a worker observation holds no resolved configuration")
        return
    found_prefix = (config.get("cache_config") or {}).get("enable_prefix_caching")
    if not isinstance(found_prefix, bool):
        findings.missing.append("a worker observation does not say whether prefixes are cached")
    else:
        findings.expect(prefix_caching, found_prefix, "prefix caching of a worker")
    if execution.get("runtime_config") is not None:
        findings.expect(execution["runtime_config"], normalized_runtime(config), "runtime_config of a worker")
