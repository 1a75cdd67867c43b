"""What a plan tells its reader in words: what was not checked, and what comes next. No figures are made here.

Source: onboarding.md section 5.
"""

from __future__ import annotations

from typing import Any

from fpmsdk.onboard.pilot import is_single_role
from fpmsdk.onboard.request import SupportRequest

RESOURCE_REQUIREMENT = (
    "GPUs of one worker: attention TP times attention DP. Whether they are available, and where, was not checked."
)
LAUNCH = (
    "The collection starts and ends its own benchmark workers; no server has to run. Planning starts nothing, the "
    "engine decides during its own initialisation what its caches and graphs hold."
)
ACCURACY = "No measurement exists yet; a plan says nothing about accuracy."
REPLAY = (
    "A role alone cannot be replayed: it needs an accepted counterpart and a serving configuration of both. "
    "validate-fpm is for aggregated workers."
)

_RUNTIME = (
    "Have the pinned model and tokenizer, the GPUs and an engine image with the self-benchmark at hand: on Kubernetes "
    "with the rights to create the workload, or in a Slurm allocation of one's own with containers, the collection "
    "folder at the same path on every node, and the plan's nodes and GPUs. Nothing was downloaded or started."
)
_VERSION_IS_CHECKED = (
    "Before anything is measured, the version of the engine is compared with the recorded one; whether the loaded "
    "weights are the pinned ones is not."
)
_VERSION_IS_NOT_CHECKED = (
    "Without a profile neither revisions nor the engine version are enforced: pin and verify them yourself."
)
_MODEL: dict[str, str] = {
    "not_checked": (
        "Without a profile the model must be one whose operators can be priced; check its metadata, memory and "
        "topology. A profile makes direct use of the timings possible for any model."
    ),
    "declared_profile_validated": (
        "Identity, topology, scheduler limits and declared memory agree with each other. Compare where the declared "
        "bytes come from with the engine that will serve."
    ),
    "runtime_memory_pending": (
        "Identity, precision, topology and cache geometry are declared. Memory is observed while the workers of the "
        "collection initialise (vLLM 0.27.0); other versions give timings only. Then run onboard finalize and review "
        "what it wrote."
    ),
    "runtime_memory_resolved": "Cache capacity and geometry were observed for exactly this deployment and its limits.",
}


def model_status(request: SupportRequest) -> str:
    """How far the model and its memory are known: the status of the `model_integration` prerequisite."""
    deployment = request.profile_deployment()
    if deployment is None:
        return "not_checked"
    return {
        "declared": "declared_profile_validated",
        "pending": "runtime_memory_pending",
        "runtime": "runtime_memory_resolved",
    }[deployment.resources.memory_source]


def prerequisites(request: SupportRequest) -> list[dict[str, str]]:
    """What has to be true before simulation: `model_integration`, `runtime`, `fpm_data`, with status and detail."""
    status = model_status(request)
    has_profile = request.fpm_profile is not None
    phases = " and ".join(request.collection_phases)
    data = f"Collect matching {phases} timings into this plan's systems folder first. A plan establishes no coverage."
    if is_single_role(request):
        data += " Evidence of another role is neither merged nor replaced."
    return [
        {"id": "model_integration", "status": status, "detail": _MODEL[status]},
        {
            "id": "runtime",
            "status": "not_checked",
            "detail": f"{_RUNTIME} {_VERSION_IS_CHECKED if has_profile else _VERSION_IS_NOT_CHECKED}",
        },
        {"id": "fpm_data", "status": "not_checked", "detail": data},
    ]


def search_detail(request: SupportRequest) -> str:
    """What the one candidate of a plan is."""
    if is_single_role(request):
        return (
            "One worker of one role. worker.yaml describes it and cannot be run: combine it with an accepted worker of "
            "the other role in a serving configuration."
        )
    return (
        "One worker of the selected topology, as an example for predict and recommend; its GPUs are what it takes, not "
        "what is available. Replicas and budgets belong into configurations of your own."
    )


def baseline_rule(request: SupportRequest) -> str:
    """What was checked about the candidate, and what was not."""
    return {
        "not_checked": "The selected worker; neither the legality of its topology nor its memory was checked.",
        "declared_profile_validated": (
            "The profile's deployment; topology and declared memory were admitted by arithmetic, not by an engine."
        ),
        "runtime_memory_pending": (
            "The profile's deployment, memory pending: it can be collected; prediction, recommendation and replay need "
            "the finalised memory."
        ),
        "runtime_memory_resolved": (
            "The profile's deployment with the cache capacity that an engine reported under exactly these settings; "
            "timing coverage is a separate question."
        ),
    }[model_status(request)]


def sampling(request: SupportRequest) -> str:
    """Who decides which points are measured."""
    grid = f"The engine's self-benchmark generates the {' and '.join(request.collection_phases)} grid"
    if is_single_role(request):
        grid += " and no other; decode starts from states it makes itself, without a transfer from prefill"
    return (
        f"{grid}. The limits here only bound it: new tokens and sequences of one rank, context of one request, memory "
        "fraction, graph policy. Example traffic and targets have no influence. Smoke runs publish nothing."
    )


def scheduling_policy(request: SupportRequest) -> str:
    """How passes are scheduled while memory is pending."""
    if request.identity.framework_version == "0.27.0":
        return "Synchronous in both phases, as memory observation requires; no statement about how serving schedules."
    return "The collection's own; memory cannot be observed on this version of the engine."


def pending_next() -> str:
    """The next step of a plan without a version label."""
    return (
        "collect-fpm --execute --image IMAGE reads the engine version in the image and continues in runtime-resolved/"
    )


def role_facts(request: SupportRequest) -> dict[str, Any]:
    """Facts of a plan whose request states a serving role; none for older requests."""
    if request.worker_type is None:
        return {}
    return {
        "worker_type": request.worker_type,
        "collection_phases": list(request.collection_phases),
        "serving_mode": "disaggregated" if is_single_role(request) else "aggregated",
    }
