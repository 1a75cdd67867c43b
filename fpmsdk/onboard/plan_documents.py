"""Every file of a plan, in memory: the same request in the same folder gives the same bytes, always.

Writing them is in `plan`, comparing them with what a folder holds in `plan_check`.
Source: onboarding.md section 5, for requests without a version label section 11.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fpmsdk.documents.canonical import pretty_bytes
from fpmsdk.documents.yaml_files import write_yaml
from fpmsdk.errors import OnboardError
from fpmsdk.files import sha256
from fpmsdk.onboard import plan_prose
from fpmsdk.onboard.admission import admitted_resources
from fpmsdk.onboard.collector_command import PROFILE_FILE, noted_commands, onboard_command
from fpmsdk.onboard.hardware import SystemFile, read_system_file
from fpmsdk.onboard.pilot import PILOT, generated_configurations, is_single_role
from fpmsdk.onboard.provenance import finalization_manifest
from fpmsdk.onboard.request import SupportRequest, request_id, validation_id
from fpmsdk.onboard.runtime_profile import runtime_collection_inputs

PLAN_SCHEMA = "aisimulate-support-plan/v2"
PLAN_FILE = "support-plan.json"
REQUEST_FILE = "request.yaml"
COMMANDS_FILE = "commands.json"
FINALIZATION_FILE = "finalization.json"
PENDING_VERSION = "pending_runtime_version"
# What another example workload, objective or seed changes; everything else decides what is collected.
EVALUATION_KEYS = ("validation_id", "generated_files_sha256")


def plan_documents(request: SupportRequest, folder: Path) -> dict[str, bytes]:
    """The files of a plan by path below its folder; `support-plan.json` is the last, `request.yaml` the first.

    Parameters
    ----------
    folder: the plan folder, absolute and without links; it need not exist.

    Raises
    ------
    OnboardError: the GPU has no description in the systems root, the profile does not leave room for the context, or
        its evidence contradicts it.
    EvidenceError: the observations of an imported profile changed.
    SystemsPathError: an environment variable names no systems root.
    """
    system = read_system_file(request.identity.gpu)
    if request.identity.framework_version is None:
        return _pending_documents(request, folder)
    configurations = generated_configurations(request, folder)
    files = {REQUEST_FILE: request.yaml_bytes()}
    files |= {path: write_yaml(configuration) for path, configuration in configurations.items()}
    files |= _profile_files(request)
    manifest = finalization_manifest(request)
    if manifest is not None:
        files[FINALIZATION_FILE] = pretty_bytes(manifest)
    files[f"systems/{request.identity.gpu}.yaml"] = system.content
    probe_arguments, probe_deployment = runtime_collection_inputs(request, None)
    commands = noted_commands(request, folder, probe_arguments=probe_arguments, probe_deployment=probe_deployment)
    files[COMMANDS_FILE] = pretty_bytes(commands)
    plan = _plan(request, folder, commands["fpm_plan_local"])
    if request.fpm_profile is not None:
        plan["resources"] = admitted_resources(request, _capacity_bytes(system))
    return _with_plan(files, plan)


def evaluation_files(request: SupportRequest) -> tuple[str, ...]:
    """Files that another example workload, objective or seed may change, without the request and the plan.

    Paths are in the order in which they are written.
    """
    return () if is_single_role(request) else (f"predict/{PILOT}.yaml", f"recommend/{PILOT}.yaml")


def _with_plan(files: dict[str, bytes], plan: dict[str, Any]) -> dict[str, bytes]:
    plan["generated_files_sha256"] = {path: sha256(content) for path, content in files.items()}
    return files | {PLAN_FILE: pretty_bytes(plan)}


def _profile_files(request: SupportRequest) -> dict[str, bytes]:
    if request.fpm_profile is None:
        return {}
    return {PROFILE_FILE: pretty_bytes(request.fpm_profile.model_dump(mode="json"))}


def _capacity_bytes(system: SystemFile) -> int:
    capacity = system.spec.mem_capacity_bytes
    if capacity is None:
        raise OnboardError(f"identity.gpu: {system.path} states no gpu.mem_capacity; add it", str(system.path))
    return capacity


def _plan(request: SupportRequest, folder: Path, plan_command: list[str]) -> dict[str, Any]:
    fpm: dict[str, Any] = {
        "status": "planned",
        "collection_gpus_required": request.worker_gpus,
        "resource_requirement": plan_prose.RESOURCE_REQUIREMENT,
        "plan_command": plan_command,
        "runtime_limits": request.collection_settings(),
        "sampling": plan_prose.sampling(request),
        **plan_prose.role_facts(request),
    }
    # Requests from before the graph policy keep the plan that they had.
    if "prefill_cudagraph_policy" in request.collection.model_fields_set:
        fpm["launch"] = plan_prose.LAUNCH
    if plan_prose.model_status(request) == "runtime_memory_pending":
        fpm["scheduling_policy"] = plan_prose.scheduling_policy(request)
    plan = _identities(request) | {
        "search": {
            "candidate_count": 1,
            "candidates": [{"parallelism": request.parallelism(), "required_gpus": request.worker_gpus}],
            "detail": plan_prose.search_detail(request),
            "baseline_rule": plan_prose.baseline_rule(request),
        },
        "fpm": fpm,
        "prerequisites": plan_prose.prerequisites(request),
        "accuracy": {"status": "not_assessed", "detail": plan_prose.ACCURACY},
        "outputs": _outputs(request, folder),
    }
    if is_single_role(request):
        plan["replay"] = {"status": "not_assessed", "detail": plan_prose.REPLAY}
    return plan


def _identities(request: SupportRequest) -> dict[str, Any]:
    return {
        "schema_version": PLAN_SCHEMA,
        "request_id": request_id(request),
        "validation_id": validation_id(request),
    }


def _outputs(request: SupportRequest, folder: Path) -> dict[str, Any]:
    example = not is_single_role(request)
    outputs: dict[str, Any] = {
        "request": str(folder / REQUEST_FILE),
        "prediction_configs": [str(folder / f"predict/{PILOT}.yaml")] if example else [],
        "recommendation_configs": [str(folder / f"recommend/{PILOT}.yaml")] if example else [],
        "recommendation_results": [str(folder / f"recommend-results/{PILOT}")] if example else [],
        "commands": str(folder / COMMANDS_FILE),
        "systems_root": str(folder / "systems"),
    }
    if request.fpm_profile is not None:
        outputs["fpm_model_profile"] = str(folder / PROFILE_FILE)
    return outputs if example else outputs | {"worker_config": str(folder / "worker.yaml")}


def _pending_documents(request: SupportRequest, folder: Path) -> dict[str, bytes]:
    files = {
        REQUEST_FILE: request.yaml_bytes(),
        COMMANDS_FILE: pretty_bytes({"fpm_run_local": onboard_command("collect-fpm", folder)}),
        **_profile_files(request),
    }
    plan = _identities(request) | {
        "status": PENDING_VERSION,
        "identity": request.identity.model_dump(mode="json", exclude_none=True),
        "fpm": {"status": PENDING_VERSION, "simulation_ready": False},
        "outputs": {
            "request": str(folder / REQUEST_FILE),
            "commands": str(folder / COMMANDS_FILE),
            "prediction_configs": [],
            "recommendation_configs": [],
        },
        "next": plan_prose.pending_next(),
    }
    return _with_plan(files, plan)
