"""Topologies to start from: those of a fast domain, by whether one request would fit; no ranking by speed.

Source: onboarding.md section 4.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fpmsdk.config.profile import DECLARED_FIELDS, Resources
from fpmsdk.errors import OnboardError
from fpmsdk.launch.cache_budget import request_bytes
from fpmsdk.onboard.draft import ProfileDraft, derive_profile
from fpmsdk.onboard.geometry import RequestFieldError
from fpmsdk.onboard.hardware import HardwareEnvelope, hardware_envelope
from fpmsdk.onboard.intake import ModelConfig
from fpmsdk.onboard.overrides import RANK_FIELDS, check_overrides
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.request_sections import TOPOLOGY_FIELDS

Family = Literal["tp", "pure_tp", "dep", "tep"]
Status = Literal["estimated_fit", "needs_inputs", "rejected"]

_FAMILIES: dict[str, tuple[Family, ...]] = {"dense": ("tp",), "moe": ("pure_tp", "dep", "tep")}
_SHOWN_PER_FAMILY = 2


@dataclass(frozen=True)
class TopologyCandidate:
    """One topology with what is known of its memory; `sizes` are those of `TOPOLOGY_FIELDS`, bytes of one rank.

    Source: onboarding.md section 4.
    """

    family: Family
    sizes: tuple[int, int, int, int]
    status: Status
    reasons: tuple[str, ...]
    draft: ProfileDraft | None
    known_required_bytes: int | None
    estimated_required_bytes: int | None
    memory_budget_bytes: int
    resident_sequences_per_rank: int | None = 1

    @property
    def topology(self) -> dict[str, int]:
        """The sizes by request field."""
        return dict(zip(TOPOLOGY_FIELDS, self.sizes, strict=True))

    @property
    def required_gpus(self) -> int:
        """GPUs of the worker."""
        return self.sizes[0] * self.sizes[1]

    @property
    def cli_flags(self) -> list[str]:
        """The options that ask for this topology."""
        return [part for name, size in self.topology.items() for part in ("--" + name.replace("_", "-"), str(size))]

    @property
    def missing(self) -> dict[str, str]:
        """What is to be stated before the draft is complete."""
        return {} if self.draft is None else dict(self.draft.missing)

    @property
    def pending_runtime(self) -> dict[str, str]:
        """What only a probe can measure."""
        return {} if self.draft is None else dict(self.draft.pending_runtime)

    def apply(self, request: SupportRequest) -> SupportRequest:
        """The request with this topology."""
        return request.replaced({"search": self.topology})

    def document(self) -> dict[str, Any]:
        """The candidate as plain values."""
        return {
            "family": self.family,
            "topology": self.topology,
            "required_gpus": self.required_gpus,
            "cli_flags": self.cli_flags,
            "status": self.status,
            "reasons": list(self.reasons),
            "missing": self.missing,
            "pending_runtime": self.pending_runtime,
            "known_required_bytes": self.known_required_bytes,
            "estimated_required_bytes": self.estimated_required_bytes,
            "memory_budget_bytes": self.memory_budget_bytes,
            "resident_sequences_per_rank": self.resident_sequences_per_rank,
            "resolved_profile_fields": {} if self.draft is None else dict(self.draft.resolved),
            "field_sources": {} if self.draft is None else dict(self.draft.sources),
        }


@dataclass(frozen=True)
class TopologySuggestions:
    """The shortlist, what was rejected, and the default, None when no candidate is known to fit.

    Source: onboarding.md section 4.
    """

    config_sha256: str
    identity: dict[str, Any]
    collection: dict[str, Any]
    context_length: int
    overrides: dict[str, Any]
    hardware: HardwareEnvelope
    candidates: tuple[TopologyCandidate, ...]
    rejected_candidates: tuple[TopologyCandidate, ...]
    default: TopologyCandidate | None
    assumptions: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """The suggestions as plain values."""
        return {
            "config_sha256": self.config_sha256,
            "identity": self.identity,
            "collection": self.collection,
            "context_length": self.context_length,
            "overrides": self.overrides,
            "hardware": asdict(self.hardware),
            "candidates": [candidate.document() for candidate in self.candidates],
            "rejected_candidates": [candidate.document() for candidate in self.rejected_candidates],
            "default": None if self.default is None else self.default.document(),
            "assumptions": list(self.assumptions),
        }


def suggest_topologies(
    config: ModelConfig, request: SupportRequest, overrides: Mapping[str, Any] | None = None
) -> TopologySuggestions:
    """Look through the topologies of the fast domain.

    Parameters
    ----------
    config: result of `load_model_config`.
    request: identity, limits and context; its topology is replaced.
    overrides: stated profile fields, none of them bytes of one rank.

    Raises
    ------
    OnboardError: the request has a profile, an override belongs to one topology, no such hardware, or the facts
        contradict each other.

    Source: onboarding.md section 4.
    """
    stated = check_overrides(overrides)
    if bound := sorted(name for name in (*RANK_FIELDS, "cache_groups") if name in stated):
        raise OnboardError(
            f"{', '.join(bound)} belong to one topology; name the topology, or leave them out for suggestions", bound[0]
        )
    if request.fpm_profile is not None:
        raise OnboardError("fpm_profile belongs to one topology; name that topology instead", "fpm_profile")
    hardware = hardware_envelope(
        request.identity.gpu, request.identity.interconnect, request.collection.memory_fraction
    )
    shown: list[TopologyCandidate] = []
    rejected: list[TopologyCandidate] = []
    families = _FAMILIES[request.identity.model_kind]
    for family in families:
        found = [
            _assess(config, request, stated, hardware, family, width)
            for width in _widths(hardware.fast_domain_gpus)
            if width > 1 or family == families[0]
        ]
        passing = [candidate for candidate in found if candidate.status == "estimated_fit"]
        pending = [candidate for candidate in found if candidate.status == "needs_inputs"]
        rejected += [candidate for candidate in found if candidate.status == "rejected"]
        shown += (passing or pending)[:_SHOWN_PER_FAMILY]
    fitting = [candidate for candidate in shown if candidate.status == "estimated_fit"]
    return TopologySuggestions(
        config_sha256=config.sha256,
        identity=request.identity.model_dump(mode="json"),
        collection=_collection(request, stated),
        context_length=request.search.context_length,
        overrides=stated,
        hardware=hardware,
        candidates=tuple(shown),
        rejected_candidates=tuple(rejected),
        default=min(fitting, key=lambda candidate: candidate.required_gpus, default=None),
        assumptions=_assumptions(config, hardware, request, shown),
    )


def _widths(gpus: int) -> list[int]:
    return [1 << power for power in range(gpus.bit_length()) if 1 << power <= gpus]


def _sizes(family: Family, width: int) -> tuple[int, int, int, int]:
    return {
        "tp": (width, 1, 1, 1),
        "pure_tp": (width, 1, width, 1),
        "dep": (1, width, 1, width),
        "tep": (width, 1, 1, width),
    }[family]


def _assess(
    config: ModelConfig,
    request: SupportRequest,
    stated: Mapping[str, Any],
    hardware: HardwareEnvelope,
    family: Family,
    width: int,
) -> TopologyCandidate:
    sizes, budget = _sizes(family, width), hardware.memory_budget_bytes
    selected = request.replaced({"search": dict(zip(TOPOLOGY_FIELDS, sizes, strict=True))})
    try:
        draft = derive_profile(config, selected, stated)
    except RequestFieldError as fault:
        if fault.path not in TOPOLOGY_FIELDS:
            raise
        return TopologyCandidate(family, sizes, "rejected", (str(fault),), None, None, None, budget, None)
    known, complete, exhausted = _required(selected, draft, budget)
    if known > budget or exhausted:
        what = "leave nothing for the cache" if exhausted else "exceed the budget"
        status: Status = "rejected"
        reason = f"{known} known bytes of one rank {what}: {budget} bytes of a GPU"
    elif draft.pending_runtime:
        status = "needs_inputs"
        reason = "the cache is left to the runtime probe, so that its fit is not assessed"
    elif draft.missing or not complete:
        status = "needs_inputs"
        reason = (
            "it may fit, but precision or estimates are not complete; memory is observed while collecting, no "
            "bytes have to be stated"
        )
    else:
        status = "estimated_fit"
        reason = f"{known} estimated bytes of one rank, one full-context request included, within {budget}"
    return TopologyCandidate(family, sizes, status, (reason,), draft, known, known if complete else None, budget)


def _required(request: SupportRequest, draft: ProfileDraft, budget: int) -> tuple[int, bool, bool]:
    """Known bytes of one rank with one full-context request, whether that is all, and whether no cache is left."""
    resolved = draft.resolved
    known: int = sum(resolved.get(name, 0) for name in DECLARED_FIELDS)
    everything = all(name in resolved for name in DECLARED_FIELDS)
    context = request.search.context_length
    if resolved.get("cache_layout") == "grouped":
        # What a group takes is told by the runtime's version.
        complete = everything and draft.profile is not None and request.identity.framework_version is not None
        exhausted = known >= budget
        if complete and not exhausted and draft.profile is not None:
            resources: Resources = draft.profile.deployments[0].resources
            known += request_bytes(resources, context, resources.max_num_tokens)
        return known, complete, exhausted
    if "kv_bytes_per_token" in resolved:
        known += resolved["kv_bytes_per_token"] * (context + 1)
    return known, everything and "kv_bytes_per_token" in resolved, False


def _collection(request: SupportRequest, stated: Mapping[str, Any]) -> dict[str, Any]:
    limits = {name: stated[name] for name in ("max_num_tokens", "max_batch_size") if name in stated}
    return request.replaced({"collection": limits}).collection_settings()


def _assumptions(
    config: ModelConfig, hardware: HardwareEnvelope, request: SupportRequest, shown: list[TopologyCandidate]
) -> tuple[str, ...]:
    drafts = [candidate.draft for candidate in shown if candidate.draft is not None]
    if any(draft.pending_runtime for draft in drafts):
        cache = "Fit is not assessed before the runtime probe has measured the cache."
    elif any(draft.resolved.get("cache_layout") == "grouped" for draft in drafts):
        cache = (
            "Fit: the most pages that one full-context request holds at a time; concurrent requests are not assessed."
        )
    else:
        cache = (
            "Fit: one full-context request and a token of a rank; max_batch_size bounds the scheduler, it is no "
            "number of such requests."
        )
    return (
        f"Hardware: {hardware.assumption}.",
        "Widths are powers of two inside the fast domain; an explicit topology may be wider.",
        cache,
        f"Budget: {request.collection.memory_fraction:.0%} of a GPU's memory, without CUDA graphs.",
        "Runtime compatibility, available GPUs, coverage and speed are not assessed.",
        "Shown are the first two of each family that fit, else that may fit; the default fits on the fewest GPUs.",
        f"Scope: {config.notes['modeling_scope']}.",
    )


def shortlist(suggestions: TopologySuggestions, *, with_missing: bool = True) -> str:
    """The suggestions as text, candidates numbered from 1.

    Parameters: `with_missing`, whether to tell what is missing.
    """
    hardware = suggestions.hardware
    lines = [
        "Suggested topologies of one worker, to start from; no ranking by speed:",
        f"  hardware {hardware.system} ({hardware.source}): {hardware.assumption}",
    ]
    shared: dict[str, str] = {}
    if with_missing and suggestions.candidates:
        first, *others = (candidate.missing.items() for candidate in suggestions.candidates)
        shared = dict(item for item in first if all(item in other for other in others))
    for number, candidate in enumerate(suggestions.candidates, 1):
        mark = " (default)" if candidate is suggestions.default else ""
        flags = shlex.join(candidate.cli_flags)
        lines.append(
            f"  {number}. {candidate.family}, {candidate.required_gpus} GPUs, {candidate.status}{mark}: {flags}"
        )
        lines += [f"     {reason}" for reason in candidate.reasons]
        own = candidate.missing.items() - shared.items() if with_missing else ()
        lines += [f"     missing {name}: {reason}" for name, reason in sorted(own)]
    lines += [f"  missing of all {name}: {reason}" for name, reason in shared.items()]
    if not suggestions.candidates:
        lines.append("  no eligible topology is left in the fast domain:")
        lines += [
            f"  rejected {candidate.family}, {candidate.required_gpus} GPUs: {'; '.join(candidate.reasons)}"
            for candidate in suggestions.rejected_candidates
        ]
    return "\n".join(lines)
