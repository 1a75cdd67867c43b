"""The draft of a profile: what files, hardware and a person's overrides establish, and what is still open.

Source: onboarding.md section 3.3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fpmsdk.collect.cache_markers import cache_markers
from fpmsdk.config.profile import DECLARED_FIELDS, FpmModelProfile
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.cache_groups import derive_groups
from fpmsdk.onboard.estimates import activation_bytes, hardware_bytes, kv_bytes_per_token, weight_bytes
from fpmsdk.onboard.geometry import RequestFieldError, rank_geometry
from fpmsdk.onboard.intake import ModelConfig, check_experts
from fpmsdk.onboard.layouts import (
    FULL_ATTENTION,
    INKLING,
    LATENT,
    check_layout,
    declares_window,
    is_grouped,
    layout_notes,
    runtime_reasons,
)
from fpmsdk.onboard.overrides import (
    CLAIMED_GEOMETRY,
    DEPLOYMENT_FIELDS,
    MODEL_FIELDS,
    RESOURCE_FIELDS,
    check_overrides,
    check_total_bytes,
)
from fpmsdk.onboard.precision import precision_facts
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.request_sections import DEFAULT_MAX_BATCH_SIZE, DEFAULT_MAX_NUM_TOKENS

# Notes that depend on how the cache is classified, which a stated architecture may change.
LAYOUT_NOTES = ("cache_layout", "convolution_cache")
_GEOMETRY = (*CLAIMED_GEOMETRY, "cache_block_sizes")
_STATED = "stated by the user; not measured"
_CLAIM = "stated by the user; `onboard import-observations` compares it with the probe"
_ASKED = {
    "architecture": "name the decoder's class; neither architectures nor model_type does",
    "context_length": "state the longest context of the model in tokens; config.json does not",
    "num_experts": "state the routed experts, 0 for a dense model; config.json does not tell",
    "gemm_quant_mode": "state the mode of linear layers; config.json names none without doubt",
    "moe_quant_mode": "state the mode of experts, which identifies dense deployments too",
    "fmha_quant_mode": "state the precision of attention from the runtime or its launch; weights do not tell it",
    "kv_cache_dtype": "state the dtype of the cache from checkpoint, runtime or launch; weights do not tell it",
    "cache_layout": "confirm `linear`, or describe cache_groups; head counts do not tell the layout",
    "kv_bytes_per_token": "state the bytes of a token on one rank, of everything that is cached",
}


@dataclass(frozen=True)
class ProfileDraft:
    """What is known of a deployment. Made by `derive_profile`.

    `resolved` holds values by field, `sources` where each comes from, `missing` what to state, `pending_runtime` what
    only a probe can measure. `profile` is there when nothing is open. `layout_markers` are the signs of a cache that
    the file cannot describe, `declares_window` says whether a window is declared beside an unknown architecture.
    """

    profile: FpmModelProfile | None
    resolved: dict[str, Any]
    missing: dict[str, str]
    sources: dict[str, str]
    pending_runtime: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    layout_markers: tuple[str, ...] = ()
    declares_window: bool = False


@dataclass
class _Values:
    """Fields resolved so far, each with its source."""

    resolved: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, value: Any, source: str) -> None:
        self.resolved[name], self.sources[name] = value, source

    def offer(self, name: str, estimate: tuple[Any, str]) -> None:
        """Put a value unless there is one, or none is offered."""
        if name not in self.resolved and estimate[0] is not None:
            self.put(name, *estimate)


def declared_architecture(config: ModelConfig, overrides: Mapping[str, Any] | None) -> tuple[str | None, str | None]:
    """The decoder's architecture and the one by which it is known: the configuration's, else a stated one.

    Whoever classifies a layout, intake or import, starts from these.
    """
    if "architecture" in config.suggestions:
        return config.decoder_architecture, config.decoder_architecture or config.suggestions["architecture"]
    stated = overrides.get("architecture") if isinstance(overrides, Mapping) else None
    named = stated.strip() if isinstance(stated, str) and stated.strip() else None
    return named, named


def refuse_block_sizes(reasons: tuple[str, ...]) -> OnboardError:
    """The refusal of `cache_block_sizes` for a cache that is left to the runtime probe."""
    return OnboardError(
        f"cache_block_sizes: this layout has no groups of its own ({', '.join(reasons)}); the probe reports them with "
        "their blocks. Remove the field",
        "cache_block_sizes",
    )


def draft_notes(config: ModelConfig, architecture: str | None, reasons: tuple[str, ...]) -> dict[str, str]:
    """The notes of a configuration, those of its cache as it is classified now."""
    kept = {name: note for name, note in config.notes.items() if name not in LAYOUT_NOTES}
    return kept | layout_notes(config.raw, architecture, reasons)


def derive_profile(
    config: ModelConfig, request: SupportRequest | None = None, overrides: Mapping[str, Any] | None = None
) -> ProfileDraft:
    """Resolve every field of a profile that the facts establish.

    Parameters
    ----------
    config: result of `load_model_config`.
    request: identity, topology and limits; None previews the facts, and yields no profile.
    overrides: what a person states, by field.

    Raises
    ------
    OnboardError: facts or overrides contradict each other; names the field.
    RequestFieldError: another value of a request field would correct it.

    Source: onboarding.md section 3.3.

    >>> import tempfile
    >>> from fpmsdk.onboard.intake import load_model_config
    >>> from fpmsdk.sample.tiny import write_checkpoint
    >>> draft = derive_profile(load_model_config(write_checkpoint(tempfile.mkdtemp()) + "/config.json"))
    >>> draft.resolved["cache_layout"], sorted(draft.missing)
    ('linear', ['fmha_quant_mode', 'gemm_quant_mode', 'kv_bytes_per_token', 'kv_cache_dtype', 'moe_quant_mode'])
    """
    architecture, named = declared_architecture(config, overrides)
    reasons = runtime_reasons(config.raw, architecture, named)
    if reasons and isinstance(overrides, Mapping) and "cache_block_sizes" in overrides:
        raise refuse_block_sizes(reasons)  # whatever its value
    stated = check_overrides(overrides)
    values = _facts(config, request, stated, pending=bool(reasons))
    resolved = values.resolved
    check_layout(config.raw, architecture, named, inkling=resolved.get("architecture") == INKLING)
    check_experts(config.raw, architecture, resolved.get("num_experts"))
    sizes = rank_geometry(config, architecture, bool(reasons), request)
    if request is not None:
        _check_request(request, resolved)
    missing = _cache(config, architecture, request, sizes, values, reasons)
    for name, (value, source) in hardware_bytes(request).items():
        values.offer(name, (value, source))
    values.offer("weights_bytes", weight_bytes(config.raw, resolved, sizes, architecture, request))
    values.offer("activations_bytes", activation_bytes(resolved, sizes, architecture, request))
    missing = {name: reason for name, reason in missing.items() if name not in resolved}
    check_total_bytes(resolved)
    notes = draft_notes(config, architecture, reasons)
    if reasons:
        markers = cache_markers(config.raw, architecture)
        pending = {
            "cache_geometry": f"measured, not derived ({', '.join(reasons)}): `onboard probe-runtime` measures it on "
            "the runtime and topology, `onboard import-observations` takes it over"
        }
        window = not markers and declares_window(config.raw, architecture)
        return ProfileDraft(None, resolved, missing, values.sources, pending, notes, markers, window)
    profile = None if missing or request is None else _profile(config, request, values, stated, notes)
    return ProfileDraft(profile, resolved, missing, values.sources, notes=notes)


def _facts(config: ModelConfig, request: SupportRequest | None, stated: Mapping[str, Any], *, pending: bool) -> _Values:
    """What files, defaults and overrides say, before anything is computed."""
    values = _Values()
    for name in MODEL_FIELDS:
        if name in config.suggestions:
            values.put(name, config.suggestions[name], config.notes.get(name, "config.json"))
    for name, (mode, source) in precision_facts(config.raw, has_sidecar=bool(config.source_files)).items():
        values.put(name, mode, source)
    values.put("comm_quant_mode", "half", "the mode of collected identities; says nothing of every message")
    for name in ("moe_backend", "attention_backend"):
        values.put(name, "auto", "default: left to the runtime")
    for name, default in (("max_num_tokens", DEFAULT_MAX_NUM_TOKENS), ("max_batch_size", DEFAULT_MAX_BATCH_SIZE)):
        limit = getattr(request.collection, name) if request is not None else None
        if limit is not None and stated.get(name, limit) != limit:
            raise OnboardError(f"{name}: collection says {limit} and the override {stated[name]}; give one", name)
        if limit is not None:
            values.put(name, limit, "set for this collection; limit of one rank")
        else:
            values.put(name, default, f"initial policy {default}; limit of one rank")
    for name, value in stated.items():
        known = config.suggestions.get(name)
        if name in ("architecture", "num_experts") and known not in (None, value):
            raise OnboardError(f"{name}: config.json says {known!r} and the override {value!r}; remove it", name)
        if name == "context_length" and known is not None and value > known:
            raise OnboardError(f"context_length: the override {value} exceeds {known} of config.json; lower it", name)
        source = _CLAIM if pending and name in CLAIMED_GEOMETRY else _STATED
        if name == "comm_quant_mode" and value != "half":
            source += "; a new collection takes half only"
        values.put(name, value, source)
    return values


def _check_request(request: SupportRequest, resolved: Mapping[str, Any]) -> None:
    experts, context = resolved.get("num_experts"), resolved.get("context_length")
    _, _, _, expert = request.topology_sizes()
    if experts is not None and (experts > 0) != (request.identity.model_kind == "moe"):
        raise RequestFieldError(
            f"model_kind {request.identity.model_kind} contradicts num_experts {experts}", "model_kind"
        )
    if experts and experts % expert:
        raise RequestFieldError(
            f"moe_expert_parallel {expert} does not divide num_experts {experts}; choose a size that does",
            "moe_expert_parallel",
        )
    if context is not None and request.search.context_length > context:
        raise RequestFieldError(
            f"context_length {request.search.context_length} exceeds the {context} tokens of the model; lower it",
            "context_length",
        )


def _cache(
    config: ModelConfig,
    architecture: str | None,
    request: SupportRequest | None,
    sizes: Mapping[str, int],
    values: _Values,
    reasons: tuple[str, ...],
) -> dict[str, str]:
    """Resolve the cache as far as possible; all that may be missing, with its reason."""
    resolved = values.resolved
    if reasons:
        return {name: reason for name, reason in _ASKED.items() if name not in _GEOMETRY}
    missing = dict(_ASKED)
    stated = "cache_groups" in resolved or resolved.get("cache_layout") == "grouped"
    if stated or is_grouped(config.raw, architecture):
        derive_groups(config.raw, architecture, request, sizes, resolved, values.sources, missing)
    elif "cache_block_sizes" in resolved:
        raise OnboardError(
            "cache_block_sizes: the cache of this model is linear and has no groups; remove the field",
            "cache_block_sizes",
        )
    elif architecture in FULL_ATTENTION:
        values.offer("cache_layout", ("linear", "full attention in every layer"))
        estimate = kv_bytes_per_token(config.raw, resolved, sizes)
        values.offer("kv_bytes_per_token", estimate)
        missing["kv_bytes_per_token"] = estimate[1]
    elif architecture in LATENT:
        missing["kv_bytes_per_token"] += f"; latent and sparse attention of {architecture} is accounted for explicitly"
    return missing


def _profile(
    config: ModelConfig,
    request: SupportRequest,
    values: _Values,
    stated: Mapping[str, Any],
    notes: Mapping[str, str],
) -> FpmModelProfile:
    resolved, sources = values.resolved, values.sources
    # Estimates plan, they declare nothing.
    declared = all(name in stated for name in DECLARED_FIELDS)
    role = {} if request.worker_type is None else {"worker_type": request.worker_type}
    fields = {name: {"value": resolved[name], "source": sources[name]} for name in sorted(resolved)}
    document: dict[str, Any] = {
        "config_sha256": config.sha256,
        "method": "facts of local files; bytes are estimates to plan with, not limits or measurements",
        "memory_source": "declared" if declared else "pending",
        "planning_estimates": {name: fields[name] for name in DECLARED_FIELDS if name in fields and name not in stated},
        "config_notes": dict(notes),
        "fields": fields,
        "deployment_identity": request.identity.model_dump(mode="json"),
        "parallelism": request.parallelism(),
        **role,
    }
    if config.source_files:
        document["config_source_files"] = config.source_files
    provenance = json.dumps(document, sort_keys=True, allow_nan=False)
    kept = [name for name in RESOURCE_FIELDS if name in resolved and (declared or name not in DECLARED_FIELDS)]
    return request.profile_of(
        {**{name: resolved[name] for name in MODEL_FIELDS}, "provenance": provenance},
        {
            **role,
            **{name: resolved[name] for name in DEPLOYMENT_FIELDS},
            "resources": {**{name: resolved[name] for name in kept}, "provenance": provenance},
        },
        str(config.path),
    )
