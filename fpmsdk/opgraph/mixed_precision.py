"""Coarse precision of a ModelOpt `MIXED_PRECISION` checkpoint, from its per-layer metadata.

One mode for all linear layers and one for all routed experts. Source: op-level.md section 4.2.
"""

from collections.abc import Iterator
from typing import Any

# Strongest claim first: the algorithm that decides when layers of a part differ, and the mode it means.
_GEMM = {"mxfp8": "fp8_block", "fp8": "fp8", "w4a16_nvfp4": "w4a16_nvfp4", "nvfp4": "nvfp4"}
_MOE = {"w4a16_nvfp4": "w4a16_nvfp4", "nvfp4": "nvfp4", "mxfp8": "fp8_block", "fp8": "fp8"}

_SPELLINGS = {"e4m3": "fp8", "e5m2": "fp8", "fp4": "nvfp4"}
_ALGORITHM_KEYS = ("quant_algo", "quantization_algo", "quant_method")


def mixed_precision_weights(config: dict[str, Any], sidecar: dict[str, Any]) -> tuple[str, str]:
    """Modes of linear layers and of routed experts, empty where no layer says anything.

    `fp8` means per-tensor FP8, static or dynamic. A base method of the whole checkpoint wins over its layers.

    >>> mixed_precision_weights({}, {"quantized_layers": {"model.layers.0.mlp.experts.0": {"quant_algo": "NVFP4"}}})
    ('', 'nvfp4')
    """
    gemm: set[str] = set()
    moe: set[str] = set()
    for target, algorithm in _layers(config, sidecar):
        (moe if _is_routed_expert(target) else gemm).add(algorithm)
    if str(config.get("quant_method", "")).lower() == "fp8":
        return ("fp8_block" if config.get("weight_block_size") else "fp8"), _first(_MOE, moe)
    return _first(_GEMM, gemm), _first(_MOE, moe)


def _first(modes: dict[str, str], algorithms: set[str]) -> str:
    return next((mode for algorithm, mode in modes.items() if algorithm in algorithms), "")


def _layers(config: dict[str, Any], sidecar: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for source in (sidecar, config):
        layers = source.get("quantized_layers")
        for target, entry in layers.items() if isinstance(layers, dict) else ():
            if algorithm := _algorithm(entry):
                yield str(target), algorithm
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict) and (algorithm := _group_algorithm(group.get("weights"))):
            for target in group.get("targets") or ():
                yield str(target), algorithm


def _algorithm(entry: Any) -> str:
    if isinstance(entry, dict):
        entry = next((value for key in _ALGORITHM_KEYS if (value := entry.get(key))), "")
    name = str(entry or "").strip().lower()
    return _SPELLINGS.get(name, name)


def _group_algorithm(weights: Any) -> str:
    if not isinstance(weights, dict):
        return ""
    if named := _algorithm(weights):
        return named
    if "float" not in str(weights.get("type", "")).lower():
        return ""
    if weights.get("num_bits") == 8:
        # Scales shared by 32 elements are the microscaling format.
        return "mxfp8" if weights.get("group_size") == 32 else "fp8"
    return "nvfp4" if weights.get("num_bits") == 4 else ""


def _is_routed_expert(target: str) -> bool:
    name = target.lower()
    if "shared_expert" in name:
        return False
    return ".experts." in name or name.endswith(".experts") or "routing_expert" in name
