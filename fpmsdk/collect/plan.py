"""The frozen plan of a campaign: a document with a digest over everything that decides what is measured.

What goes into a new plan is decided in `fpmsdk.collect.planner`.
Source: collector.md section 1.6.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from fpmsdk.collect.cells import Cell
from fpmsdk.collect.topology import Topology
from fpmsdk.config.profile import DeploymentProfile, FpmModelProfile, load_fpm_profile
from fpmsdk.config.profile_identity import select_deployment
from fpmsdk.documents.canonical import digest, read_document
from fpmsdk.errors import ConfigError, OnboardError

SCHEMA_NAME = "aic_fpm_collection_plan"
SCHEMA_VERSION = 11
_READABLE = (10, 11)

_HASHED = (
    "backend",
    "model_path",
    "system",
    "aic_revision",
    "generator_config_sha256",
    "options",
    "capability",
    "dtype_profile",
    "cells",
)
_HASHED_WHEN_PRESENT = (
    "fpm_profile",
    "runtime_memory_policy",
    "runtime_observation",
    "runtime_backend_version",
    "backend_version",
)


class CollectionPlan:
    """A frozen plan. Its document is read, never changed.

    Attributes
    ----------
    document: the whole JSON document.
    cells: the cells, in the order in which they run.
    """

    def __init__(self, document: dict[str, Any], cells: tuple[Cell, ...]) -> None:
        self.document = document
        self.cells = cells

    @classmethod
    def from_document(cls, document: Any, where: str = "collection plan") -> CollectionPlan:
        """Read a saved plan of schema 10 or 11 and verify its digest; nothing of it is looked up anew.

        Parameters
        ----------
        document: the JSON value.
        where: the file it was read from, for the message.

        Raises
        ------
        OnboardError: no such plan, an unknown schema, a cell that no plan writes, or another digest than it states.
        """
        if not isinstance(document, dict) or document.get("schema_name") != SCHEMA_NAME:
            raise OnboardError(f"{where}: no {SCHEMA_NAME} document", where)
        version = document.get("schema_version")
        if type(version) is not int or version not in _READABLE:
            raise OnboardError(f"{where}: schema_version: accepted are 10 and 11, found {version!r}", where)
        cells = _cells(document, version, where)
        found = plan_digest(document, where)
        if found != document.get("sha256"):
            raise OnboardError(
                f"{where}: sha256: the content has {found}, the document states {document.get('sha256')!r}; restore "
                "the file, or plan again",
                where,
            )
        return cls(document, cells)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> CollectionPlan:
        """Read `collection-plan.json`. Raises as `from_document`, and `OSError` when it cannot be read."""
        return cls.from_document(read_document(path), os.fspath(path))

    @property
    def sha256(self) -> str:
        """Digest of everything that decides what is measured."""
        return str(self.document["sha256"])

    @property
    def schema_version(self) -> int:
        """10 or 11."""
        return int(self.document["schema_version"])

    @property
    def backend(self) -> str:
        """The engine."""
        return str(self.document["backend"])

    @property
    def model_path(self) -> str:
        """The public name of the model."""
        return str(self.document["model_path"])

    @property
    def system(self) -> str:
        """The name of the GPU system."""
        return str(self.document["system"])

    @property
    def options(self) -> dict[str, Any]:
        """What was asked for."""
        return dict(self.document["options"])

    @property
    def capability(self) -> dict[str, Any]:
        """What the model's configuration says about it."""
        return dict(self.document["capability"])

    @property
    def label(self) -> str:
        """The version under which measurements are published when no runtime version is asked for."""
        return str(self.document["capability"]["aic_database_version"])

    @property
    def backend_version(self) -> str | None:
        """The version label that was asked for."""
        return self.document.get("backend_version")

    @property
    def runtime_backend_version(self) -> str | None:
        """The version of the engine that was observed before planning."""
        return self.document.get("runtime_backend_version")

    @property
    def runtime_observation(self) -> dict[str, Any] | None:
        """The instrumentation that the campaign runs with, and the launch facts it must reproduce."""
        return self.document.get("runtime_observation")

    @property
    def runtime_memory_policy(self) -> dict[str, Any] | None:
        """Who observes the memory of the engine."""
        return self.document.get("runtime_memory_policy")

    @property
    def fpm_profile(self) -> dict[str, Any] | None:
        """The profile of the model, as a document."""
        return self.document.get("fpm_profile")

    @cached_property
    def profile(self) -> FpmModelProfile | None:
        """The profile of the model."""
        return None if self.fpm_profile is None else load_fpm_profile(self.fpm_profile)

    @property
    def worker_type(self) -> str | None:
        """The serving role that is measured, or None."""
        role: str | None = self.document["options"].get("worker_type")
        return role

    @property
    def executor(self) -> str:
        """The transport; plans of schema 10 name none and ran on Kubernetes."""
        return str(self.document["options"].get("executor", "kubernetes"))

    @property
    def benchmark_points(self) -> dict[str, Any] | None:
        """`{payload, sha256}` of an explicit manifest of points, or None."""
        points: dict[str, Any] | None = self.document["options"].get("benchmark_points")
        return points

    def cell(self, cell_id: str) -> Cell:
        """The cell of a name.

        Raises
        ------
        OnboardError: the plan has no such cell.
        """
        if cell_id not in self._by_id:
            raise OnboardError(f"cell {cell_id!r} is not in the plan {self.sha256}", "cell_id")
        return self._by_id[cell_id]

    @cached_property
    def _by_id(self) -> dict[str, Cell]:
        return {cell.cell_id: cell for cell in self.cells}

    def deployment(self, topology: Topology) -> DeploymentProfile | None:
        """The profile's record for a topology of this campaign; None without a profile.

        Raises
        ------
        OnboardError: the profile has no such record.
        """
        if self.profile is None:
            return None
        asked = {
            "model": self.model_path,
            "system": self.system,
            "backend": self.backend,
            "backend_version": self.label,
            "tp": topology.tp,
            "pp": topology.pp,
            "attention_dp": topology.dp,
            "moe_tp_size": topology.moe_tp,
            "moe_ep_size": topology.moe_ep,
            "worker_type": self.worker_type or "aggregated",
        }
        try:
            return select_deployment(self.profile, asked)
        except ConfigError as fault:
            raise OnboardError(str(fault), fault.path) from None


def plan_digest(document: Mapping[str, Any], where: str = "collection plan") -> str:
    """The digest that identifies a plan: no free text, so that equal campaigns have equal digests on every host.

    Raises
    ------
    OnboardError: a part of the plan is missing; names it.
    """
    try:
        hashed = {name: document[name] for name in _HASHED}
        hashed["point_generation"] = "dynamo_native_self_benchmark"
        hashed["policies"] = document["backend_policies"]
        hashed["topologies"] = [{axis: entry[axis] for axis in Topology._fields} for entry in document["topologies"]]
        hashed["topology_memory_admission"] = [
            _without_reasons(entry) for entry in document["topology_memory_admission"]
        ]
    except (KeyError, TypeError, AttributeError) as fault:
        raise OnboardError(f"{where}: incomplete or malformed: {type(fault).__name__} {fault}", where) from None
    hashed |= {name: document[name] for name in _HASHED_WHEN_PRESENT if name in document}
    return digest(hashed)


def _without_reasons(admission: Mapping[str, Any]) -> dict[str, Any]:
    # Reasons quote errors of this host; what was decided is hashed, not how it was worded.
    kept = {name: value for name, value in admission.items() if name != "reason"}
    if "estimates" in kept:
        kept["estimates"] = [
            {name: value for name, value in entry.items() if name != "reason"} for entry in kept["estimates"]
        ]
    return kept


def _cells(document: Mapping[str, Any], version: int, where: str) -> tuple[Cell, ...]:
    entries = document.get("cells")
    if not isinstance(entries, list) or not entries:
        raise OnboardError(f"{where}: cells: expected at least one, found {entries!r}", where)
    cells = tuple(Cell.from_document(entry, f"{where}: cells[{place}]") for place, entry in enumerate(entries))
    for place, cell in enumerate(cells):
        if (cell.execution_identity is not None) != (version == SCHEMA_VERSION):
            raise OnboardError(
                f"{where}: cells[{place}]: execution_identity and input_text_sha256 belong to schema 11 alone",
                where,
            )
    names = [cell.cell_id for cell in cells]
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise OnboardError(f"{where}: cells: cell_id must be unique, repeated are {', '.join(repeated)}", where)
    return cells
