"""What the archived launch files of a cell asked of the engine; they are read as text and never run.

Source: collector.md section 7.2.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from fpmsdk.documents.canonical import digest, read_document
from fpmsdk.errors import CollectionError, OnboardError

if TYPE_CHECKING:
    from fpmsdk.collect.plan import CollectionPlan

OVERRIDES_FILE = "generator-overrides.json"
REQUEST_FILE = "generator-request.json"
SCRIPT_FILE = "run.sh"
MANIFEST_FILE = "k8s_deploy.yaml"
ENVIRONMENT_FILES = ("fpm_env.sh", "collector-runtime-env.sh")

_COMMAND = re.compile(r"^engine_command=\((.*)\)$", re.MULTILINE)
_ENGINE = ["python3", "-m", "dynamo.vllm"]


class MissingLaunchError(CollectionError):
    """The launch files cannot say what was asked of the engine; nothing contradicts the plan."""


def launch_flags(plan: CollectionPlan, cell_dir: Path) -> dict[str, str | bool]:
    """Flags of the engine command that a cell was launched with, in the order in which each was last given.

    Parameters
    ----------
    plan: the plan whose deployment inputs and model the launch must be of.
    cell_dir: `cells/<cell_id>` of a campaign.

    Returns
    -------
    The text that follows each flag; True for a flag without one.

    Raises
    ------
    MissingLaunchError: a file is absent, or holds no literal command.
    CollectionError: the files are of other deployment inputs or another model.

    Source: collector.md section 7.2.
    """
    try:
        for name in ENVIRONMENT_FILES:
            (cell_dir / name).read_bytes()
        overrides = _object(cell_dir.parent.parent / OVERRIDES_FILE)
        request = _object(cell_dir / REQUEST_FILE)
        script = (cell_dir / SCRIPT_FILE).read_text()
    except FileNotFoundError as error:
        raise MissingLaunchError(f"launch file {error.filename} is missing") from error
    except OnboardError as error:
        raise CollectionError(str(error)) from None
    model = _mounted_model(plan, overrides)
    service = request.get("ServiceConfig")
    if not isinstance(service, dict) or service.get("model_path") != model:
        raise CollectionError(
            f"{cell_dir / REQUEST_FILE}: ServiceConfig.model_path must be {model!r}, of the plan and its mount"
        )
    commands = _COMMAND.findall(script)
    if len(commands) != 1:
        raise MissingLaunchError(f"{SCRIPT_FILE} holds {len(commands)} literal engine commands instead of one")
    words = shlex.split(commands[0])
    if words[: len(_ENGINE)] != _ENGINE:
        raise MissingLaunchError(f"{SCRIPT_FILE} starts {' '.join(words[:3])} instead of {' '.join(_ENGINE)}")
    flags = _flags(words)
    launched = flags.get("--model")
    if isinstance(launched, str) and not is_literal(launched):
        raise MissingLaunchError(f"{SCRIPT_FILE}: --model is expanded by the shell")
    if launched != model:
        raise CollectionError(f"{cell_dir / SCRIPT_FILE}: --model must be {model!r}, found {launched!r}")
    return flags


def launched_nodes(cell_dir: Path) -> int:
    """Units that the launch manifest of a cell schedules: 1 of a Pod, else the size of its only group.

    Raises
    ------
    MissingLaunchError: there is no manifest.
    CollectionError: it holds no one workload of a known kind and size.
    """
    import yaml

    path = cell_dir / MANIFEST_FILE
    try:
        documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
    except FileNotFoundError as error:
        raise MissingLaunchError(f"launch file {error.filename} is missing") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CollectionError(f"{path}: expected YAML: {' '.join(str(error).split())}") from None
    sizes = [size for size in map(_nodes_of, documents) if size is not None]
    if len(sizes) != 1 or sizes[0] < 1:
        raise CollectionError(f"{path}: expected one Pod, LeaderWorkerSet or PodCliqueSet with a positive size")
    return sizes[0]


def _nodes_of(document: Any) -> int | None:
    # None of another kind of object; 0 of a workload that does not say its size.
    kind = document.get("kind") if isinstance(document, dict) else None
    if kind == "Pod":
        return 1
    if kind not in ("LeaderWorkerSet", "PodCliqueSet"):
        return None
    try:
        spec = document["spec"]
        if kind == "LeaderWorkerSet":
            sizes = [spec["leaderWorkerTemplate"]["size"]]
        else:
            sizes = [clique["spec"]["replicas"] for clique in spec["template"]["cliques"]]
        is_known = spec["replicas"] == 1 and all(type(size) is int and size >= 1 for size in sizes)
    except (KeyError, TypeError):
        return 0
    return sum(sizes) if is_known else 0


def launched_model(plan: CollectionPlan, cell_dir: Path) -> str | None:
    """The model that the launch files name; None when they do not say, or contradict the plan."""
    try:
        return str(launch_flags(plan, cell_dir)["--model"])
    except (CollectionError, OSError, ValueError):
        return None


def is_literal(value: str) -> bool:
    """Whether a shell would hand on a text as it stands.

    >>> is_literal("8192"), is_literal("$TOKENS")
    (True, False)
    """
    return "$" not in value and "`" not in value


def requested_choice(flags: dict[str, str | bool], name: str) -> bool | None:
    """What `--name` and `--no-name` ask for; the last of them counts, None when there is neither.

    >>> requested_choice({"--no-async-scheduling": True}, "async-scheduling")
    False
    """
    given = [flag == f"--{name}" for flag in flags if flag in (f"--{name}", f"--no-{name}")]
    return given[-1] if given else None


def same_deployment(plan: CollectionPlan, overrides: dict[str, Any]) -> bool:
    """Whether archived deployment inputs are those of a plan; a Dynamo label in them does not count.

    Older plans counted it; both digests are accepted.
    """
    plain = {name: value for name, value in overrides.items() if name != "generator_dynamo_version"}
    return plan.document["generator_config_sha256"] in (digest(plain), digest(overrides))


def _object(path: Path) -> dict[str, Any]:
    document = read_document(path)
    if not isinstance(document, dict):
        raise CollectionError(f"{path}: expected an object")
    return document


def _mounted_model(plan: CollectionPlan, overrides: dict[str, Any]) -> str:
    mount = overrides.get("K8sConfig", {})
    if not isinstance(mount, dict):
        raise CollectionError(f"{OVERRIDES_FILE}: K8sConfig must be an object")
    if not same_deployment(plan, overrides):
        raise CollectionError(f"{OVERRIDES_FILE}: the archived deployment inputs are not those of the plan")
    inside = mount.get("k8s_model_path_in_pvc")
    if not inside:
        return plan.model_path
    if not mount.get("k8s_pvc_mount_path"):
        raise CollectionError(f"{OVERRIDES_FILE}: the checkpoint mount names no path inside the container")
    return str(PurePosixPath(mount["k8s_pvc_mount_path"]) / inside)


def _flags(words: list[str]) -> dict[str, str | bool]:
    flags: dict[str, str | bool] = {}
    for at, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, separator, value = word.partition("=")
        flags.pop(name, None)  # the order is that of the last mention
        following = words[at + 1] if at + 1 < len(words) else "--"
        flags[name] = value if separator else True if following.startswith("--") else following
    return flags
