"""Where and in which container a campaign runs: the deployment-only inputs, and the warm-up switches of the engine.

Source: collector.md section 1.1.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from fpmsdk.documents.canonical import digest
from fpmsdk.errors import OnboardError

SECTION = "K8sConfig"
# A release label of the runtime; it selects nothing and is no part of the identity of a campaign.
DYNAMO_VERSION = "generator_dynamo_version"
ACCEPTED = frozenset(
    (
        "k8s_namespace",
        "k8s_image",
        "k8s_image_pull_secret",
        "transport",
        "k8s_pvc_name",
        "k8s_pvc_mount_path",
        "k8s_model_path_in_pvc",
        "k8s_hf_home",
        "worker_extra_pod_spec",
        "fpm_shared_memory_size",
        "fpm_resource_labels",
        "fpm_orchestrator",
        "extra_env",
    )
)
_CHOICES = {"transport": ("nvlink", "ib", "efa"), "fpm_orchestrator": ("lws", "grove")}

# Real cache contents for decode, real prefixes for prefill: what a serving engine would have.
WARM_UP = {"DYN_BENCH_KV_WARMUP": "on", "DYN_BENCH_PREFILL_REAL_SEED": "on"}
_SWITCHES = ("on", "1", "true", "off", "0", "false")
OFF = ("off", "0", "false")


def with_warm_up(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with the warm-up switches that are not declared turned on.

    Raises
    ------
    OnboardError: a declared switch is no on/off, 1/0 or true/false string.

    Example
    -------
    >>> [entry["value"] for entry in with_warm_up({})["K8sConfig"]["extra_env"]]
    ['on', 'on']
    """
    resolved = copy.deepcopy(dict(inputs))
    section = resolved.setdefault(SECTION, {})
    declared = {entry["name"]: entry.get("value") for entry in section.get("extra_env") or ()}
    for name in WARM_UP:
        value = declared.get(name, "on")
        if not isinstance(value, str) or value.lower() not in _SWITCHES:
            raise OnboardError(
                f"{SECTION}.extra_env: {name} must be one of the words {', '.join(_SWITCHES)}, found {value!r}",
                f"{SECTION}.extra_env",
            )
    missing = [{"name": name, "value": value} for name, value in WARM_UP.items() if name not in declared]
    section["extra_env"] = [*(section.get("extra_env") or ()), *missing]
    return resolved


def deployment_digest(inputs: Mapping[str, Any]) -> str:
    """Digest of the inputs that decide how the engine runs, warm-up switches included, release label excluded.

    >>> deployment_digest({})
    'a46acf1d7947d60fa633fade5e98a9e3fa517a74e2a4768d8fddc58f16122be5'
    """
    resolved = with_warm_up(inputs)
    resolved.pop(DYNAMO_VERSION, None)
    return digest(resolved)


def check_inputs(inputs: Any, where: str = "generator config") -> dict[str, Any]:
    """Deployment inputs that hold nothing else than what a campaign accepts.

    Raises
    ------
    OnboardError: an unknown section or key, or a value of the wrong form; names `where` and the key.
    """
    if not isinstance(inputs, dict):
        raise OnboardError(f"{where}: expected a mapping, found {type(inputs).__name__}", where)
    unknown = sorted(set(inputs) - {SECTION, DYNAMO_VERSION})
    if unknown:
        raise OnboardError(f"{where}: {', '.join(map(str, unknown))}: only {SECTION} is accepted here", where)
    section = inputs.get(SECTION, {})
    if not isinstance(section, dict):
        raise OnboardError(f"{where}: {SECTION}: expected a mapping, found {section!r}", where)
    unknown = sorted(map(str, set(section) - ACCEPTED))
    if unknown:
        raise OnboardError(
            f"{where}: {SECTION}.{', '.join(unknown)}: the collector decides this, or it is unknown; accepted are "
            f"{', '.join(sorted(ACCEPTED))}",
            where,
        )
    for name, accepted in _CHOICES.items():
        if name in section and section[name] not in accepted:
            raise OnboardError(
                f"{where}: {SECTION}.{name}: use {' or '.join(accepted)}, found {section[name]!r}", where
            )
    environment = section.get("extra_env")
    if environment is not None and not (
        isinstance(environment, list)
        and all(
            isinstance(entry, dict) and isinstance(entry.get("name"), str) and "value" in entry for entry in environment
        )
    ):
        raise OnboardError(f"{where}: {SECTION}.extra_env: expected a list of {{name, value}}", where)
    model_in_volume(section)
    return inputs


def model_in_volume(section: Mapping[str, Any]) -> str | None:
    """The path of the checkpoint inside the container when it is in a mounted volume, else None.

    Raises
    ------
    OnboardError: mount path or path in the volume alone, or one that leads out of the volume.
    """
    mount, path = section.get("k8s_pvc_mount_path"), section.get("k8s_model_path_in_pvc")
    if mount is None and path is None:
        return None
    if not mount or not path:
        raise OnboardError(
            f"{SECTION}: k8s_pvc_mount_path and k8s_model_path_in_pvc come together; set both or none",
            f"{SECTION}.k8s_pvc_mount_path",
        )
    relative = PurePosixPath(str(path))
    if relative.is_absolute() or ".." in relative.parts:
        raise OnboardError(
            f"{SECTION}.k8s_model_path_in_pvc: expected a path inside the volume without '..', found {path!r}",
            f"{SECTION}.k8s_model_path_in_pvc",
        )
    return str(PurePosixPath(str(mount)) / relative)


def read_inputs(
    config: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    *,
    namespace: str | None = None,
    model_cache: str | None = None,
    transport: str | None = None,
    orchestrator: str | None = None,
    image_pull_secret: str | None = None,
    dynamo_version: str | None = None,
) -> dict[str, Any]:
    """Deployment inputs of a YAML file, of `KEY=VALUE` words and of single options; later ones win.

    Parameters
    ----------
    config: a YAML file with the section `K8sConfig`.
    overrides: dotted `K8sConfig.key=value` words; the value is YAML.
    model_cache: `NAME[:MOUNT[:SUBPATH]]` of a volume with the checkpoint.

    Raises
    ------
    OnboardError: as `check_inputs`, and for malformed words. OSError: the file cannot be read.
    """
    import yaml

    inputs: dict[str, Any] = {}
    if config is not None:
        try:
            with open(config, encoding="utf-8") as file:
                inputs = yaml.safe_load(file) or {}
        except yaml.YAMLError as fault:
            raise OnboardError(f"{config}: invalid YAML: {fault}", os.fspath(config)) from None
        check_inputs(inputs, os.fspath(config))
    for word in overrides:
        inputs = merged(inputs, _override(word))
    section = {
        "k8s_namespace": namespace,
        "transport": transport,
        "fpm_orchestrator": orchestrator,
        "k8s_image_pull_secret": image_pull_secret,
        **_volume(model_cache),
    }
    section = {name: value for name, value in section.items() if value}
    if section:
        inputs = merged(inputs, {SECTION: section})
    if dynamo_version:
        inputs = {**inputs, DYNAMO_VERSION: dynamo_version}
    return check_inputs(inputs)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping laid over another one, key by key at every depth."""
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        result[name] = merged(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return copy.deepcopy(result)


def _override(word: str) -> dict[str, Any]:
    import yaml

    path, sign, text = word.partition("=")
    keys = path.split(".")
    if not sign or not all(keys):
        raise OnboardError(f"--generator-set: expected {SECTION}.key=value, found {word!r}", "generator_set")
    try:
        value: Any = yaml.safe_load(text)
    except yaml.YAMLError as fault:
        raise OnboardError(f"--generator-set {path}: invalid YAML: {fault}", "generator_set") from None
    for key in reversed(keys):
        value = {key: value}
    return dict(value)


def _volume(model_cache: str | None) -> dict[str, str]:
    if model_cache is None:
        return {}
    parts = model_cache.split(":")
    if not parts[0] or len(parts) > 3:
        raise OnboardError(f"--model-cache: expected NAME[:MOUNT[:SUBPATH]], found {model_cache!r}", "model_cache")
    names = ("k8s_pvc_name", "k8s_pvc_mount_path", "k8s_model_path_in_pvc")
    return {name: part for name, part in zip(names, parts, strict=False) if part}
