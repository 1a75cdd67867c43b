"""The described hardware of a system: its file in a systems root, and what onboarding reads of it.

Source: onboarding.md sections 3.3 and 4.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from fpmsdk.config.systems import HOW_TO_GET_DATA, resolve_systems_paths
from fpmsdk.errors import OnboardError, PerfDataCorruptError
from fpmsdk.files import UnfitFileError, read_regular, sha256
from fpmsdk.perfdb.hardware import SystemSpec, parse_system

_MAX_BYTES = 2**20


@dataclass(frozen=True)
class SystemFile:
    """One `<system>.yaml`: where it is, its bytes and their digest, and the hardware it describes.

    `other_mem_bytes` and `nccl_mem_bytes` are reservations of one rank, the latter by tensor-parallel size; None and
    empty where the file has none.
    """

    path: Path
    content: bytes
    sha256: str
    spec: SystemSpec
    other_mem_bytes: int | None

    @property
    def nccl_mem_bytes(self) -> dict[int, int]:
        """Communication buffers of one rank by tensor-parallel size."""
        return dict(self.spec.nccl_mem_bytes)


def find_system_file(system: str) -> SystemFile | None:
    """The description of a system in the systems roots in use; None when there is none.

    The roots are those of every other command: `FPMSDK_SYSTEMS_PATH`, else the data of an installed package.

    Parameters
    ----------
    system: a name such as `h200_sxm`.

    Raises
    ------
    OnboardError: the file is malformed; names it.
    SystemsPathError: the environment names no directory.
    """
    for root in resolve_systems_paths():
        path = Path(root) / f"{system}.yaml"
        if os.path.isfile(path):
            return _read(system, path)
    return None


def read_system_file(system: str) -> SystemFile:
    """As `find_system_file`, for callers that cannot go on without.

    Raises
    ------
    OnboardError: also when there is none; tells how to get one.
    """
    found = find_system_file(system)
    if found is None:
        roots = ", ".join(resolve_systems_paths()) or "no systems root is known"
        raise OnboardError(f"gpu: no description of system {system!r} ({roots}); {HOW_TO_GET_DATA}", "gpu")
    return found


def _read(system: str, path: Path) -> SystemFile:
    try:
        return _parsed(system, path, read_regular(path, limit_bytes=_MAX_BYTES))
    except UnfitFileError as fault:
        raise OnboardError(f"{path}: {fault}", str(path)) from None


# Every candidate topology looks at the same description.
@lru_cache(maxsize=8)
def _parsed(system: str, path: Path, content: bytes) -> SystemFile:
    try:
        document = yaml.safe_load(content)
        if not isinstance(document, dict):
            raise OnboardError(f"{path}: must hold one mapping, found {type(document).__name__}", str(path))
        spec = parse_system(system, {"misc": {}, **document}, str(path))
    except (yaml.YAMLError, PerfDataCorruptError) as fault:
        raise OnboardError(f"{path}: no description of a system: {fault}", str(path)) from None
    rack = spec.gpus_per_rack
    if rack is not None and rack % spec.gpus_per_node:
        raise OnboardError(
            f"{path}: node.num_gpus_per_rack {rack} must be a multiple of num_gpus_per_node {spec.gpus_per_node}",
            str(path),
        )
    misc: dict[str, Any] = document.get("misc") or {}
    return SystemFile(path, content, sha256(content), spec, spec.other_mem_bytes if "other_mem" in misc else None)


@dataclass(frozen=True)
class HardwareEnvelope:
    """Budget of one GPU and the GPUs that are fast neighbours; says nothing of what is available.

    Sizes in bytes and GPUs. Source: onboarding.md section 4.
    """

    system: str
    declared_interconnect: str
    source: str
    sha256: str
    per_gpu_bytes: int
    memory_budget_bytes: int
    gpus_per_node: int
    gpus_per_rack: int | None
    fast_domain: Literal["single_gpu", "node", "rack"]
    fast_domain_gpus: int
    assumption: str


_NVLINK = frozenset({"nvlink", "nvswitch", "nvlink/nvswitch", "nvlink+nvswitch", "nvlinknvswitch"})


def hardware_envelope(system: str, interconnect: str, memory_fraction: float) -> HardwareEnvelope:
    """What a worker may use of a system.

    Parameters
    ----------
    system: name of a described system.
    interconnect: as the request declares it; `none` means a single GPU.
    memory_fraction: the fraction of a GPU's memory that an engine may use.

    Raises
    ------
    OnboardError: no description, or one without a memory capacity.
    """
    file = read_system_file(system)
    spec = file.spec
    if spec.mem_capacity_bytes is None:
        raise OnboardError(f"{file.path}: gpu.mem_capacity is missing; state the bytes of one GPU", str(file.path))
    fabric = interconnect.lower().replace(" ", "").replace("-", "")
    domain: Literal["single_gpu", "node", "rack"] = "node"
    width = spec.gpus_per_node
    assumption = "one node is the fast domain; that says nothing of the GPUs that are available"
    rack_is_fast = spec.inter_node_bw_bytes_per_s >= spec.intra_node_bw_bytes_per_s
    if fabric == "none":
        domain, width = "single_gpu", 1
        assumption = "no interconnect is declared, so that only one GPU is suggested"
    elif fabric not in _NVLINK:
        assumption += f"; whether {interconnect!r} is the described fabric is not verified"
    elif spec.gpus_per_rack is not None and rack_is_fast:
        domain, width = "rack", spec.gpus_per_rack
        assumption = "one rack is the fast domain: between its nodes the described fabric is as fast as inside them"
    return HardwareEnvelope(
        system=system,
        declared_interconnect=interconnect,
        source=str(file.path),
        sha256=file.sha256,
        per_gpu_bytes=spec.mem_capacity_bytes,
        memory_budget_bytes=int(spec.mem_capacity_bytes * memory_fraction),
        gpus_per_node=spec.gpus_per_node,
        gpus_per_rack=spec.gpus_per_rack,
        fast_domain=domain,
        fast_domain_gpus=width,
        assumption=assumption,
    )
