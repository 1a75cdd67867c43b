"""The review of a derived profile: shown whole, edited field by field, kept only when accepted in so many words.

Source: onboarding.md section 1.1 (interactive review).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from fpmsdk.errors import FpmSdkError, OnboardError
from fpmsdk.onboard.choices import GraphMode, GraphPolicy, WorkerType
from fpmsdk.onboard.draft import ProfileDraft, derive_profile
from fpmsdk.onboard.intake import ModelConfig
from fpmsdk.onboard.overrides import OVERRIDE_FIELDS, is_bytes
from fpmsdk.onboard.prompts import ask_field
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.talk import Cancelled, Talk

# Runtime whose memory a collection observes.
OBSERVED_VERSION = "0.27.0"


@dataclass(frozen=True)
class Reviewed:
    """A complete request with what it was derived from."""

    request: SupportRequest
    draft: ProfileDraft
    overrides: dict[str, Any]


def complete_draft(talk: Talk, config: ModelConfig, request: SupportRequest, stated: dict[str, Any]) -> ProfileDraft:
    """Derive a profile, asking for every missing field; those that others depend on come first.

    Parameters: `stated`, overrides, to which the answers are added.
    """
    draft = derive_profile(config, request, stated)
    while draft.missing and not draft.pending_runtime:
        name = min(draft.missing, key=is_bytes)
        talk.tell(f"{name}: {draft.missing[name]}")
        answer = ask_field(talk, name)
        if name == "cache_block_sizes":
            answer = {**stated.get(name, {}), **answer}
        stated[name] = answer
        draft = derive_profile(config, request, stated)
        if name in draft.resolved:
            talk.tell(f"  {name}: {draft.resolved[name]} (source: {draft.sources[name]})")
    return draft


def review(talk: Talk, config: ModelConfig, reviewed: Reviewed, *, of_several: bool = False) -> Reviewed:
    """Show a profile until it is accepted.

    Parameters
    ----------
    of_several: whether files are written only once all of several profiles are accepted.

    Raises
    ------
    Cancelled: the person cancelled.
    """
    while True:
        show_profile(talk, config, reviewed)
        talk.tell(
            "Nothing is saved before every selected profile is accepted."
            if of_several
            else "Nothing is saved before this profile is accepted."
        )
        match _choice(talk, "accept, edit or cancel", ("accept", "edit", "cancel")):
            case "accept":
                return reviewed
            case "cancel":
                raise Cancelled
        reviewed = _edited(talk, config, reviewed)


def show_profile(talk: Talk, config: ModelConfig, reviewed: Reviewed) -> None:
    """Show the whole profile, its sources, the settings of the collection and what is not known."""
    request, draft = reviewed.request, reviewed.draft
    identity = request.identity
    talk.tell(f"Scope: {config.notes['modeling_scope']}.")
    talk.tell(
        f"Target: {identity.model} ({identity.model_kind}) at {identity.model_revision}; {identity.framework} "
        f"{identity.framework_version or 'version to be detected'}; {identity.gpu}, {identity.interconnect}"
    )
    role = request.worker_type or "both phases, shared settings"
    talk.tell(f"Role: {role}; phases: {', '.join(request.collection_phases)}; topology: {request.parallelism()}")
    talk.tell(f"GPUs of the worker: {request.worker_gpus}; whether they are available is not checked")
    talk.tell(f"Collection: {json.dumps(request.collection_settings(), sort_keys=True)}")
    talk.fields("Profile (bytes of one rank; estimates are verified by the runtime)", draft.resolved, draft.sources)
    deployment = request.profile_deployment()
    source = "pending" if deployment is None else deployment.resources.memory_source
    talk.tell(f"Memory: {source}.")
    if source == "pending":
        observed = identity.framework_version == OBSERVED_VERSION
        talk.tell(
            f"No bytes have to be stated: memory is observed while collecting on {OBSERVED_VERSION}."
            if observed
            else f"Memory is observed on {OBSERVED_VERSION} only; this version is measured for its timings."
        )
    if draft.resolved.get("comm_quant_mode") != "half":
        talk.tell("A new collection takes comm_quant_mode half only; it will refuse this one.")


def _choice(talk: Talk, question: str, accepted: tuple[str, ...]) -> str:
    while (answer := talk.ask(question).lower()) not in accepted:
        talk.tell(f"Answer {', '.join(accepted)}; nothing else accepts.")
    return answer


# --- edits ---


def _positive(answer: str) -> int:
    value = int(answer)
    if value <= 0:
        raise ValueError
    return value


def _fraction(answer: str) -> float:
    value = float(answer)
    if not 0 < value <= 1:
        raise ValueError
    return value


def _increasing(answer: str) -> list[int]:
    values = [_positive(word) for word in answer.split()]
    if not values or values != sorted(set(values)):
        raise ValueError
    return values


def _one_of(kind: Any) -> Callable[[str], str]:
    accepted = get_args(kind)

    def read(answer: str) -> str:
        if answer not in accepted:
            raise ValueError
        return answer

    return read


@dataclass(frozen=True)
class _Setting:
    """A setting of the request that a review may change."""

    what: str
    read: Callable[[str], Any]
    clearable: bool = False


_SETTINGS = {
    "runtime_context_length": _Setting("positive integer", _positive),
    "gpu_memory_utilization": _Setting("above 0 and at most 1", _fraction),
    "prefill_cudagraph_policy": _Setting("/".join(get_args(GraphPolicy)), _one_of(GraphPolicy)),
    "max_prefill_cudagraph_size": _Setting("positive integer", _positive),
    "worker_type": _Setting("/".join(get_args(WorkerType)), _one_of(WorkerType)),
    "cudagraph_mode": _Setting("/".join(get_args(GraphMode)), _one_of(GraphMode), clearable=True),
    "cudagraph_capture_sizes": _Setting("increasing integers separated by blanks", _increasing, clearable=True),
    "max_cudagraph_capture_size": _Setting("positive integer", _positive, clearable=True),
}
EDITABLE = frozenset(OVERRIDE_FIELDS | _SETTINGS.keys())


def _edited(talk: Talk, config: ModelConfig, reviewed: Reviewed) -> Reviewed:
    """The profile after one edit; the previous one when the edit contradicts something."""
    talk.tell("Fields: " + ", ".join(sorted(EDITABLE)))
    while (name := talk.ask("Field to edit")) not in EDITABLE:
        talk.tell("Name one of the fields shown; identity and topology are not edited here.")
    # Everything is derived anew from what was stated, so that estimates follow the edit.
    stated = dict(reviewed.overrides)
    if name in _SETTINGS:
        change = _setting_change(name, _ask_setting(talk, name))
    else:
        stated[name] = ask_field(talk, name)
        limited = name in ("max_num_tokens", "max_batch_size")
        change = {"collection": {name: stated[name]}} if limited else {}
    try:
        request = reviewed.request.replaced({**change, "fpm_profile": None}, "edit")
        draft = complete_draft(talk, config, request, stated)
        if draft.pending_runtime:
            raise OnboardError(draft.pending_runtime["cache_geometry"], "cache_geometry")
        return Reviewed(request.replaced({"fpm_profile": profile_document(draft)}, "edit"), draft, stated)
    except FpmSdkError as fault:
        talk.tell(f"The edit is refused, the profile stays as it was: {fault}")
        return reviewed


def profile_document(draft: ProfileDraft) -> dict[str, Any]:
    """The profile of a complete draft as plain values."""
    assert draft.profile is not None
    return draft.profile.model_dump(mode="json")


def _ask_setting(talk: Talk, name: str) -> Any:
    setting = _SETTINGS[name]
    question = f"{name} ({setting.what}{', or clear' if setting.clearable else ''})"
    while True:
        answer = talk.ask(question)
        if setting.clearable and answer == "clear":
            return None
        try:
            return setting.read(answer)
        except ValueError:
            talk.tell(f"Not {setting.what}: {answer}")


def _setting_change(name: str, value: Any) -> dict[str, Any]:
    if name == "runtime_context_length":
        return {"search": {"context_length": value}}
    if name == "worker_type":
        return {name: value}
    collection = {name: value}
    # Each of the two settles the other.
    if name == "prefill_cudagraph_policy" and value == "runtime":
        collection["max_prefill_cudagraph_size"] = None
    elif name == "max_prefill_cudagraph_size":
        collection["prefill_cudagraph_policy"] = "explicit"
    return {"collection": collection}
