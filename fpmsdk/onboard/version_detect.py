"""Which versions of the engine and of Dynamo an image holds, read in it without a model or a GPU.

Source: onboarding.md section 11 (detection).
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from pydantic import Field

from fpmsdk.collect.fake_launch import VERSION as FAKE_VERSION
from fpmsdk.documents.canonical import parse_document
from fpmsdk.documents.strict import StrictDocument, checked
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.deployment import CollectionDeployment

ENGINE_PACKAGE, DYNAMO_PACKAGE = "vllm", "ai-dynamo"
FAKE_DEFAULT = "0.27.0"

_MARKER = "FPMSDK_RUNTIME_VERSION="
_SCRIPT = f"""\
import json
from importlib.metadata import PackageNotFoundError, version
found = {{"backend_version": version("{ENGINE_PACKAGE}")}}
try:
    found["dynamo_version"] = version("{DYNAMO_PACKAGE}")
except PackageNotFoundError:
    pass
print("{_MARKER}" + json.dumps(found))
"""
_COMMAND_TIMEOUT_S = 300
_POD_DEADLINE_S = 240

# Runs a command with its standard input and returns its standard output.
Runner = Callable[[Sequence[str], str | None], str]


class RuntimeVersions(StrictDocument):
    """What an image holds. `backend_version` is the package version of the engine.

    >>> RuntimeVersions(backend_version="0.27.0").document()
    {'backend_version': '0.27.0'}
    """

    backend_version: Annotated[str, Field(pattern=r"^\S+$")]
    dynamo_version: Annotated[str, Field(pattern=r"^\S+$")] | None = None

    def document(self) -> dict[str, Any]:
        """The plain JSON object, without what was not found."""
        return self.model_dump(mode="json", exclude_none=True)


def detect_versions(
    deployment: CollectionDeployment, *, run: Runner | None = None, environment: Mapping[str, str] = os.environ
) -> RuntimeVersions:
    """Read the versions where the collection will run.

    Parameters
    ----------
    deployment: names the executor; `kubernetes` and `slurm` also need the image.
    run: runs a command; the real one by default.
    environment: of this process.

    Returns
    -------
    The versions. `local` reads the packages of this environment, `fake` what the fake engine is told to report.

    Raises
    ------
    OnboardError: no image, no allocation, the command failed, or it told no version.
    """
    if deployment.executor == "fake":
        return RuntimeVersions(backend_version=environment.get(FAKE_VERSION, FAKE_DEFAULT))
    if deployment.executor == "local":
        return _installed()
    if deployment.image is None:
        raise OnboardError(
            "--image: the version of the engine is read in the image that the collection runs in; name it", "--image"
        )
    run = run or _run
    if deployment.executor == "slurm":
        return _told(_in_slurm(deployment, run, environment))
    return _told(_in_kubernetes(deployment, run))


def _installed() -> RuntimeVersions:
    try:
        dynamo: str | None = version(DYNAMO_PACKAGE)
    except PackageNotFoundError:
        dynamo = None
    try:
        return RuntimeVersions(backend_version=version(ENGINE_PACKAGE), dynamo_version=dynamo)
    except PackageNotFoundError:
        raise OnboardError(
            f"--executor local: {ENGINE_PACKAGE} is not installed in this environment; install the engine, or use "
            "another executor",
            "--executor",
        ) from None


def _in_slurm(deployment: CollectionDeployment, run: Runner, environment: Mapping[str, str]) -> str:
    if not environment.get("SLURM_JOB_ID"):
        raise OnboardError(
            "--executor slurm: needs an allocation of your own; start inside sbatch or salloc (no SLURM_JOB_ID found)",
            "--executor",
        )
    command = ["srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--gpus=0", "--overlap"]
    command.append(f"--container-image={deployment.image}")
    if deployment.container_mount:
        command.append(f"--container-mounts={','.join(deployment.container_mount)}")
    return run([*command, "python3", "-c", _SCRIPT], None)


def _in_kubernetes(deployment: CollectionDeployment, run: Runner) -> str:
    """Run the script in a pod of its own, which is deleted whatever happens."""
    name, namespace = f"ais-fpm-version-{uuid.uuid4().hex[:12]}", deployment.namespace or "default"
    kubectl = ["kubectl", "--namespace", namespace]
    run([*kubectl, "create", "-f", "-"], json.dumps(_pod(name, namespace, deployment)))
    try:
        # Success and failure both end it.
        ended = "--for=jsonpath={.status.containerStatuses[0].state.terminated.exitCode}"
        try:
            run([*kubectl, "wait", f"pod/{name}", ended, f"--timeout={_POD_DEADLINE_S}s"], None)
        except OnboardError as fault:
            status = _pod_status(run, kubectl, name)
            raise OnboardError(f"{fault}{'; pod status: ' if status else ''}{status}", "--image") from None
        output = run([*kubectl, "logs", name], None)
        code = _exit_code(run([*kubectl, "get", "pod", name, "-o", "json"], None))
        if code != 0:
            raise _failed(f"the pod ended with exit code {code}: {output.strip()}")
        return output
    finally:
        run([*kubectl, "delete", "pod", name, "--ignore-not-found", "--wait=false"], None)


def _pod(name: str, namespace: str, deployment: CollectionDeployment) -> dict[str, Any]:
    container = {
        "name": "version",
        "image": deployment.image,
        "command": ["python3", "-c", _SCRIPT],
        "resources": {"requests": {"cpu": "1", "memory": "128Mi"}},
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": _POD_DEADLINE_S,
        "containers": [container],
    }
    if deployment.image_pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": deployment.image_pull_secret}]
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _pod_status(run: Runner, kubectl: list[str], name: str) -> str:
    """Why a pod does not end, as far as Kubernetes says; empty when it says nothing."""
    try:
        status = json.loads(run([*kubectl, "get", "pod", name, "-o", "json"], None))["status"]
        waiting = [item.get("state", {}).get("waiting", {}) for item in status.get("containerStatuses", [])]
        unmet = [item for item in status.get("conditions", []) if item.get("status") == "False"]
        told = [": ".join(item[key] for key in ("reason", "message") if item.get(key)) for item in waiting + unmet]
    except (OnboardError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    return "; ".join(filter(None, told))


def _exit_code(pod: str) -> Any:
    try:
        return json.loads(pod)["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise _failed("Kubernetes does not tell the exit code of the pod") from None


def _told(output: str) -> RuntimeVersions:
    lines = [line.removeprefix(_MARKER) for line in output.splitlines() if line.startswith(_MARKER)]
    if len(lines) != 1:
        raise _failed(f"the image told {len(lines)} versions of {ENGINE_PACKAGE}, expected one; nothing is assumed")
    return checked(RuntimeVersions, parse_document(lines[0].encode(), "runtime version"), "runtime version")


def _run(command: Sequence[str], text: str | None) -> str:
    try:
        ended = subprocess.run(
            command, input=text, text=True, capture_output=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise _failed(str(fault)) from None
    if ended.returncode != 0:
        raise _failed((ended.stderr or ended.stdout).strip() or f"{command[0]} ended with {ended.returncode}")
    return ended.stdout


def _failed(reason: str) -> OnboardError:
    return OnboardError(f"--image: detecting the version of the engine in the image failed: {reason}", "--image")
