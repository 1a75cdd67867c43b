"""Finalise a collection: its memory resolved into a fresh plan folder, with a verified copy of its table.

The collection itself is only read. Whoever uses the outcome reviews the profile before accepting it.
Source: onboarding.md section 7.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fpmsdk.documents.canonical import canonical_bytes, read_document
from fpmsdk.documents.evidence import file_meta, verify_evidence
from fpmsdk.documents.strict import checked
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.files import sha256, write_directory
from fpmsdk.onboard.collection_source import CollectionSource, formal_checkpoint, verify_source
from fpmsdk.onboard.collector_command import ARTIFACT_FOLDER
from fpmsdk.onboard.finalize_evidence import CollectedMemory, collected_memory
from fpmsdk.onboard.finalize_memory import merged_memory
from fpmsdk.onboard.imported_profile import require_accepted
from fpmsdk.onboard.outputs import require_apart
from fpmsdk.onboard.plan import plan_lock
from fpmsdk.onboard.plan_check import check_plan, plan_folder
from fpmsdk.onboard.plan_documents import REQUEST_FILE, plan_documents
from fpmsdk.onboard.provenance import FINALIZATION_SCHEMA, finalization_manifest, probe_manifest
from fpmsdk.onboard.quality import collection_quality, verify_finalized_quality
from fpmsdk.onboard.readiness import read_checkpoint
from fpmsdk.onboard.request import SupportRequest, load_request, request_id

MODELING_SCOPE = (
    "Timings are those of the text decoder. The observed cache capacity accounts for everything that the measured "
    "worker had loaded; nothing is subtracted for encoders."
)
REVIEW = "requires_review"
_OPTION = "--resolved-output-dir"


class Revision(NamedTuple):
    """An accepted request that lowers the cache capacity of another, and the reference to its file."""

    reference: dict[str, str]
    request: SupportRequest


class Resolution(NamedTuple):
    """A resolved request, the manifest in it, and the files it rests on with their digests by path."""

    request: SupportRequest
    manifest: dict[str, Any]
    digests: dict[str, str]
    source: CollectionSource


def finalize(
    request: SupportRequest,
    output_dir: str | os.PathLike[str],
    resolved_dir: str | os.PathLike[str],
    *,
    memory_config: str | os.PathLike[str] | None = None,
    collection_report: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Verify a finished collection and write the plan folder of its resolved request.

    Parameters
    ----------
    request: the request of the collection.
    output_dir: its plan folder.
    resolved_dir: where nothing is yet, apart from the plan folder.
    memory_config: an accepted revision of the request that only lowers the cache capacity.
    collection_report: `collection-validation.json` of this collection; its gates are assessed anew.

    Returns
    -------
    `{resolved_directory, request, review_status, collection_quality, accuracy}`.

    Raises
    ------
    OnboardError: the request is not the collection's, its memory needs no finalisation, or the target is in use.
    EvidenceError: the collection is incomplete, does not validate any more, or a file of it changed, also while this
        runs. In every case nothing is written.

    Source: onboarding.md section 7.
    """
    folder, target = plan_folder(Path(output_dir)), _target(Path(resolved_dir), Path(output_dir))
    _require_pending(request)
    with plan_lock(folder):
        revision = None if memory_config is None else _revision(request, Path(memory_config))
        resolution = resolve(
            request,
            folder,
            revision=revision,
            quality=lambda source: collection_quality(
                request,
                folder,
                source_request_id=request_id(request),
                source_plan_sha256=source.plan.sha256,
                report=collection_report,
            ),
        )
        files = plan_documents(resolution.request, target) | _formal_files(resolution.source)
        target.parent.mkdir(parents=True, exist_ok=True)

        def confirm() -> None:
            check_plan(request, folder)
            for path, digest in resolution.digests.items():
                verify_evidence({"path": path, "sha256": digest})
            if revision is not None:
                verify_evidence(revision.reference)
            verify_finalized_quality(resolution.manifest)

        write_directory(target, files, confirm)
    return {
        "resolved_directory": str(target),
        "request": str(target / REQUEST_FILE),
        "review_status": REVIEW,
        "collection_quality": resolution.manifest["collection_quality"]["status"],
        "accuracy": "not_assessed",
    }


def verify_finalization(request: SupportRequest) -> None:
    """Finalise the collection behind a finalised request again, in memory, and compare.

    Parameters
    ----------
    request: a request whose memory a finalisation has resolved; its example workload may be another.

    Raises
    ------
    OnboardError: it is no such request.
    EvidenceError: its collection changed, or gives another request than this.
    """
    manifest = finalization_manifest(request)
    if manifest is None:
        raise OnboardError("fpm_profile: its memory is not that of a finalisation", "fpm_profile")
    verify_finalized_quality(manifest)
    folder = Path(manifest["source_directory"])
    source = load_request(folder / REQUEST_FILE)
    reference = manifest.get("memory_revision")
    revision = None
    if reference is not None:
        verify_evidence(reference)
        revision = Revision(reference, load_request(reference["path"]))
    again = resolve(source, folder, revision=revision, quality=lambda _: manifest.get("collection_quality"))
    if request_id(again.request) != request_id(request):
        raise EvidenceError(
            f"{folder}: its collection gives another request than the finalised one; finalize it again", str(folder)
        )


def resolve(
    request: SupportRequest,
    folder: Path,
    *,
    revision: Revision | None = None,
    quality: Callable[[CollectionSource], dict[str, Any] | None],
) -> Resolution:
    """The resolved request of a collection, from evidence that is verified anew; nothing is written.

    Parameters
    ----------
    folder: the plan folder, absolute.
    quality: gives the quality of the collection, None for a finalisation from before that was stated.

    Raises: as `finalize`.
    """
    check_plan(request, folder)
    digests = _digests(folder)
    source = verify_source(request, folder)
    _require_cells(source)
    memory = collected_memory(request, source, None if revision is None else revision.request)
    digests |= _digests_of(memory.files)
    manifest = _manifest(request, source, memory, digests, revision)
    if (stated := quality(source)) is not None:
        manifest["collection_quality"] = stated
    resolved, whole = _resolved_request(request, memory, manifest)
    return Resolution(resolved, whole, digests, source)


def _resolved_request(
    request: SupportRequest, memory: CollectedMemory, manifest: Mapping[str, Any]
) -> tuple[SupportRequest, dict[str, Any]]:
    """The request with the memory of its collection in its profile, and the manifest that its provenance holds."""
    selected = request.profile_deployment()
    assert selected is not None and request.fpm_profile is not None
    keeps_linear = selected.resources.cache_layout == "linear" and probe_manifest(request) is not None
    merged, whole = merged_memory(memory.observations, manifest, keeps_linear=keeps_linear)
    provenance: dict[str, Any] = {
        "memory_source": "runtime",
        "method": "runtime memory resolved from verified collector artifacts",
        "source_collection_plan_sha256": whole["source_collection_plan_sha256"],
        "source_profile_provenance": request.fpm_profile.provenance,
        **({"collection_quality": whole["collection_quality"]} if "collection_quality" in whole else {}),
    }
    if merged.resources["cache_layout"] == "linear":
        provenance["measured_cache_groups"] = merged.measured_groups
    document = request.document()
    profile = request.fpm_profile.model_dump(mode="json")
    place = request.fpm_profile.deployments.index(selected)
    profile["deployments"][place]["resources"] = merged.resources
    profile["provenance"] = canonical_bytes(provenance).decode()
    return checked(SupportRequest, document | {"fpm_profile": profile}, "the finalised request"), whole


def _target(resolved: Path, output: Path) -> Path:
    given = resolved.expanduser()
    if given.is_symlink():
        raise OnboardError(f"{_OPTION} {given}: is a symbolic link; name a new directory", _OPTION)
    target = given.resolve()
    require_apart(target, [output], _OPTION)
    if os.path.lexists(target):
        raise OnboardError(f"{_OPTION} {target}: exists; nothing is replaced, name a new directory", _OPTION)
    return target


def _require_pending(request: SupportRequest) -> None:
    deployment = request.profile_deployment()
    if deployment is None:
        raise OnboardError(
            "fpm_profile: the request has none; finalize resolves the memory of a profile", "fpm_profile"
        )
    if deployment.resources.memory_source == "declared":
        raise OnboardError(
            "fpm_profile: its memory is declared, so that there is nothing to finalize; predict and validate-fpm run "
            "on the collection as it is",
            "fpm_profile",
        )


def _require_cells(source: CollectionSource) -> None:
    for cell in source.plan.cells:
        path = source.campaign / "cells" / cell.cell_id / "cell.json"
        if read_document(path) != cell.document():
            raise EvidenceError(f"{path}: is not the cell of the frozen plan; restore the file", str(path))


def _digests(folder: Path) -> dict[str, str]:
    """Digests of everything that the verification will read, taken before it does."""
    checkpoint = formal_checkpoint(folder)
    campaign = folder / ARTIFACT_FOLDER / read_checkpoint(checkpoint)["plan_sha256"][:16]
    files = [checkpoint, *campaign.glob("*.json"), *(folder / "systems/data").rglob("fpm_forward_perf.*")]
    files += [path for path in (campaign / "cells").rglob("*") if path.is_symlink() or path.is_file()]
    return _digests_of(files)


def _digests_of(files: Any) -> dict[str, str]:
    return {str(path): file_meta(path)["sha256"] for path in sorted(map(Path, files))}


def _revision(request: SupportRequest, path: Path) -> Revision:
    absolute = path.expanduser().absolute()
    if probe_manifest(request) is None:
        raise OnboardError("--memory-config: needs a request whose memory a runtime probe observed", "--memory-config")
    digest = file_meta(absolute)["sha256"]
    revised = load_request(absolute)
    require_accepted(revised)
    return Revision({"path": str(absolute), "sha256": digest, "request_id": request_id(revised)}, revised)


def _manifest(
    request: SupportRequest,
    source: CollectionSource,
    memory: CollectedMemory,
    digests: Mapping[str, str],
    revision: Revision | None,
) -> dict[str, Any]:
    manifest: dict[str, Any] = {
        "schema_version": FINALIZATION_SCHEMA,
        "source_request_id": request_id(request),
        "source_collection_plan_sha256": source.plan.sha256,
        "source_directory": str(source.folder),
        "review_status": REVIEW,
        "modeling_scope": MODELING_SCOPE,
        "source_artifacts": [{"path": path, "sha256": digest} for path, digest in sorted(digests.items())],
        "formal_data": [
            {"relative_path": str(Path(entry["path"]).relative_to(source.folder)), "sha256": entry["sha256"]}
            for entry in sorted(source.formal_data, key=lambda entry: str(entry["path"]))
        ],
    }
    if memory.compatibility is not None:
        manifest |= {"runtime_probe": probe_manifest(request), "runtime_compatibility": memory.compatibility}
    if revision is not None:
        manifest["memory_revision"] = revision.reference
    return manifest


def _formal_files(source: CollectionSource) -> dict[str, bytes]:
    files = {}
    for entry in source.formal_data:
        path = Path(entry["path"])
        content = path.read_bytes()
        if sha256(content) != entry["sha256"]:
            raise EvidenceError(f"{path}: changed while the collection was finalised; restore it", str(path))
        files[str(path.relative_to(source.folder))] = content
    return files
