"""What `onboard init` is asked for: its options, which go together, and the request that they make.

Source: onboarding.md section 1.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from fpmsdk.documents.yaml_files import read_mapping
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.request_sections import (
    DEFAULT_MEMORY_FRACTION,
    TOPOLOGY_FIELDS,
    CollectionSection,
    ExampleWorkload,
    LatencyTargets,
    RequestIdentity,
    SearchSection,
)

Options = dict[str, Any]
"""Options by field, None for those that are not given."""

_SECTIONS: dict[str, type[BaseModel]] = {
    "identity": RequestIdentity,
    "workload": ExampleWorkload,
    "search": SearchSection,
    "collection": CollectionSection,
}
_KINDS: tuple[type[BaseModel], ...] = (*_SECTIONS.values(), LatencyTargets)
REQUEST_OPTIONS = frozenset({"worker_type", *(name for kind in _KINDS for name in kind.model_fields)} - {"slo"})


class OptionFaults(OnboardError):
    """Options that make no request; `faults` are pairs of an option's field, empty for the whole, and the reason."""

    def __init__(self, faults: list[tuple[str, str]]) -> None:
        lines = [f"{option_name(field)}: {reason}" if field else reason for field, reason in faults]
        super().__init__("\n".join(lines), faults[0][0])
        self.faults = faults


def option_name(field: str) -> str:
    """The option of a field.

    >>> option_name("max_num_tokens")
    '--max-num-tokens'
    """
    return "--" + field.replace("_", "-")


def has_topology(options: Mapping[str, Any]) -> bool:
    """Whether a topology is named, even in part, so that none is suggested."""
    return any(options.get(name) is not None for name in TOPOLOGY_FIELDS)


def check_combinations(options: Mapping[str, Any]) -> None:
    """Refuse options that do not go together, before any file is read.

    Raises
    ------
    OnboardError: names both options.
    """
    given = {name for name, value in options.items() if value not in (None, False)}
    topology = sorted(given.intersection(TOPOLOGY_FIELDS))
    for name, needed in (
        ("resource_overrides", ("model_config",)),
        ("suggest_parallel", ("model_config",)),
        ("parallel_configs", ("model_config", "output_dir")),
        ("output_dir", ("model_config",)),
    ):
        if name in given and not given.issuperset(needed):
            raise OnboardError(f"{option_name(name)} needs {' and '.join(map(option_name, needed))}", option_name(name))
    profiles = ("profile", "fpm_profile")
    for name, excluded in (
        ("model_config", ("fpm_profile",)),
        ("output_dir", ("output", "overwrite")),
        ("parallel_configs", (*topology, "suggest_parallel")),
        ("suggest_parallel", ("interactive", *profiles, *topology, "output_dir", "parallel_configs")),
    ):
        if name in given and (found := [option_name(other) for other in excluded if other in given]):
            raise OnboardError(
                f"{option_name(name)} does not go with {', '.join(found)}; leave one out", option_name(name)
            )


def build_request(options: Mapping[str, Any]) -> SupportRequest:
    """The request that options make, with the defaults of a new one.

    Raises
    ------
    OptionFaults: missing and invalid options, all of them.
    OnboardError: the profile cannot be read, or nothing tells the context limit.
    """
    profile = read_mapping(options["fpm_profile"]) if options.get("fpm_profile") else None
    document = _document(options, profile)
    request = _validated(document)
    if options.get("context_length") is None and profile is None:
        raise OptionFaults(
            [("context_length", "needed: neither a model config nor a profile tells the limit of one request")]
        )
    deployment = request.profile_deployment()
    memory = None if deployment is None else deployment.resources.runtime_memory
    search, collection = document["search"], document["collection"]
    if memory is None:
        collection.setdefault("gpu_memory_utilization", DEFAULT_MEMORY_FRACTION)
        return _validated(document)
    # A measured capacity holds for the settings under which it was measured.
    search.setdefault("context_length", min(request.search.context_length, memory.max_model_len))
    collection.setdefault("gpu_memory_utilization", memory.gpu_memory_utilization)
    if search["context_length"] > memory.max_model_len:
        reason = f"must be at most the observed {memory.max_model_len}, found {search['context_length']}; probe again"
        raise OptionFaults([("context_length", reason)])
    if (found := collection["gpu_memory_utilization"]) != memory.gpu_memory_utilization:
        reason = f"must be the observed {memory.gpu_memory_utilization}, found {found}; probe again for another"
        raise OptionFaults([("gpu_memory_utilization", reason)])
    return _validated(document)


def _document(options: Mapping[str, Any], profile: dict[str, Any] | None) -> dict[str, Any]:
    document: dict[str, Any] = {name: _given(options, kind) for name, kind in _SECTIONS.items()}
    document["workload"]["slo"] = _given(options, LatencyTargets)
    explicit = "max_prefill_cudagraph_size" in document["collection"]
    document["collection"].setdefault("prefill_cudagraph_policy", "explicit" if explicit else "runtime")
    if options.get("worker_type") is not None:
        document["worker_type"] = options["worker_type"]
    if profile is not None:
        document["fpm_profile"] = profile
    return document


def _given(options: Mapping[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    return {name: options[name] for name in kind.model_fields if options.get(name) is not None}


def _validated(document: dict[str, Any]) -> SupportRequest:
    try:
        return SupportRequest.model_validate(document)
    except ValidationError as error:
        found = []
        for fault in error.errors(include_url=False):
            path = [str(part) for part in fault["loc"]]
            field = path[-1] if path and path[-1] in REQUEST_OPTIONS else ""
            reason = fault["msg"].removeprefix("Value error, ")
            if fault["type"] == "missing":
                reason = "is missing; supply it"
            elif fault["type"] != "value_error":
                reason += f", found {fault['input']!r}"
            found.append((field, reason if field or not path else f"{'.'.join(path)}: {reason}"))
        raise OptionFaults(found) from None
