"""Execution profiles: a qualified operator list for one phase, pinned to the graph and the data it was made with.

A profile replaces the operators of its phase and nothing else. It only holds together with the performance data that
it lists, so whoever prices with it opens the copy that `copy_retained_files` makes.
Source: fpm-model.md section 3.2.
"""

import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NoReturn

import msgspec

from fpmsdk import files
from fpmsdk.config.modes import GEMM_MODES, MOE_MODES
from fpmsdk.errors import ConfigError
from fpmsdk.opgraph import ops as kinds
from fpmsdk.opgraph.config_fields import LARGEST_COUNT
from fpmsdk.opgraph.ops import Fallback, Op, Overlap
from fpmsdk.opgraph.quantization import ACCEPTED
from fpmsdk.opgraph.spec import EngineSpec

FIELD = "estimator_config.op_level.execution_profile"
SCHEMA_VERSION = 1

_OPS = {
    name: kind
    for name, kind in vars(kinds).items()
    # What others derive from is no operator itself.
    if isinstance(kind, type) and issubclass(kind, Op) and not kind.__subclasses__()
}
_COMM_MODES = ACCEPTED["comm_quant_mode"]
_MODES = {
    "kv_cache_dtype": ACCEPTED["kvcache_quant_mode"],
    "fmha_quant_mode": ACCEPTED["fmha_quant_mode"],
    "gemm_quant_mode": GEMM_MODES,
    "moe_quant": MOE_MODES,
    "comm_quant": _COMM_MODES,
    "quant": _COMM_MODES,
    "dtype": _COMM_MODES,
    "backend": ("trtllm", "sglang", "vllm"),
    "operation": ("all_reduce", "all_gather", "reduce_scatter", "alltoall"),
}
# Counts that may be 0; all others divide something or say how much of it there is.
_MAY_BE_ZERO = ("window_size", "verify_query_tokens")
# Fields of the engine record that have no price here: any other value would be priced as this one.
_UNPRICED: dict[tuple[type[Op], str], Any] = {
    (kinds.Moe, "moe_backend"): None,
    (kinds.Moe, "enable_eplb"): False,
    (kinds.MoeDispatch, "scale_num_tokens"): 1,
    **{(kind, "dcp_size"): 1 for kind in _OPS.values() if "dcp_size" in kind.__struct_fields__},
}


class RetainedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the systems root that the profile depends on; `path` is relative to the root."""

    path: str
    sha256: str
    size_bytes: int


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema_version: int
    basis: dict[str, Any]
    worker_type: Literal["prefill", "decode"]
    ops: list[dict[str, Any]]
    retained_files: list[RetainedFile]


class ExecutionProfile(msgspec.Struct, frozen=True):
    """A checked profile: `basis` is the specification it was made for, `ops` replace those of its phase."""

    basis: dict[str, Any]
    worker_type: Literal["prefill", "decode"]
    ops: tuple[Op, ...]
    retained_files: tuple[RetainedFile, ...]


def load_execution_profile(path: str | Path, sha256: str, content: bytes | None = None) -> ExecutionProfile:
    """Read a profile and check everything that does not depend on a deployment.

    Parameters
    ----------
    sha256: the digest that the configuration pins, lower-case hexadecimal.
    content: the file, when somebody has just read it.

    Raises
    ------
    ConfigError: unreadable, not the pinned file, malformed, or with unusable operators or file names.
    """
    try:
        content = Path(path).read_bytes() if content is None else content
    except OSError as fault:
        _refuse(f"{path} cannot be read: {fault.strerror}")
    if files.sha256(content) != sha256:
        _refuse(f"{path} is not the file with the pinned SHA-256 {sha256}")
    try:
        document = msgspec.json.decode(content, type=_Document)
    except msgspec.MsgspecError as fault:
        _refuse(f"{path} is malformed: {fault}")
    if document.schema_version != SCHEMA_VERSION:
        _refuse(f"{path} has schema_version {document.schema_version}, supported is {SCHEMA_VERSION}")
    if not document.ops or not document.retained_files:
        _refuse(f"{path} must list at least one operator and one retained file")
    _check_inventory(document.retained_files)
    ops = _read_group(document.ops, "ops")
    _check_names(ops)
    return ExecutionProfile(document.basis, document.worker_type, ops, tuple(document.retained_files))


def apply_execution_profile(profile: ExecutionProfile, spec: EngineSpec, worker_type: str) -> EngineSpec:
    """The specification with the operators of the profile's phase.

    Parameters
    ----------
    spec: compiled on the retained files for the deployment of the profile.

    Raises
    ------
    ConfigError: made for another role or another specification (the first difference is named), or with
        operators that hold other weights.
    """
    if worker_type != profile.worker_type:
        _refuse(f"the profile is for worker_type {profile.worker_type!r}, the configuration asks for {worker_type!r}")
    if difference := _first_difference(_comparable(spec.to_dict()), _comparable(profile.basis)):
        _refuse(
            f"the compiled graph differs from the profile's basis at {difference}; "
            "use the configuration and the data that the profile was made with, or make the profile again"
        )
    field = "context_ops" if profile.worker_type == "prefill" else "generation_ops"
    compiled, replaced = (sum(op.weight_bytes for op in ops) for ops in (getattr(spec, field), profile.ops))
    if not math.isclose(compiled, replaced, rel_tol=1e-9):
        _refuse(f"the profile's operators hold {replaced:.0f} bytes of weights, the compiled ones {compiled:.0f}")
    return msgspec.structs.replace(spec, **{field: profile.ops})


def copy_retained_files(profile: ExecutionProfile, root: str | Path, destination: str | Path) -> None:
    """Copy the files of a profile from a systems root, checking each one.

    Parameters
    ----------
    destination: an empty directory that becomes the systems root to price from.

    Raises
    ------
    ConfigError: a file is missing, not a regular file or not the one that the profile lists.
    """
    for file in profile.retained_files:
        source = Path(root, file.path)
        try:
            if not stat.S_ISREG(os.stat(source).st_mode):
                _refuse(f"retained file {source} is not a regular file")
            content = source.read_bytes()
        except OSError as fault:
            _refuse(f"retained file {source} cannot be read: {fault.strerror}")
        if (len(content), files.sha256(content)) != (file.size_bytes, file.sha256):
            _refuse(f"retained file {source} has changed since the profile was made")
        target = Path(destination, file.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _refuse(reason: str) -> NoReturn:
    raise ConfigError(f"execution profile: {reason}", FIELD)


def _check_inventory(files: list[RetainedFile]) -> None:
    for file in files:
        path = PurePosixPath(file.path)
        if (
            not file.path
            or path.is_absolute()
            or str(path) != file.path
            or ".." in path.parts
            or path == PurePosixPath()
        ):
            _refuse(f"retained path {file.path!r} must be relative to the systems root and in its shortest form")
        if len(file.sha256) != 64 or not set(file.sha256) <= set("0123456789abcdef"):
            _refuse(f"retained file {file.path} needs a SHA-256 of 64 lower-case hexadecimal digits")
        if file.size_bytes < 0:
            _refuse(f"retained file {file.path} has a negative size")
    if len({file.path for file in files}) != len(files):
        _refuse("a retained file is listed twice")


def _read_op(document: Any, place: str) -> Op:
    if not isinstance(document, dict) or len(document) != 1:
        _refuse(f"{place} must be an object with the operator kind as its only key")
    [(name, fields)] = document.items()
    kind = _OPS.get(name)
    if kind is None or kind is Fallback:
        _refuse(f"{place}: an operator of kind {name!r} cannot be part of a profile")
    place = f"{place}.{name}"
    if isinstance(fields, dict) and (unknown := set(fields) - set(kind.__struct_fields__)):
        _refuse(f"{place} has unknown fields: {', '.join(sorted(unknown))}")
    if kind is Overlap and isinstance(fields, dict):
        if not isinstance(fields.get("name"), str):
            _refuse(f"{place}.name must be a string, found {fields.get('name')!r}")
        group_a, group_b = (_read_group(fields.get(key), f"{place}.{key}") for key in ("group_a", "group_b"))
        return Overlap(name=fields["name"], group_a=group_a, group_b=group_b)
    try:
        op: Op = msgspec.convert(fields, type=kind)
    except msgspec.ValidationError as fault:
        _refuse(f"{place}: {fault}")
    _check_values(op, place)
    return op


def _read_group(document: Any, place: str) -> tuple[Op, ...]:
    if not isinstance(document, list):
        _refuse(f"{place} must be a list of operators")
    return tuple(_read_op(op, f"{place}[{index}]") for index, op in enumerate(document))


def _check_values(op: Op, place: str) -> None:
    by_kind = MOE_MODES if isinstance(op, kinds.Moe) else GEMM_MODES
    for field in op.__struct_fields__:
        value, accepted = getattr(op, field), by_kind if field == "quant_mode" else _MODES.get(field)
        if accepted is not None and value not in accepted:
            _refuse(f"{place}.{field} {value!r} is unknown; use one of {', '.join(accepted)}")
        if isinstance(value, float) and not 0 <= value < math.inf:
            _refuse(f"{place}.{field} must be finite and not negative, found {value!r}")
        least = 0 if field in _MAY_BE_ZERO else 1
        if isinstance(value, int) and not isinstance(value, bool) and not least <= value <= LARGEST_COUNT:
            _refuse(f"{place}.{field} must be an integer from {least} to {LARGEST_COUNT}, found {value}")
        if _UNPRICED.get((type(op), field), value) != value:
            _refuse(f"{place}.{field} {value!r} has no price; leave it {_UNPRICED[type(op), field]!r}")


def _check_names(ops: tuple[Op, ...]) -> None:
    names = list(_names(ops))
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        _refuse(f"operator names must be distinct; used more than once: {', '.join(repeated)}")


def _names(ops: tuple[Op, ...]) -> Iterator[str]:
    for op in ops:
        yield op.name
        if isinstance(op, Overlap):
            yield from _names((*op.group_a, *op.group_b))


def _comparable(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A specification without the place of its data, which differs from machine to machine."""
    engine = spec.get("engine")
    return {**spec, "engine": {**engine, "systems_path": None}} if isinstance(engine, dict) else dict(spec)


def _first_difference(compiled: Any, basis: Any, place: str = "") -> str:
    """Place and values of the first difference, keys in sorted order; empty when there is none."""
    if isinstance(compiled, dict) and isinstance(basis, dict):
        for key in sorted(compiled.keys() | basis.keys()):
            inner = f"{place}.{key}" if place else key
            if key not in compiled or key not in basis:
                return f"{inner} (only in the {'basis' if key in basis else 'compiled graph'})"
            if difference := _first_difference(compiled[key], basis[key], inner):
                return difference
        return ""
    if isinstance(compiled, list) and isinstance(basis, list):
        if len(compiled) != len(basis):
            return f"{place} (compiled length {len(compiled)}, basis length {len(basis)})"
        differences = (
            _first_difference(mine, theirs, f"{place}[{index}]")
            for index, (mine, theirs) in enumerate(zip(compiled, basis, strict=True))
        )
        return next(filter(None, differences), "")
    return "" if compiled == basis else f"{place} (compiled {compiled!r}, basis {basis!r})"
