"""The version label of the data, bound to the version of the engine that was seen where they are collected.

A plan whose runtime is not known yet is never rewritten: the resolved request is a plan of its own below it, and a
small document binds the two and the deployment that was looked into.
Source: onboarding.md section 11.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue

from fpmsdk.documents.canonical import read_document, write_document
from fpmsdk.documents.strict import StrictDocument, checked
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.onboard.collector_command import ARTIFACT_FOLDER, CHECKPOINT_FOLDER
from fpmsdk.onboard.deployment import CollectionDeployment
from fpmsdk.onboard.plan import create_plan, plan_lock
from fpmsdk.onboard.plan_check import check_plan
from fpmsdk.onboard.plan_documents import REQUEST_FILE
from fpmsdk.onboard.provenance import json_object
from fpmsdk.onboard.request import SupportRequest, load_request, request_id
from fpmsdk.onboard.version_detect import RuntimeVersions

BINDING_FILE = "runtime-version.json"
RESOLVED_FOLDER = "runtime-resolved"

Detector = Callable[[CollectionDeployment], RuntimeVersions]


class RuntimeBinding(StrictDocument):
    """Which plan was resolved into which, by what was seen in which deployment. Source: onboarding.md section 11."""

    schema_version: Literal[1] = 1
    source_request_id: str
    resolved_request_id: str
    deployment: dict[str, JsonValue]
    runtime: RuntimeVersions
    dynamo_version: str | None = None

    def document(self) -> dict[str, Any]:
        """The plain JSON object."""
        return self.model_dump(mode="json") | {"runtime": self.runtime.document()}


def frozen_deployment(deployment: CollectionDeployment | None, folder: Path) -> CollectionDeployment | None:
    """The deployment of a collection: once it was looked into, that one, else the given one.

    Parameters
    ----------
    deployment: what was asked for now; options that were not given are taken from the frozen one.
    folder: a plan folder, or the resolved one below it.

    Raises
    ------
    OnboardError: an option differs from the frozen one, or the binding is not that of the resolved plan.
    EvidenceError: the binding is a link.
    """
    binding = _read(folder / BINDING_FILE)
    if binding is None and folder.name == RESOLVED_FOLDER:
        binding = _read(folder.parent / BINDING_FILE)
        if binding is not None and request_id(load_request(folder / REQUEST_FILE)) != binding.resolved_request_id:
            raise OnboardError(
                f"{folder / REQUEST_FILE}: is not the request that {BINDING_FILE} above it was resolved into; plan "
                "again in a new output directory",
                str(folder / REQUEST_FILE),
            )
    if binding is None:
        return deployment
    frozen = checked(CollectionDeployment, binding.deployment, BINDING_FILE)
    if deployment is None:
        return frozen
    for name in sorted(deployment.model_fields_set - {"dynamo_version"}):
        if getattr(deployment, name) != getattr(frozen, name):
            raise _another_deployment(name, getattr(frozen, name), getattr(deployment, name))
    if deployment.dynamo_version is None:
        return frozen
    return frozen.model_copy(update={"dynamo_version": deployment.dynamo_version})


def bound_request(
    request: SupportRequest, deployment: CollectionDeployment | None, folder: Path
) -> tuple[SupportRequest, Path] | None:
    """The resolved request and its folder, when the version for this plan was seen before; None when it was not.

    Raises
    ------
    OnboardError: the binding is of another plan or deployment, or one of the two plans is not intact.
    EvidenceError: a link is where the binding or the resolved plan should be.
    """
    binding = _read(folder / BINDING_FILE)
    if binding is None:
        return None
    check_plan(request, folder)
    if binding.source_request_id != request_id(request):
        raise OnboardError(
            f"{folder / BINDING_FILE}: was resolved for another request, {binding.source_request_id}; plan again in a "
            "new output directory",
            str(folder / BINDING_FILE),
        )
    if deployment is not None and deployment.identity() != binding.deployment:
        raise _another_deployment("options", binding.deployment, deployment.identity())
    resolved_folder = folder / RESOLVED_FOLDER
    if resolved_folder.is_symlink():
        raise EvidenceError(f"{resolved_folder}: the resolved plan may not be a link", str(resolved_folder))
    resolved = load_request(resolved_folder / REQUEST_FILE)
    if request_id(resolved) != binding.resolved_request_id:
        raise OnboardError(
            f"{resolved_folder / REQUEST_FILE}: is not what {BINDING_FILE} was resolved into; plan again in a new "
            "output directory",
            str(resolved_folder / REQUEST_FILE),
        )
    check_plan(resolved, resolved_folder)
    return resolved, resolved_folder


def resolve_request(
    request: SupportRequest, deployment: CollectionDeployment | None, folder: Path, *, detect: Detector
) -> tuple[SupportRequest, Path]:
    """See which version runs, and make the plan that is collected; what was seen before is used again.

    Parameters
    ----------
    folder: an intact plan folder without collected artifacts.
    detect: `version_detect.detect_versions`, unless a test stands for the image.

    Raises
    ------
    OnboardError: as `bound_request`; or artifacts were collected without a binding, or the version cannot be seen.
    """
    deployment = deployment or CollectionDeployment()
    check_plan(request, folder)
    with plan_lock(folder):
        bound = bound_request(request, deployment, folder)
        if bound is not None:
            return bound
        for name in (CHECKPOINT_FOLDER, ARTIFACT_FOLDER):
            if (folder / name).is_dir() and any((folder / name).iterdir()):
                raise OnboardError(
                    f"{folder / name}: was collected before the runtime version was recorded; keep to the plan it "
                    "belongs to, or start in a new output directory",
                    str(folder / name),
                )
        runtime = detect(deployment)
        resolved = with_runtime(request, runtime)
        resolved_folder = folder / RESOLVED_FOLDER
        create_plan(resolved, resolved_folder, overwrite=True)
        binding = RuntimeBinding(
            source_request_id=request_id(request),
            resolved_request_id=request_id(resolved),
            deployment=deployment.identity(),
            runtime=runtime,
            dynamo_version=deployment.dynamo_version or runtime.dynamo_version,
        )
        write_document(folder / BINDING_FILE, binding.document())
    return resolved, resolved_folder


def with_runtime(request: SupportRequest, runtime: RuntimeVersions) -> SupportRequest:
    """A request with the version that was seen, and with it as the label where none was given.

    Deployments without a version get the label; the identity that this product noted in provenance follows. What a
    person wrote as provenance stays.
    """
    document = request.document()
    label = request.identity.framework_version or runtime.backend_version
    versions = {"framework_version": label, "runtime_framework_version": runtime.backend_version}
    document["identity"] |= versions
    if request.fpm_profile is not None:
        profile = request.fpm_profile.model_dump(mode="json")
        identity = request.identity.model_copy(update=versions).model_dump(mode="json")
        for deployment in profile["deployments"]:
            deployment["backend_version"] = deployment["backend_version"] or label
        for holder in (profile, *(deployment["resources"] for deployment in profile["deployments"])):
            provenance = json_object(holder["provenance"])
            if "deployment_identity" in provenance:
                provenance["deployment_identity"] = identity
                holder["provenance"] = json.dumps(provenance, sort_keys=True)
        document["fpm_profile"] = profile
    return checked(SupportRequest, document, "resolved request")


def _read(path: Path) -> RuntimeBinding | None:
    if path.is_symlink():
        raise EvidenceError(f"{path}: the binding may not be a link; use the file itself", str(path))
    if not path.exists():
        return None
    return checked(RuntimeBinding, read_document(path), str(path))


def _another_deployment(name: str, frozen: Any, asked: Any) -> OnboardError:
    return OnboardError(
        f"the deployment differs from the one whose runtime version was recorded: {name}: recorded {frozen!r}, asked "
        f"for {asked!r}; use the same options, or a fresh plan",
        name,
    )
