"""What a valid configuration names and this machine does not have, told before anything is written.

Source: predict-recommend.md sections 12.1 and 15 (rows 6 to 9).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fpmsdk.errors import FpmSdkError, SystemsPathError, UnlistedVersionError, UnsupportedModelError
from fpmsdk.prediction.compile.timing import timing_config
from fpmsdk.prediction.config import DefaultTiming, PredictConfig, TraceSource
from fpmsdk.prediction.documents import SourceDocument
from fpmsdk.prediction.suggestions import closest

if TYPE_CHECKING:
    from fpmsdk.perfdb.roots import SystemsRoot

# Modes that read performance data; the others know the hardware by name only.
_ON_DATA = ("auto", "op_level", "fpm_interpolation")
_HARDWARE, _VERSION, _MODEL = ("engine", "hardware"), ("engine", "backend_version"), ("engine", "model")


def checked_config(document: SourceDocument) -> PredictConfig:
    """The configuration of a document, whose trace, hardware, version and model exist.

    Raises
    ------
    OnboardError: a faulty field, or one that names what is not there; with file and line, and what there is.

    Source: predict-recommend.md section 12.1.

    >>> from fpmsdk.prediction.documents import read_document
    >>> trace = {"source": {"type": "trace", "paths": ["/no/such.jsonl"]}, "load": {"type": "trace_timestamps"}}
    >>> checked_config(read_document({"traffic": trace, "engine": {"model": "org/m", "hardware": "h200_sxm"}}))
    Traceback (most recent call last):
        ...
    fpmsdk.errors.OnboardError: configuration: traffic.source.paths[0]: no such file /no/such.jsonl; a relative path \
is below the folder of the configuration, after `cwd:` below the working directory
    """
    config = document.checked(PredictConfig)
    _check_trace(config, document)
    for role in config.roles:
        if config.engine.fpm_profile is not None:
            _check_profile(config, role, document)
        if _reads_data(config, role):
            _check_data(config, role, document)
    return config


def _check_trace(config: PredictConfig, document: SourceDocument) -> None:
    source = config.traffic.source
    if not isinstance(source, TraceSource):
        return
    for i, path in enumerate(source.paths):
        if not os.path.isfile(path):
            raise document.fault(
                ("traffic", "source", "paths", i),
                f"no such file {path}; a relative path is below the folder of the configuration, after `cwd:` below "
                "the working directory",
            )


def _check_profile(config: PredictConfig, role: str, document: SourceDocument) -> None:
    """Whether the profile was measured on this hardware, with this version."""
    profile = config.engine.fpm_profile
    deployments = profile.get("deployments") if profile is not None else None
    if not isinstance(deployments, list) or not all(isinstance(item, Mapping) for item in deployments):
        return  # the profile is no profile, which its own reader says better
    system, version = config.roles[role].hardware or config.engine.hardware, config.engine.backend_version
    measured_on = {str(item.get("system")) for item in deployments}
    if system not in measured_on:
        raise document.fault(_hardware_place(config, role), _unknown("hardware", system, measured_on, "fpm_profile"))
    versions = {str(item.get("backend_version")) for item in deployments if item.get("system") == system}
    if version not in versions:
        raise document.fault(_VERSION, _unknown("version", version or "null", versions, "fpm_profile"))


def _reads_data(config: PredictConfig, role: str) -> bool:
    """Whether the role is priced or sized by the data of a systems root."""
    worker, asked = config.roles[role], timing_config(config, role)
    options = asked.get("estimator_config") or {}
    if config.engine.fpm_profile is not None or "state_snapshot" in options:
        return False
    if not isinstance(worker.timing, DefaultTiming):
        return worker.kv_cache.num_blocks is None
    has_table = "fpm_parquet_path" in (options.get("fpm_interpolation") or {})
    return asked.get("estimation_mode", "auto") in _ON_DATA and not has_table


def _check_data(config: PredictConfig, role: str, document: SourceDocument) -> None:
    asked = timing_config(config, role)
    roots = _roots(asked, document)
    system, backend, version = asked["system"], asked["backend"], asked.get("backend_version")
    holding = [root for root in roots if system in root.systems()]
    if not holding:
        known = {name for root in roots for name in root.systems()}
        where = ", ".join(root.path for root in roots)
        raise document.fault(_hardware_place(config, role), _unknown("hardware", system, known, where))
    reasons = [reason for root in holding if (reason := _version_fault(root, system, backend, version)) is not None]
    if len(reasons) == len(holding):
        raise document.fault(_VERSION, reasons[0])
    _check_model(asked["model"], roots, document)


def _roots(asked: Mapping[str, Any], document: SourceDocument) -> list[SystemsRoot]:
    from fpmsdk.config.systems import HOW_TO_GET_DATA, resolve_systems_paths
    from fpmsdk.perfdb.roots import open_root

    try:
        paths = resolve_systems_paths(asked.get("systems_paths") or ())
    except SystemsPathError as fault:
        raise document.fault(("engine", "systems_paths"), str(fault)) from None
    if not paths:
        raise document.fault(_HARDWARE, f"no performance data on this machine; {HOW_TO_GET_DATA}")
    return [open_root(path) for path in paths]


def _version_fault(root: SystemsRoot, system: str, backend: str, version: str | None) -> str | None:
    """Why a root cannot serve this version; None when it can, or when only its reader can say more."""
    try:
        resolved = root.resolve_version(system, backend, version).version
        present = root.tree(system).versions(backend)
    except UnlistedVersionError as fault:
        return str(fault)
    except FpmSdkError:
        return None
    if not present:
        return f"no data of backend {backend} on {system} in {root.path}{_others(root, system)}"
    if resolved is None or resolved in present or root.slots(system, backend) is not None:
        return None
    return _unknown("version", resolved, set(present), root.path)


def _others(root: SystemsRoot, system: str) -> str:
    held = [backend for backend in ("vllm", "sglang", "trtllm") if root.tree(system).versions(backend)]
    return f"; there are data of {', '.join(held)}" if held else ""


def _check_model(model: str, roots: Sequence[SystemsRoot], document: SourceDocument) -> None:
    from fpmsdk.opgraph.model_config import find_model_config

    try:
        file, _ = find_model_config(
            model, [os.path.join(os.path.dirname(root.path), "model_configs") for root in roots]
        )
    except UnsupportedModelError as fault:
        raise document.fault(_MODEL, f"model not found: {fault}; give the folder of the checkpoint") from None
    if not file.is_file():
        raise document.fault(_MODEL, f"model not found: there is no {file}")


def _hardware_place(config: PredictConfig, role: str) -> tuple[str, ...]:
    own = config.roles[role].hardware is not None
    return ("engine", "workers", role, "hardware") if own else _HARDWARE


def _unknown(kind: str, found: str, known: Collection[str], where: str) -> str:
    return f"unknown {kind} {found!r}{closest(found, known)}; {where} has {', '.join(_some(sorted(known))) or 'none'}"


def _some(names: Sequence[str], limit: int = 20) -> Iterator[str]:
    yield from names[:limit]
    if len(names) > limit:
        yield f"and {len(names) - limit} more"
