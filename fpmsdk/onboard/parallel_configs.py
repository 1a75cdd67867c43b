"""The list file of `--parallel-configs`: several workers of one model, set up at once.

Source: onboarding.md section 4.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, get_args

from fpmsdk.documents.yaml_files import read_yaml
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.choices import WorkerType
from fpmsdk.onboard.config_fields import integer
from fpmsdk.onboard.overrides import RANK_FIELDS, check_overrides
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.request_sections import TOPOLOGY_FIELDS

_FIELDS = (*TOPOLOGY_FIELDS, "worker_type", "collection", "resource_overrides")


@dataclass(frozen=True)
class ParallelEntry:
    """One worker of the list: its topology, and what it has of its own."""

    topology: dict[str, int]
    worker_type: str | None = None
    collection: dict[str, Any] = field(default_factory=dict)
    resource_overrides: dict[str, Any] = field(default_factory=dict)

    def change(self) -> dict[str, Any]:
        """What the entry replaces in a shared request."""
        role = {} if self.worker_type is None else {"worker_type": self.worker_type}
        return {"search": self.topology, "collection": self.collection, **role}


def load_parallel_configs(path: str | os.PathLike[str]) -> list[ParallelEntry]:
    """Read the list.

    Raises
    ------
    OnboardError: no such list; names the file, the entry counted from 1, and the field.
    OSError: it cannot be read.
    """
    value = read_yaml(path)
    if not isinstance(value, list) or not value:
        raise OnboardError(f"{path}: must hold a list of at least one configuration, found {value!r}", os.fspath(path))
    entries = []
    for number, entry in enumerate(value, 1):
        try:
            entries.append(_entry(entry))
        except OnboardError as fault:
            raise OnboardError(f"{path}: configuration {number}: {fault}", fault.path) from None
    return entries


def _entry(entry: Any) -> ParallelEntry:
    if not isinstance(entry, dict):
        raise OnboardError(f"must be a mapping, found {entry!r}")
    if unknown := sorted(set(entry) - set(_FIELDS)):
        raise OnboardError(f"unknown fields {', '.join(unknown)}; known are {', '.join(_FIELDS)}", unknown[0])
    if "tensor_parallel" not in entry:
        raise OnboardError("tensor_parallel is missing; state it", "tensor_parallel")
    topology = {name: integer(entry[name], name) for name in TOPOLOGY_FIELDS if name in entry}
    role = entry.get("worker_type")
    if "worker_type" in entry and role not in get_args(WorkerType):
        raise OnboardError(
            f"worker_type must be one of {', '.join(get_args(WorkerType))}, found {role!r}", "worker_type"
        )
    for name in ("collection", "resource_overrides"):
        if not isinstance(entry.get(name, {}), dict):
            raise OnboardError(f"{name} must be a mapping, found {entry[name]!r}", name)
    overrides = check_overrides(entry.get("resource_overrides", {}))
    return ParallelEntry(topology, role, dict(entry.get("collection", {})), overrides)


def check_distinct(requests: Iterable[SupportRequest]) -> None:
    """Refuse two configurations of one role and topology, whatever else differs.

    Raises
    ------
    OnboardError: names the topology.
    """
    seen = set()
    for request in requests:
        key = (request.worker_type, request.topology_sizes())
        if key in seen:
            sizes = dict(zip(TOPOLOGY_FIELDS, request.topology_sizes(), strict=True))
            raise OnboardError(f"two configurations of role {request.worker_type} and topology {sizes}; keep one")
        seen.add(key)


def check_shared(overrides: dict[str, Any], count: int) -> None:
    """Refuse bytes of one rank that several configurations would share.

    Raises
    ------
    OnboardError: names the fields.
    """
    found = sorted(name for name in (*RANK_FIELDS, "cache_groups") if name in overrides)
    if count > 1 and found:
        raise OnboardError(
            f"{', '.join(found)} belong to one configuration; put them into resource_overrides of each entry", found[0]
        )
