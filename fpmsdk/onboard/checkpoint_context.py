"""What an acceptance or a result of a session was made for, as one digest of its context.

Source: onboarding.md section 6.1 (context digests).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

from fpmsdk.documents.canonical import digest
from fpmsdk.documents.strict import checked
from fpmsdk.errors import ConfigError, OnboardError
from fpmsdk.onboard.checkpoint import Artifact, Checkpoint, Configuration
from fpmsdk.onboard.request import SupportRequest

Scope = Literal["acceptance", "collection", "validation"]
# What an example runs with decides nothing about what is collected.
_EVALUATION_FIELDS = ("objective", "seed")


def complete_request(draft: Mapping[str, Any]) -> SupportRequest:
    """The request that a draft amounts to, with its profile and its scheduler limits.

    Raises
    ------
    OnboardError: the draft breaks a rule or has no profile yet; one line a field.
    ConfigError: its profile holds no such deployment.
    """
    request = checked(SupportRequest, dict(draft), "draft_request")
    if request.fpm_profile is None:
        raise OnboardError(
            "draft_request.fpm_profile: is missing; derive or import a profile before accepting the draft",
            "draft_request.fpm_profile",
        )
    request.scheduler_limits()
    return request


def draft_document(draft: Mapping[str, Any]) -> dict[str, Any]:
    """A draft as it enters digests: written out like a request once it is one, else as it stands."""
    try:
        return complete_request(draft).document()
    except (OnboardError, ConfigError):
        return copy.deepcopy(dict(draft))


def context_digest(state: Checkpoint, configuration: Configuration, scope: Scope) -> str:
    """SHA-256 of everything that a configuration's acceptance or results depend on.

    Parameters
    ----------
    state: the session that the configuration is part of.
    configuration: whose context.
    scope: `acceptance` covers inputs, input files and the whole draft; `collection` leaves out of the draft what only
        an evaluation uses; `validation` adds the inputs of validation to `acceptance`.

    Example
    -------
    >>> context_digest(Checkpoint(), Configuration(), "acceptance")[:16]
    '251d885e8bebae6f'
    """
    request = draft_document(configuration.draft_request)
    if scope == "collection":
        request.pop("workload", None)
        if isinstance(request.get("search"), dict):
            request["search"] = {
                name: value for name, value in request["search"].items() if name not in _EVALUATION_FIELDS
            }
    context = {
        "inputs": state.inputs,
        "configuration_inputs": configuration.inputs,
        "source_artifacts": _input_references(state.artifacts),
        "configuration_source_artifacts": _input_references(configuration.artifacts),
        "request": request,
    }
    if scope == "validation":
        context["validation_inputs"] = state.validation_inputs
        context["configuration_validation_inputs"] = configuration.validation_inputs
    return digest(context)


def _input_references(artifacts: Mapping[str, Artifact]) -> dict[str, dict[str, Any]]:
    return {
        name: {"path": artifact.path, "sha256": artifact.sha256, "kind": artifact.kind}
        for name, artifact in artifacts.items()
        if artifact.scope == "input" and not artifact.archived
    }
