"""A manifest of explicit points to measure, frozen into a plan; the engine checks what depends on it.

Source: collector.md section 1.5.
"""

from __future__ import annotations

import json
import os
from typing import Any

from fpmsdk.documents.canonical import read_document
from fpmsdk.errors import OnboardError
from fpmsdk.files import sha256

PHASES = ("prefill", "decode")
FILE_NAME = "benchmark-points.json"
RECEIPT_NAME = "point_manifest_receipt.json"


def read_points(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a JSON file.

    Returns
    -------
    `{payload, sha256}`, as it stands in the options of a plan.

    Raises
    ------
    OnboardError: no such manifest; names the file and the point.
    OSError: it cannot be read.
    """
    payload = read_document(path, follow_links=True)
    _check(payload, os.fspath(path))
    return {"payload": payload, "sha256": sha256(points_bytes(payload))}


def points_bytes(payload: Any) -> bytes:
    """The bytes that are staged beside the engine and hashed there."""
    return json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _check(payload: Any, where: str) -> None:
    def require(holds: bool, place: str, accepted: str, found: Any) -> None:
        if not holds:
            raise OnboardError(f"{where}: {place}: expected {accepted}, found {found!r}", where)

    fields = ("schema_version", *PHASES)
    require(isinstance(payload, dict) and set(payload) == set(fields), "manifest", f"the keys {fields}", payload)
    version = payload["schema_version"]
    require(type(version) is int and version in (1, 2, 3), "schema_version", "1, 2 or 3", version)
    for phase in PHASES:
        points = payload[phase]
        require(isinstance(points, list), phase, "a list", points)
        for number, point in enumerate(points):
            place = f"{phase}[{number}]"
            require(isinstance(point, dict), place, "an object", point)
            _check_point(phase, point, place, require)
    require(any(payload[phase] for phase in PHASES), "manifest", "at least one point", payload)


def _check_point(phase: str, point: dict[str, Any], place: str, require: Any) -> None:
    def whole(name: str, least: int) -> int:
        value = point.get(name)
        require(type(value) is int and value >= least, f"{place}.{name}", f"an integer of at least {least}", value)
        return value if isinstance(value, int) else 0

    batch = whole("batch_size", 1)
    kv_tokens = whole("total_kv_read_tokens", 0)
    if phase == "prefill":
        tokens = whole("total_prefill_tokens", 1)
        require(tokens >= batch, f"{place}.total_prefill_tokens", f"at least batch_size {batch}", tokens)
    else:
        none = point.get("total_prefill_tokens", 0)
        require(type(none) is int and none == 0, f"{place}.total_prefill_tokens", "0, or nothing", none)
        require(kv_tokens >= batch, f"{place}.total_kv_read_tokens", f"at least batch_size {batch}", kv_tokens)
