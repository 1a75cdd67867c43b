"""Quantisation modes: bytes per element, the tensor-core pipeline that runs them, and their names on the wire.

Constants only; which mode a checkpoint uses is decided in `precision.py`. Source: op-level.md sections 1.5 and 4.5.
"""

from typing import NamedTuple

from fpmsdk.config.modes import COMM_MODES, FMHA_MODES, GEMM_MODES, KV_CACHE_MODES, MOE_MODES
from fpmsdk.errors import ConfigError


class QuantMode(NamedTuple):
    """What a mode costs: storage of one element and the `<compute>_tc_flops` that its products use."""

    bytes_per_element: float
    compute: str


MODES = {
    "bfloat16": QuantMode(2, "bfloat16"),
    "int8_wo": QuantMode(1, "bfloat16"),
    "int4_wo": QuantMode(0.5, "bfloat16"),
    "fp8": QuantMode(1, "fp8"),
    "fp8_static": QuantMode(1, "fp8"),
    "fp8_block": QuantMode(1, "fp8"),
    "fp8_ootb": QuantMode(1, "fp8"),
    "sq": QuantMode(1, "int8"),
    "nvfp4": QuantMode(9 / 16, "fp4"),
    "nvfp4_wo": QuantMode(9 / 16, "bfloat16"),
    "w4a16_nvfp4": QuantMode(9 / 16, "bfloat16"),
    "w4a16_mxfp4": QuantMode(0.5, "bfloat16"),
    "w4a16_mxfp4_cutlass": QuantMode(0.5, "bfloat16"),
    "w4a16_mxfp4_humming": QuantMode(0.5, "bfloat16"),
    "w4afp8": QuantMode(0.5, "fp8"),
    "w4a8_mxfp4_mxfp8": QuantMode(0.5, "fp8"),
    "w4a8_mxfp4_mxfp8_trtllm": QuantMode(0.5, "fp8"),
}

# Caches and messages are stored, never multiplied: they have no compute pipeline.
CACHE_BYTES = {"bfloat16": 2, "int8": 1, "fp8": 1}
COMM_BYTES = {"half": 2, "int8": 1, "fp8": 1}

# Accepted names of each field of a configuration.
ACCEPTED = {
    "gemm_quant_mode": GEMM_MODES,
    "moe_quant_mode": MOE_MODES,
    "fmha_quant_mode": FMHA_MODES,
    "kvcache_quant_mode": KV_CACHE_MODES,
    "comm_quant_mode": COMM_MODES,
}

_GEMM_WIRE = {"int8_wo": "int8", "sq": "int8", "int4_wo": "int4", "fp8_ootb": "fp8", "nvfp4_wo": None}
_MOE_WIRE = {"int4_wo": "int4", "nvfp4_wo": None}


def check_mode(field: str, name: str) -> str:
    """Return `name` when the configuration field takes it.

    Raises `ConfigError` with the accepted names otherwise.

    >>> check_mode("kvcache_quant_mode", "fp8")
    'fp8'
    """
    accepted = ACCEPTED[field]
    if name not in accepted:
        raise ConfigError(f"{field} {name!r} is unknown; use one of {', '.join(accepted)}", field)
    return name


def gemm_wire_name(name: str) -> str | None:
    """Name of a GEMM mode in the engine record, where storage-equal modes share one and some have none.

    >>> gemm_wire_name("sq"), gemm_wire_name("fp8_block")
    ('int8', 'fp8_block')
    """
    return _GEMM_WIRE.get(name, name)


def moe_wire_name(name: str) -> str | None:
    """Name of a MoE mode in the engine record.

    >>> moe_wire_name("int4_wo"), moe_wire_name("w4a16_mxfp4")
    ('int4', 'w4a16_mxfp4')
    """
    return _MOE_WIRE.get(name, name)
