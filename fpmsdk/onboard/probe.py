"""Probe the configurations of a session: resolve their launches, preview or run them, and note what came of it.

Source: onboarding.md section 6.2.
"""

from __future__ import annotations

import copy
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.collect.executor import ExecutorFactory
from fpmsdk.collect.probe import run_probe, selected_bundle, with_cpu_policy
from fpmsdk.collect.probe_launch import normalized_launch
from fpmsdk.documents.canonical import write_document
from fpmsdk.documents.evidence import file_meta
from fpmsdk.documents.strict import checked
from fpmsdk.errors import FpmSdkError
from fpmsdk.onboard.checkpoint import Checkpoint, load_checkpoint
from fpmsdk.onboard.checkpoint_merge import merge_patch
from fpmsdk.onboard.checkpoint_save import save_checkpoint
from fpmsdk.onboard.deployment import CollectionDeployment
from fpmsdk.onboard.import_observations import output_folder, selected_configurations
from fpmsdk.onboard.launch import resolve_launch

# The engine version that a deployment's image has.
DetectVersion = Callable[[CollectionDeployment], str]
# What makes the executor of each cell, by the name of a deployment's executor.
Executors = Callable[[str], ExecutorFactory]
_PENDING = {
    True: "Detect the engine version in the image (--execute), or state it, before this can be previewed.",
    False: "Previewed once the engine versions of all selected configurations are known.",
}


def probe_runtime(
    checkpoint: Path,
    output: str | os.PathLike[str],
    *,
    configurations: Sequence[str] | None = None,
    instrumentation: str | os.PathLike[str] | None = None,
    deployment: Mapping[str, Any] | None = None,
    executors: Executors | None = None,
    detect_version: DetectVersion | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Preview or run the probes of a session; the session notes the result and the deployment.

    Parameters
    ----------
    checkpoint: the session, as `checkpoint_path` returns it.
    output: the folder of the probe, which does not hold the session.
    configurations: which ones; None is all.
    instrumentation: the manifest of the observers.
    deployment: deployment options over those that the session has saved.
    executors: gives what runs cells for the executor of a deployment; None previews.
    detect_version: finds the engine version of an image, for launches that do not state it.
    resume: whether an earlier run in `output` is continued.

    Returns
    -------
    What the report says (`onboarding-probe-<id>.json` in `output`), with `checkpoint` and its new `revision`.

    Raises
    ------
    OnboardError: an unknown configuration, a bad folder, no observers, or a session that was changed meanwhile.
    OSError: a file cannot be written.
    KeyboardInterrupt: after the running phase was salvaged and cleaned up.
    """
    state = load_checkpoint(checkpoint)
    labels = selected_configurations(state, configurations)
    root = output_folder(output, checkpoint, "--output-dir")
    launches: dict[str, dict[str, Any]] = {}
    failed: dict[str, dict[str, Any]] = {}
    for label in labels:
        try:
            launches[label] = _launch(state, label, checkpoint, root, deployment, executors, detect_version, resume)
        except (FpmSdkError, OSError) as fault:
            failed[label] = {"status": "incomplete", "diagnostics": [str(fault)]}
    result = _probed(launches, root, instrumentation, executors, resume)
    result["configurations"].update(failed)
    if failed:
        result["status"] = "partial" if launches else "failed"
    noted = {"output_dir": str(root)}
    if result["status"] != "pending_runtime_version":
        root.mkdir(parents=True, exist_ok=True)
        report = root / f"onboarding-probe-{uuid.uuid4().hex}.json"
        write_document(report, result)
        noted |= {"report": str(report), "sha256": file_meta(report)["sha256"]}
    patches = {
        label: _patch(state, label, launches.get(label), {**noted, "result": result["configurations"][label]})
        for label in labels
    }
    state, _ = save_checkpoint(checkpoint, patch={"configurations": patches}, expected_revision=state.revision)
    return {**result, "checkpoint": str(checkpoint), "revision": state.revision}


def _launch(
    state: Checkpoint,
    label: str,
    checkpoint: Path,
    root: Path,
    deployment: Mapping[str, Any] | None,
    executors: Executors | None,
    detect_version: DetectVersion | None,
    resume: bool,
) -> dict[str, Any]:
    launch = resolve_launch(state, label, checkpoint, deployment).facts
    launch["deployment"] = with_cpu_policy(label, launch["deployment"], root, resume=resume)
    identity = launch["identity"]
    if executors is not None:
        executors(launch["deployment"]["executor"])  # one that cannot be driven is told before anything is rendered
    if executors is not None and detect_version is not None and identity.get("runtime_framework_version") is None:
        found = detect_version(checked(CollectionDeployment, launch["deployment"], "deployment"))
        # A label that is the version itself needs no second field, as in sessions from before labels were free.
        if found != identity.get("framework_version"):
            identity["runtime_framework_version"] = found
        identity.setdefault("framework_version", found)
        launch = normalized_launch(launch)
    return launch


def _probed(
    launches: dict[str, dict[str, Any]],
    root: Path,
    instrumentation: str | os.PathLike[str] | None,
    executors: Executors | None,
    resume: bool,
) -> dict[str, Any]:
    if not launches:
        return {"status": "failed", "configurations": {}}
    bundle = selected_bundle(instrumentation, launches)
    if bundle is not None:
        executor = None if executors is None else lambda launch: executors(launch.plan.executor)(launch)
        return run_probe(launches, root, bundle, executor=executor, resume=resume)
    unknown = {label: launch["identity"].get("framework_version") is None for label, launch in launches.items()}
    return {
        "status": "pending_runtime_version",
        "configurations": {
            label: {
                "status": "pending_runtime_version" if is_unknown else "deferred",
                "message": _PENDING[is_unknown],
            }
            for label, is_unknown in unknown.items()
        },
    }


def _patch(state: Checkpoint, label: str, launch: Mapping[str, Any] | None, event: Mapping[str, Any]) -> dict[str, Any]:
    configuration = state.configurations[label]
    patch: dict[str, Any] = {"history": [*copy.deepcopy(configuration.history), {"event": "runtime_probe", **event}]}
    if launch is None:
        return patch
    saved = configuration.inputs.get("collection_deployment")
    stale = dict.fromkeys(saved) if isinstance(saved, dict) else {}
    inputs: dict[str, Any] = {"collection_deployment": {**stale, **launch["deployment"]}}
    version, observed = (launch["identity"].get(name) for name in ("framework_version", "runtime_framework_version"))
    drafted = configuration.draft_request.get("identity")
    known = drafted.get("framework_version") if isinstance(drafted, dict) else None
    known = known or merge_patch(state.inputs, configuration.inputs).get("framework_version")
    if version is not None and known is None:
        inputs["framework_version"] = version
    if observed is not None:
        inputs["runtime_framework_version"] = observed
    return {**patch, "inputs": inputs}
