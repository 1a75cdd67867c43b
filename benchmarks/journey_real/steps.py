"""The steps of a real onboarding up to the resolved profile, each one a command or a few of the product."""

from __future__ import annotations

import json
from typing import Any

import yaml
from work import LABEL, LIMITS, SYSTEM, VERSION, Work

MODES = ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "kv_cache_dtype")
# No checkpoint of a hub: the weights are drawn from a seed.
REVISION = "0" * 40
# Far more than a workload here fills, and less than what the engine has at any start.
ACCEPTED_BLOCKS = 2000
# A probe asks for the image that it is run with; there is none here.
IMAGE = "local/engine"
LOCAL = ("--executor", "local", "--image", IMAGE)


def probe(work: Work) -> dict[str, Any]:
    """The memory of the running engine, imported and accepted."""
    work.session.unlink(missing_ok=True)
    inputs = {
        "model": str(work.model),
        "model_revision": REVISION,
        "model_kind": "dense",
        "gpu": SYSTEM,
        "interconnect": "none",
        "framework_version": VERSION,
        "runtime_framework_version": VERSION,
        "tensor_parallel": 1,
        "attention_data_parallel": 1,
        "moe_tensor_parallel": 1,
        "moe_expert_parallel": 1,
        **LIMITS,
        "model_config": str(work.model / "config.json"),
        "precision": dict.fromkeys(MODES, "bfloat16"),
        "resource_overrides": {"num_experts": 0},
        "collection_deployment": {"executor": "local", "image": IMAGE},
    }
    draft = {
        "worker_type": "aggregated",
        "workload": {"input_tokens": 256, "output_tokens": 32},
        "collection": {"prefill_cudagraph_policy": "runtime"},
    }
    work.save({"inputs": inputs, "configurations": {LABEL: {"draft_request": draft}}})
    observed = work.onboard(
        *("probe-runtime", "--checkpoint", work.session, "--output-dir", work.fresh(work.folder / "probe")), "--execute"
    )
    drafted = work.onboard(
        *("import-observations", "--checkpoint", work.session, "--observations", observed["observations_path"]),
        *("--output-dir", work.fresh(work.folder / "drafts")),
    )
    observed = _draft(work)["fpm_profile"]["deployments"][0]["resources"]
    return {
        "cache_groups": observed["cache_groups"],
        "kv_cache_bytes": observed["runtime_memory"]["kv_cache_bytes"],
        "not_established": drafted["configurations"][LABEL]["not_established"],
    }


def _draft(work: Work) -> dict[str, Any]:
    draft: dict[str, Any] = json.loads(work.session.read_text())["configurations"][LABEL]["draft_request"]
    return draft


def plan(work: Work) -> dict[str, Any]:
    """A lower bound of the cache accepted, and the plan of the collection.

    An engine on a CPU takes a share of the memory that is free when it starts, a little less or more each time; a
    collection that finds less than what was accepted is refused.
    """
    profile = _draft(work)["fpm_profile"]
    resources = profile["deployments"][0]["resources"]
    page_bytes = resources["cache_groups"][0]["page_size_bytes"]
    resources["runtime_memory"]["kv_cache_bytes"] = ACCEPTED_BLOCKS * page_bytes
    # The drafts of the import are not of this profile any more; its evidence still is.
    artifacts = json.loads(work.session.read_text())["configurations"][LABEL]["artifacts"]
    drafts = {name: None for name, artifact in artifacts.items() if artifact["kind"] in ("profile", "request")}
    work.save({"configurations": {LABEL: {"draft_request": {"fpm_profile": profile}, "artifacts": drafts}}})
    work.accept()
    work.request.write_text(yaml.safe_dump(_draft(work), sort_keys=False))
    work.onboard("plan", "-c", work.request, "--output-dir", work.fresh(work.collection))
    return {"accepted_blocks": ACCEPTED_BLOCKS}


def _collect(work: Work, *words: object, codes: tuple[int, ...] = (0,)) -> Any:
    return work.onboard("collect-fpm", "-c", work.request, "--output-dir", work.collection, *LOCAL, *words, codes=codes)


def smoke(work: Work) -> dict[str, Any]:
    """A few points of both cells."""
    _collect(work, "--execute", "--smoke")
    report: dict[str, Any] = _collect(work, "--check-readiness")
    return {"ready_for_full_collection": report["ready_for_full_collection"]}


def formal(work: Work) -> dict[str, Any]:
    """The whole grid, published."""
    has_begun = any(work.collection.rglob("fpm_forward.json"))
    return {"exit_status": _collect(work, "--execute", *(["--resume"] if has_begun else []))["collector_exit_status"]}


def quality(work: Work) -> dict[str, Any]:
    """Five more launches of the whole grid, and what the table predicts of its own points that are withheld."""
    resume = ["--resume"] if work.quality.exists() else []
    work.onboard(
        *("validate-collection", "-c", work.collected / "request.yaml", "--output-dir", work.collected),
        *("--validation-output-dir", work.quality, "--execute", *resume),
        codes=(0, 1),
    )
    report = json.loads((work.quality / "collection-validation.json").read_text())
    return {"gates": report["gates"]}


def finalize(work: Work) -> dict[str, Any]:
    """The resolved profile with the assessment of the collection."""
    outcome: dict[str, Any] = work.onboard(
        *("finalize", "-c", work.collected / "request.yaml", "--output-dir", work.collected),
        *("--resolved-output-dir", work.fresh(work.resolved)),
        *("--collection-report", work.quality / "collection-validation.json"),
    )
    return {name: outcome[name] for name in ("review_status", "collection_quality")}
