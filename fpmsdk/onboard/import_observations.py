"""Import observations of a running engine into drafts of a session; nothing is accepted by that.

A configuration whose evidence does not hold keeps its draft, and the evidence is kept as history.
Source: onboarding.md section 6.3.
"""

from __future__ import annotations

import copy
import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fpmsdk.collect.observation_index import read_index, validate_observations
from fpmsdk.documents.canonical import pretty_bytes, write_document
from fpmsdk.documents.evidence import file_meta
from fpmsdk.documents.strict import checked
from fpmsdk.errors import FpmSdkError, OnboardError
from fpmsdk.files import sha256
from fpmsdk.onboard.checkpoint import Checkpoint, Configuration, load_checkpoint
from fpmsdk.onboard.checkpoint_save import save_checkpoint
from fpmsdk.onboard.intake import load_model_config
from fpmsdk.onboard.launch import ResolvedLaunch, resolve_launch
from fpmsdk.onboard.observation_snapshot import SOURCE_INDEX_FILE, snapshot_attempt
from fpmsdk.onboard.observed_profile import observed_profile
from fpmsdk.onboard.provenance import PROBE_SCHEMA
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.runtime_profile import LAUNCH_FILE, METADATA_FIELDS, MODEL_CONFIG_FILE, resource_values

IMPORT_FILE, VALIDATION_FILE = "import.json", "validation.json"
REQUEST_FILE, PROFILE_FILE = "request.yaml", "fpm-model-profile.json"
_KINDS = {REQUEST_FILE: "request", PROFILE_FILE: "profile"}


def import_observations(
    checkpoint: Path,
    observations: str | os.PathLike[str],
    output: str | os.PathLike[str],
    configurations: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Validate saved observations and put a draft into the session for every configuration whose evidence holds.

    Parameters
    ----------
    checkpoint: the session, as `checkpoint_path` returns it.
    observations: the index `observations.json` of a probe or of a campaign.
    output: a folder that does not exist yet; copies of the evidence and the drafts go there.
    configurations: which ones; None is all.

    Returns
    -------
    The content of `import.json`: `checkpoint`, `revision`, `status`, and by configuration `status`, `diagnostics`,
    `validation`, and for a complete one `request`, `profile` and possibly `cache_layout_reason`.

    Raises
    ------
    OnboardError: an unknown configuration, a folder that exists, or no such index; nothing was written. Also when the
        session was changed meanwhile: then it is untouched, and the folder shows what was found.
    OSError: a file cannot be written.
    """
    state = load_checkpoint(checkpoint)
    labels = selected_configurations(state, configurations)
    index_path = Path(observations).expanduser().absolute()
    index = read_index(index_path)
    root = output_folder(output, checkpoint, "--output-dir")
    if root.exists():
        raise OnboardError(f"{root}: an import needs a folder that does not exist yet; choose another", "--output-dir")
    root.mkdir(parents=True)
    patches, results = {}, {}
    for number, label in enumerate(labels, 1):
        folder = root / f"configuration-{number:03d}"
        folder.mkdir()
        patches[label], results[label] = _imported(state, label, checkpoint, index_path, index, folder)
    state, _ = save_checkpoint(checkpoint, patch={"configurations": patches}, expected_revision=state.revision)
    complete = all(result["status"] == "complete" for result in results.values())
    document = {
        "checkpoint": str(checkpoint),
        "revision": state.revision,
        "status": "complete" if complete else "incomplete",
        "configurations": results,
    }
    write_document(root / IMPORT_FILE, document)
    return document


def selected_configurations(state: Checkpoint, asked: Sequence[str] | None) -> list[str]:
    """The configurations that are asked for, or all of a session.

    Raises
    ------
    OnboardError: one is unknown or named twice, or there is none.
    """
    labels = list(asked or state.configurations)
    unknown = [label for label in labels if label not in state.configurations]
    if unknown:
        known = ", ".join(state.configurations) or "none"
        raise OnboardError(
            f"--configuration: unknown are {', '.join(unknown)}; the session has {known}", "--configuration"
        )
    if not labels or len(set(labels)) < len(labels):
        raise OnboardError("--configuration: name at least one configuration, and each once", "--configuration")
    return labels


def output_folder(output: str | os.PathLike[str], checkpoint: Path, option: str) -> Path:
    """The absolute place of an output folder, which may not hold the session.

    Raises
    ------
    OnboardError: a symbolic link, or a folder above the session.
    """
    place = Path(output).expanduser()
    if place.is_symlink():
        raise OnboardError(f"{option}: {place} may not be a symbolic link", option)
    root = place.resolve()
    if checkpoint == root or root in checkpoint.parents:
        raise OnboardError(f"{option}: {root} holds the session {checkpoint}; keep the session outside of it", option)
    return root


def _imported(
    state: Checkpoint, label: str, checkpoint: Path, index_path: Path, index: dict[str, Any], folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The patch of one configuration, and its part of the result."""
    before = state.configurations[label]
    validated: dict[str, Any] = {
        "status": "incomplete",
        "resources": None,
        "diagnostics": [],
        "provenance": {"source_index": str(index_path)},
    }
    request = None
    try:
        snapshot, missing = snapshot_attempt(index_path, index, label, folder / "evidence")
        launch = resolve_launch(state, label, checkpoint)
        validated = validate_observations(snapshot, {label: launch.facts})[label].document()
        validated["diagnostics"] += missing
        if missing:
            validated["status"] = "incomplete"
        if validated["status"] == "complete":
            _keep_launch(launch, snapshot.parent)
            request = _draft(before, launch, validated["resources"], snapshot, checkpoint, label)
            (folder / REQUEST_FILE).write_bytes(request.yaml_bytes())
            write_document(folder / PROFILE_FILE, request.document()["fpm_profile"])
    except (FpmSdkError, OSError) as fault:
        validated["status"] = "incomplete"
        validated["diagnostics"].append(str(fault))
        request = None
        (folder / SOURCE_INDEX_FILE).write_bytes(index_path.read_bytes())
    write_document(folder / VALIDATION_FILE, validated)
    patch = _patch(before, folder, validated, request)
    result: dict[str, Any] = {
        "status": validated["status"],
        "diagnostics": validated["diagnostics"],
        "validation": str(folder / VALIDATION_FILE),
    }
    if "not_established" in validated["provenance"]:
        result["not_established"] = validated["provenance"]["not_established"]
    if request is not None and request.fpm_profile is not None:
        result |= {"request": str(folder / REQUEST_FILE), "profile": str(folder / PROFILE_FILE)}
        reason = json.loads(request.fpm_profile.provenance).get("cache_layout_reason")
        if reason is not None:
            result["cache_layout_reason"] = reason
    return patch, result


def _keep_launch(launch: ResolvedLaunch, evidence: Path) -> None:
    config = launch.facts["model_config"]
    (evidence / LAUNCH_FILE).write_bytes(pretty_bytes(launch.facts))
    source = Path(config["path"])
    for name, place, digest in (
        (MODEL_CONFIG_FILE, source, config["sha256"]),
        *((name, source.parent / name, digest) for name, digest in config.get("source_files", {}).items()),
    ):
        content = place.read_bytes()
        if sha256(content) != digest:
            raise OnboardError(f"{place}: was changed during the import; import again", str(place))
        (evidence / name).write_bytes(content)


def _draft(
    before: Configuration,
    launch: ResolvedLaunch,
    resources: dict[str, Any],
    snapshot: Path,
    checkpoint: Path,
    label: str,
) -> SupportRequest:
    # A fraction that the probe took by default is stated from now on: the collection has to run under the same one.
    fraction = launch.facts["collection"]["gpu_memory_utilization"]
    collection = {**launch.request["collection"], "gpu_memory_utilization": fraction}
    # The former profile may be of other settings; it is replaced, not compared.
    request = checked(
        SupportRequest, {**launch.request, "collection": collection, "fpm_profile": None}, "draft_request"
    )
    precision = {
        "kv_cache_dtype" if name == "kvcache_quant_mode" else name: value
        for name, value in launch.facts["precision"].items()
    }
    config = load_model_config(launch.facts["model_config"]["path"])
    profile = observed_profile(config, request, precision, resources, launch.overrides).model_dump(
        mode="json", exclude_none=True
    )
    former = before.draft_request.get("fpm_profile")
    if isinstance(former, dict):
        provenance = json.loads(profile["provenance"])
        provenance["source_profile_provenance"] = former.get("provenance")
        profile["provenance"] = json.dumps(provenance, sort_keys=True, allow_nan=False)
    files = sorted(place for place in snapshot.parent.rglob("*") if place.is_file())
    manifest = {
        "schema_version": PROBE_SCHEMA,
        "checkpoint": str(checkpoint),
        "configuration": label,
        "observations_index": str(snapshot),
        "source_artifacts": [{"path": str(place), "sha256": file_meta(place)["sha256"]} for place in files],
        "observed_resources": resource_values(resources),
        "model_metadata": {name: profile[name] for name in METADATA_FIELDS},
        "user_overrides": {},
        "review_status": "requires_review",
        "timing_status": "not_established_by_runtime_probe",
    }
    profile["deployments"][0]["resources"]["runtime_memory"]["provenance"] = pretty_bytes(manifest).decode()
    return checked(SupportRequest, {**request.document(), "fpm_profile": profile}, "draft_request")


def _patch(
    before: Configuration, folder: Path, validated: dict[str, Any], request: SupportRequest | None
) -> dict[str, Any]:
    complete = request is not None
    artifacts: dict[str, dict[str, Any]] = {}
    if complete:
        # What was made of the former draft is history from now on; inputs that the user registered stay.
        artifacts = {
            name: {"archived": True}
            for name, artifact in before.artifacts.items()
            if not artifact.archived
            and (artifact.kind in _KINDS.values() or artifact.scope != "input" or name.startswith("runtime-"))
        }
    token = uuid.uuid4().hex[:12]
    for number, place in enumerate(sorted(place for place in folder.rglob("*") if place.is_file())):
        artifacts[f"runtime-{token}-{number}"] = {
            "path": str(place),
            "kind": _KINDS.get(place.name, "file"),
            "scope": "input",
            "archived": not complete,
        }
    validation = folder / VALIDATION_FILE
    event = {
        "event": "runtime_observations_import",
        "validation": str(validation),
        "sha256": file_meta(validation)["sha256"],
        "status": validated["status"],
        "diagnostics": validated["diagnostics"],
        "archived_artifacts": [name for name, artifact in artifacts.items() if artifact["archived"]],
        "reason": "New evidence takes the place of former drafts and of what was made of them."
        if complete
        else "The import did not succeed; its evidence is kept, the current draft stays.",
    }
    patch: dict[str, Any] = {
        "artifacts": artifacts,
        "history": [*copy.deepcopy(before.history), event],
        "progress": {
            "stage": 3,
            "status": "in_progress" if complete else "blocked",
            "blockers": validated["diagnostics"],
            "next_action": "Review this exact draft and accept it."
            if complete
            else "Resolve what the evidence lacks, probe again, and import into a fresh folder.",
        },
    }
    if request is not None:
        patch["draft_request"] = request.document()
    return patch
