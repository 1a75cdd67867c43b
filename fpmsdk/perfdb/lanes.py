"""Attention lanes: in which order the kernels measured for attention may serve an operator.

A lane is one `kernel_source`. Only names and counts are looked at, never a latency.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fpmsdk.errors import PerfDataCorruptError, UnsupportedAttentionBackendError
from fpmsdk.perfdb.documents import as_mapping, read_mapping
from fpmsdk.perfdb.slices import Table
from fpmsdk.perfdb.versions import parse_version

LANE_DEFAULTS = "attention_lane_defaults.yaml"
DEFAULT_LANE = "default"
KNOWN_LANES = ("fa3", "fla", "flashinfer", "triton", "trtllm_mha")
# What a user may ask for -> the kernels it is measured under, by backend.
OVERRIDES: dict[str, dict[str, tuple[str, ...]]] = {
    "sglang": {name: (name,) for name in KNOWN_LANES},
    "vllm": {
        "triton": ("vllm_triton_attn",),
        "flashinfer": ("vllm_flashinfer_trtllmprefill", "vllm_flashinfer_trtllmdecode", "vllm_flashinfer"),
    },
}

Density = dict[str, tuple[int, int]]


def density(table: Table, *, primary_only: bool) -> Density:
    """Return slices and rows of every lane; with `primary_only` those of the requested version's own file."""
    counts = table.arrays.primary_rows if primary_only else table.arrays.offsets[1:] - table.arrays.offsets[:-1]
    found: Density = {}
    for key, rows in zip(table.slices, counts.tolist(), strict=True):
        if rows:
            slices, total = found.get(key[0], (0, 0))
            found[key[0]] = (slices + 1, total + rows)
    return found


def framework_default(
    document: Mapping[Any, Any],
    path: str,
    *,
    backend: str,
    version: str,
    sm_version: int | None,
    architecture: str | None,
) -> str | None:
    """Return the lane a framework uses by itself, or None when nothing is recorded.

    An entry for the architecture replaces the general one. The entry of the highest version not above
    `version` counts.
    """
    architectures = as_mapping(document.get("architectures"), "architectures", path)
    for scope in (as_mapping(architectures.get(architecture), str(architecture), path), document):
        lane = _floor_match(as_mapping(scope.get(backend), backend, path), version, sm_version, path)
        if lane is not None:
            return lane
    return None


def lane_order(
    table: Table | None,
    defaults_path: str,
    *,
    backend: str,
    version: str,
    sm_version: int | None,
    architecture: str | None,
    override: str | None,
) -> tuple[str, ...]:
    """Return the lanes to try, first to last.

    Parameters: `table`, the attention table, None when it has no rows; `override`, the attention backend
    asked for, None or `"default"` for the framework's own choice; `defaults_path`, the recorded choices.
    Raises: `UnsupportedAttentionBackendError` for an override without a meaning or without measurements.
    Source: op-level.md section 3.8.
    """
    everything = density(table, primary_only=False) if table else {}
    pinned: list[str] = []
    if override not in (None, DEFAULT_LANE):
        pinned += _override_lanes(backend, str(override), everything)
    try:
        document = read_mapping(defaults_path)
    except FileNotFoundError:
        document = {}
    chosen = framework_default(
        document,
        defaults_path,
        backend=backend,
        version=version,
        sm_version=sm_version,
        # Whoever names a backend does not mean what a framework would choose for one architecture.
        architecture=None if pinned else architecture,
    )
    if not pinned and chosen is None:
        return (DEFAULT_LANE,)
    if chosen not in (None, DEFAULT_LANE, *pinned):
        pinned.append(str(chosen))
    own = density(table, primary_only=True) if table else {}
    first = [lane for lane in _ranked(own, pinned) if lane in own]
    return tuple(dict.fromkeys([*pinned, *first, *_ranked(everything, pinned)]))


def defaults_file(root: str) -> str:
    """Path of the recorded framework choices in a systems root."""
    return os.path.join(root, LANE_DEFAULTS)


def _ranked(lanes: Density, pinned: list[str]) -> list[str]:
    """The five known lanes, the default, then the others; denser ones first."""

    def rank(lane: str) -> tuple[int, int, str]:
        slices, rows = lanes.get(lane, (0, 0))
        return -slices, -rows, lane

    known = sorted((lane for lane in KNOWN_LANES if lane not in pinned), key=rank)
    others = sorted((lane for lane in lanes if lane not in (*KNOWN_LANES, DEFAULT_LANE, *pinned)), key=rank)
    return [*known, DEFAULT_LANE, *others]


def _override_lanes(backend: str, override: str, measured: Density) -> tuple[str, ...]:
    offered = OVERRIDES.get(backend, {})
    if override not in offered:
        raise UnsupportedAttentionBackendError(
            f"attention_backend {override!r} does not exist for {backend}; accepted: {[*sorted(offered), DEFAULT_LANE]}"
        )
    lanes = offered[override]
    if not any(lane in measured for lane in lanes):
        raise UnsupportedAttentionBackendError(
            f"attention_backend {override!r} of {backend} has no measurements: looked for {list(lanes)}, "
            f"found {sorted(measured)}"
        )
    return lanes


def _floor_match(entries: Mapping[Any, Any], version: str, sm_version: int | None, path: str) -> str | None:
    requested = parse_version(version)
    if requested is None:
        return None
    below = [
        (parsed, text)
        for text in entries
        if (parsed := parse_version(str(text))) is not None and parsed.release <= requested.release
    ]
    if not below:
        return None
    lane = as_mapping(entries[max(below)[1]], "versions", path).get(sm_version)
    if lane is not None and lane not in (*KNOWN_LANES, DEFAULT_LANE):
        raise PerfDataCorruptError(f"{path}: lane {lane!r} is unknown; accepted: {[*KNOWN_LANES, DEFAULT_LANE]}", path)
    return lane
