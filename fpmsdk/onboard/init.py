"""`onboard init`: from options, a `config.json` and answers to requests with complete profiles, or to suggestions.

One flow for a person at a terminal and for scripts. Source: onboarding.md sections 1.1, 3 and 4.
"""

from __future__ import annotations

import shlex
from typing import Any

from fpmsdk.errors import OnboardError
from fpmsdk.onboard.draft import LAYOUT_NOTES, ProfileDraft, derive_profile
from fpmsdk.onboard.geometry import RequestFieldError
from fpmsdk.onboard.init_options import (
    OptionFaults,
    Options,
    build_request,
    has_topology,
    option_name,
)
from fpmsdk.onboard.intake import ModelConfig, load_model_config
from fpmsdk.onboard.open_fields import open_fields, probe_guidance
from fpmsdk.onboard.overrides import MODEL_FIELDS, is_bytes, load_overrides
from fpmsdk.onboard.parallel_configs import check_distinct, check_shared, load_parallel_configs
from fpmsdk.onboard.prompts import ask_field, correct, guided_request, is_option, valid_request
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.request_sections import (
    REFERENCE_CONTEXT_TOKENS,
    ROLE_GRAPH_FIELDS,
    TOPOLOGY_FIELDS,
    CollectionSection,
)
from fpmsdk.onboard.review import Reviewed, complete_draft, profile_document, review
from fpmsdk.onboard.suggest import TopologySuggestions, shortlist, suggest_topologies
from fpmsdk.onboard.talk import Cancelled, Silence, Talk


def set_up_plain(talk: Talk, options: Options) -> SupportRequest:
    """The request of options without a model config, asked for at a terminal."""
    return guided_request(talk, options, with_topology=True) if talk.interactive else build_request(options)


def suggest(options: Options) -> TopologySuggestions:
    """The suggestions for a model config; nothing is asked, told or written."""
    config, stated, request = _inputs(Silence(), options)
    return suggest_topologies(config, request, stated)


def set_up_one(talk: Talk, options: Options) -> SupportRequest:
    """The request of a model config, with its profile.

    Raises
    ------
    OnboardError: something is contradictory or missing; all that is missing is listed.
    Cancelled: the person cancelled.
    """
    automatic = not has_topology(options)
    config, stated, request = _inputs(talk, options)
    if automatic:
        request = _choose(talk, options, config, stated, request)[0]
        options |= _topology(request)
    return _complete(talk, options, config, stated, request)


def set_up_several(talk: Talk, options: Options) -> list[SupportRequest]:
    """The requests of a model config for `--output-dir`: those of the list file, the chosen suggestions, or one.

    Raises: as `set_up_one`.
    """
    options = dict(options)
    listed = options.get("parallel_configs")
    entries = None if listed is None else load_parallel_configs(listed)
    automatic = entries is None and not has_topology(options)
    context_is_open = options.get("context_length") is None
    shared_graphs: dict[str, Any] = {}
    if entries is not None:
        # They go with the role of an entry, which the shared request has not.
        shared_graphs = {name: options.pop(name) for name in ROLE_GRAPH_FIELDS if options.get(name) is not None}
    config, shared, request = _inputs(talk, options)
    if entries is not None:
        selected = [
            request.replaced({**entry.change(), "collection": {**shared_graphs, **entry.collection}}, f"entry {number}")
            for number, entry in enumerate(entries, 1)
        ]
    else:
        selected = _choose(talk, options, config, shared, request) if automatic else [request]
    own = [entry.resource_overrides for entry in entries] if entries is not None else [{} for _ in selected]
    check_distinct(selected)
    check_shared(shared, len(selected))
    if talk.interactive and not automatic:
        _ask_shared(talk, config, shared, own)
    completed: list[SupportRequest] = []
    for number, (candidate, overrides) in enumerate(zip(selected, own, strict=True), 1):
        chosen = candidate
        stated = {**shared, **overrides}
        chosen_options = {**options, **_topology(chosen), "worker_type": chosen.worker_type}
        chosen_options |= {name: getattr(chosen.collection, name) for name in CollectionSection.model_fields}
        if context_is_open and (context := derive_profile(config, None, stated).resolved.get("context_length")):
            chosen_options["context_length"] = min(context, REFERENCE_CONTEXT_TOKENS)
            chosen = chosen.replaced({"search": {"context_length": chosen_options["context_length"]}})
        talk.tell(f"Configuration {number} of {len(selected)}: {_topology(chosen)}")
        completed.append(_complete(talk, chosen_options, config, stated, chosen, of_several=True))
        check_distinct(completed)
    return completed


def _topology(request: SupportRequest) -> dict[str, int]:
    return dict(zip(TOPOLOGY_FIELDS, request.topology_sizes(), strict=True))


# --- facts and identity ---


def _inputs(talk: Talk, options: Options) -> tuple[ModelConfig, dict[str, Any], SupportRequest]:
    """Read the model config and overrides, tell what they hold, and complete the identity from them."""
    config = load_model_config(options["model_config"])
    stated = load_overrides(options.get("resource_overrides"))
    facts = derive_profile(config, None, stated)
    talk.tell(f"Model config: {config.path} (SHA-256 {config.sha256}).")
    for name, note in facts.notes.items():
        if name not in LAYOUT_NOTES:
            talk.tell(f"Config {name}: {note}")
    for name in MODEL_FIELDS:
        if name in facts.resolved:
            talk.tell(f"{name}: {facts.resolved[name]} (source: {facts.sources[name]})")
        elif talk.interactive:
            talk.tell(f"{name}: {facts.missing[name]}")
            stated[name] = ask_field(talk, name)
            facts = derive_profile(config, None, stated)
    for name in LAYOUT_NOTES:
        if name in facts.notes:
            talk.tell(f"Config {name}: {facts.notes[name]}")
    if options.get("model") is None:
        options["model"] = config.suggestions.get("model")
    experts = facts.resolved.get("num_experts")
    if options.get("model_kind") is None and experts is not None:
        options["model_kind"] = "moe" if experts else "dense"
    if options.get("context_length") is None and "context_length" in facts.resolved:
        options["context_length"] = min(facts.resolved["context_length"], REFERENCE_CONTEXT_TOKENS)
    if talk.interactive:
        return config, stated, guided_request(talk, options, with_topology=has_topology(options))
    try:
        return config, stated, build_request(options)
    except OptionFaults as fault:
        raise OptionFaults(
            [
                *fault.faults,
                ("", "complete these options first; profile fields that are still open are told after that"),
            ]
        ) from None


# --- the topology ---


def _choose(
    talk: Talk, options: Options, config: ModelConfig, stated: dict[str, Any], request: SupportRequest
) -> list[SupportRequest]:
    """The requests of the topologies that are suggested and chosen; without anybody to ask, of the default."""
    while True:
        try:
            suggestions = suggest_topologies(config, request, stated)
            if talk.interactive and suggestions.candidates:
                _ask_shared(talk, config, stated, [{}])
                suggestions = suggest_topologies(config, request, stated)
            break
        except RequestFieldError as fault:
            request = _corrected(talk, options, fault)
    facts = derive_profile(config, None, stated)
    if facts.pending_runtime:
        # No topology changes that, so that there is none to choose.
        _tell_fields(talk, facts, without=("max_num_tokens", "max_batch_size"))
        raise OnboardError(
            probe_guidance(
                facts, shortlist(suggestions, with_missing=False), has_candidates=bool(suggestions.candidates)
            )
        )
    if not suggestions.candidates or (suggestions.default is None and not talk.interactive):
        raise OnboardError(
            f"no fully assessed default topology.\n{shortlist(suggestions)}\nState what is missing in "
            "--resource-overrides, or name a topology with the flags above; an explicit one may be wider"
        )
    talk.tell(shortlist(suggestions))
    several = options.get("output_dir") is not None
    chosen = [suggestions.default] if suggestions.default is not None else []
    if talk.interactive:
        chosen = [suggestions.candidates[place] for place in _ask_candidates(talk, suggestions, several)]
    for candidate in chosen:
        flags = shlex.join(candidate.cli_flags)
        talk.tell(f"Selected {candidate.family} on {candidate.required_gpus} GPUs: {flags}")
    return [candidate.apply(request) for candidate in chosen]


def _ask_candidates(talk: Talk, suggestions: TopologySuggestions, several: bool) -> list[int]:
    """Places of the chosen candidates; an empty answer takes the default where there is one."""
    last = len(suggestions.candidates)
    default = None if suggestions.default is None else suggestions.candidates.index(suggestions.default)
    if default is None:
        talk.tell("Whether any fits is open; choose one, its memory is observed while collecting.")
    shown = "" if default is None else f" [{default + 1}]"
    question = f"Topologies 1-{last}, separated by commas{shown}" if several else f"Topology 1-{last}{shown}"
    while True:
        answer = talk.ask(f"{question}, or cancel")
        if answer.lower() == "cancel":
            raise Cancelled
        if not answer and default is not None:
            return [default]
        words = [word.strip() for word in answer.split(",")] if several else [answer]
        numbers = [int(word) for word in words if word.isdecimal() and 1 <= int(word) <= last]
        if len(set(numbers)) == len(words):
            return [number - 1 for number in numbers]
        talk.tell(f"Answer {'distinct numbers' if several else 'a number'} from 1 to {last}, or cancel.")


def _ask_shared(talk: Talk, config: ModelConfig, shared: dict[str, Any], own: list[dict[str, Any]]) -> None:
    """Ask for what every configuration needs and no topology changes."""

    def open_field() -> tuple[str, str] | None:
        for overrides in own:
            draft = derive_profile(config, None, {**shared, **overrides})
            for name, reason in draft.missing.items():
                if not is_bytes(name) and name not in ("cache_groups", "cache_block_sizes"):
                    return name, reason
        return None

    while (found := open_field()) is not None:
        name, reason = found
        talk.tell(f"{name}: {reason}")
        shared[name] = ask_field(talk, name)


def _corrected(talk: Talk, options: Options, fault: RequestFieldError) -> SupportRequest:
    """The request after the option at fault was answered anew."""
    if not talk.interactive or not is_option(fault.path):
        raise OnboardError(f"{option_name(fault.path)}: {fault}", fault.path) from None
    correct(talk, options, fault.path, str(fault))
    return valid_request(talk, options)


# --- the profile ---


def _complete(
    talk: Talk,
    options: Options,
    config: ModelConfig,
    stated: dict[str, Any],
    request: SupportRequest,
    *,
    of_several: bool = False,
) -> SupportRequest:
    """The request with its profile; at a terminal asked for and reviewed."""
    while True:
        try:
            draft = derive_profile(config, request, stated)
            _tell_fields(talk, draft)
            if not talk.interactive:
                _refuse_open(draft)
            draft = complete_draft(talk, config, request, stated)
        except RequestFieldError as fault:
            request = _corrected(talk, options, fault)
            continue
        _refuse_open(draft)
        completed = request.replaced({"fpm_profile": profile_document(draft)})
        if not talk.interactive:
            return completed
        return review(talk, config, Reviewed(completed, draft, stated), of_several=of_several).request


def _tell_fields(talk: Talk, draft: ProfileDraft, without: tuple[str, ...] = ()) -> None:
    shown = {name: value for name, value in draft.resolved.items() if name not in without}
    talk.fields("Profile inputs (bytes of one rank; estimates are verified by the runtime)", shown, draft.sources)


def _refuse_open(draft: ProfileDraft) -> None:
    if draft.pending_runtime:
        raise OnboardError(probe_guidance(draft))
    if draft.missing:
        raise OnboardError(open_fields(draft), next(iter(draft.missing)))
