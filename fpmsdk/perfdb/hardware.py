"""Hardware description of one system: `<system>.yaml` of a systems root, with units in the field names.

Only facts of the machine; no latency formula.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from fpmsdk.perfdb.documents import ill_formed

# Compute dtype -> key of the `gpu` section.
TENSOR_CORE_KEYS = {
    "bf16": "bfloat16_tc_flops",
    "int8": "int8_tc_flops",
    "fp8": "fp8_tc_flops",
    "fp4": "fp4_tc_flops",
}


class SystemSpec(Struct, frozen=True):
    """Hardware of one system. Bandwidths are per GPU and, between GPUs, one direction.

    `tc_flops` maps the compute dtypes bf16, int8, fp8 and fp4 to FLOP/s and holds only supported ones.
    Source: op-level.md section 1.1.

    >>> import tempfile
    >>> from fpmsdk.perfdb import open_root
    >>> from fpmsdk.sample.tiny import write_systems
    >>> root = open_root(write_systems(tempfile.mkdtemp()))
    >>> spec = root.spec("tiny_gpu")
    >>> spec.mem_bw_bytes_per_s, spec.tc_flops["bf16"], spec.gpus_per_node
    (1000000000000.0, 100000000000000.0, 8)
    """

    name: str
    data_dir: str
    mem_bw_bytes_per_s: float
    mem_bw_scaling_factor: float
    mem_constant_latency_s: float
    mem_capacity_bytes: int | None
    tc_flops: Mapping[str, float]
    fp32_flops: float | None
    power_w: float | None
    sm_version: int | None
    gpus_per_node: int
    inter_node_bw_bytes_per_s: float
    intra_node_bw_bytes_per_s: float
    pcie_bw_bytes_per_s: float | None
    p2p_latency_s: float
    gpus_per_rack: int | None
    inter_rack_bw_bytes_per_s: float | None
    nccl_mem_bytes: Mapping[int, int]
    other_mem_bytes: int
    nccl_version: str | None
    oneccl_version: str | None

    def p2p_bandwidth(self, gpus: int) -> float:
        """Return the point-to-point bandwidth in bytes/s inside a group of `gpus` GPUs.

        Source: op-level.md section 3.4.

        >>> import tempfile
        >>> from fpmsdk.perfdb import open_root
        >>> from fpmsdk.sample.tiny import write_systems
        >>> root = open_root(write_systems(tempfile.mkdtemp()))
        >>> root.spec("tiny_gpu").p2p_bandwidth(8), root.spec("tiny_gpu").p2p_bandwidth(16)
        (450000000000.0, 50000000000.0)
        """
        if gpus <= self.gpus_per_node:
            return self.intra_node_bw_bytes_per_s
        if self.gpus_per_rack is None or gpus <= self.gpus_per_rack or self.inter_rack_bw_bytes_per_s is None:
            return self.inter_node_bw_bytes_per_s
        return self.inter_rack_bw_bytes_per_s


def parse_system(name: str, document: Mapping[Any, Any], path: str) -> SystemSpec:
    """Return the description held by a hardware document; `path` only serves messages.

    Raises: `PerfDataCorruptError` naming the key, for a missing, ill-typed or impossible value.
    """
    gpu, node, misc = (_Section(document, section, path) for section in ("gpu", "node", "misc"))
    data_dir = document.get("data_dir")
    if not isinstance(data_dir, str) or not data_dir or "\0" in data_dir:
        raise ill_formed(path, "data_dir", data_dir, "the directory of this system's measurements")
    flops = {dtype: gpu.number(key, 0.0) for dtype, key in TENSOR_CORE_KEYS.items()}
    return SystemSpec(
        name=name,
        data_dir=data_dir,
        mem_bw_bytes_per_s=gpu.positive("mem_bw"),
        mem_bw_scaling_factor=gpu.positive("mem_bw_empirical_scaling_factor", 1.0),
        mem_constant_latency_s=gpu.not_negative("mem_empirical_constant_latency", 0.0),
        mem_capacity_bytes=gpu.optional_count("mem_capacity"),
        tc_flops={dtype: value for dtype, value in flops.items() if value > 0},
        fp32_flops=gpu.optional_positive("fp32_flops"),
        power_w=gpu.optional_positive("power"),
        sm_version=gpu.optional_count("sm_version"),
        gpus_per_node=node.count("num_gpus_per_node"),
        inter_node_bw_bytes_per_s=node.positive("inter_node_bw"),
        intra_node_bw_bytes_per_s=node.positive("intra_node_bw"),
        pcie_bw_bytes_per_s=node.optional_positive("pcie_bw"),
        p2p_latency_s=node.not_negative("p2p_latency", 0.0),
        gpus_per_rack=node.optional_count("num_gpus_per_rack"),
        inter_rack_bw_bytes_per_s=node.optional_positive("inter_rack_bw"),
        nccl_mem_bytes=misc.bytes_by_ranks("nccl_mem"),
        other_mem_bytes=misc.count("other_mem", least=0, default=0),
        nccl_version=misc.text("nccl_version"),
        oneccl_version=misc.text("oneccl_version"),
    )


class _Section:
    """One mapping of the document, with typed access that names the key in errors."""

    def __init__(self, document: Mapping[Any, Any], name: str, path: str) -> None:
        values = document.get(name)
        if not isinstance(values, Mapping):
            raise ill_formed(path, name, values, "a mapping")
        self._values, self._name, self._path = values, name, path

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key)
        if value is None:
            value = default
        # YAML 1.1 reads `3e-6`, which has no dot, as a string.
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = float(value)
        # Integers are unbounded, floats are not.
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1000:
            value = float(value)
        if not isinstance(value, float) or not math.isfinite(value):
            raise ill_formed(self._path, f"{self._name}.{key}", value, "a finite number")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise ill_formed(self._path, f"{self._name}.{key}", value, "a positive number")
        return value

    def not_negative(self, key: str, default: float) -> float:
        value = self.number(key, default)
        if value < 0:
            raise ill_formed(self._path, f"{self._name}.{key}", value, "a number not below 0")
        return value

    def count(self, key: str, *, least: int = 1, default: int | None = None) -> int:
        value = self.number(key, default)
        if value < least or not value.is_integer():
            raise ill_formed(self._path, f"{self._name}.{key}", value, f"an integer not below {least}")
        return int(value)

    def optional_positive(self, key: str) -> float | None:
        return None if self._values.get(key) is None else self.positive(key)

    def optional_count(self, key: str) -> int | None:
        return None if self._values.get(key) is None else self.count(key)

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        # A number has lost its form: 2.30 reads as 2.3.
        if value is not None and not isinstance(value, str):
            raise ill_formed(self._path, f"{self._name}.{key}", value, "text; put it in quotes")
        return value

    def bytes_by_ranks(self, key: str) -> dict[int, int]:
        table = self._values.get(key) or {}
        if not isinstance(table, Mapping):
            raise ill_formed(self._path, f"{self._name}.{key}", table, "a mapping from ranks to bytes")
        for ranks, size in table.items():
            if type(ranks) is not int or type(size) is not int or ranks < 1 or size < 0:
                raise ill_formed(
                    self._path, f"{self._name}.{key}", table, "a mapping from ranks to bytes, both integers"
                )
        return dict(table)
