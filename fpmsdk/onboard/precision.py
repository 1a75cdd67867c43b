"""Which precisions a checkpoint's files establish, each with its source; what they do not is asked for.

Precision of attention never follows from that of weights. Source: onboarding.md section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fpmsdk.errors import OnboardError
from fpmsdk.onboard.config_fields import dtype, integer, text
from fpmsdk.onboard.sidecar import is_dynamic, kv_scheme, normalized, scheme_dtype
from fpmsdk.opgraph.mixed_precision import mixed_precision_weights
from fpmsdk.opgraph.precision import compressed_weights

Facts = dict[str, tuple[str, str]]

_ASSUMED = "assumption: bfloat16 tensors without quantisation metadata; tensors are not looked into, verify"
_LABEL = "quantisation label of config.json; exclusions and scales are not told by it"
_WITH_SIDECAR = "config.json and its ModelOpt sidecar; exclusions and scales are not told by it"
_CACHE = "explicit cache metadata of the checkpoint, independent of its weights"
_CACHE_DTYPES = {"fp8": "fp8", "bfloat16": "bfloat16", "none": "bfloat16"}


def check_quantization(config: Mapping[str, Any]) -> None:
    """Refuse a `quantization_config` of another form than inference relies on.

    Raises
    ------
    OnboardError: names the field.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    where = "quantization_config"
    if not isinstance(quantization, dict):
        raise OnboardError(f"{where} must be an object, found {quantization!r}", where)
    for name in ("quant_method", "quant_algo", "activation_scheme"):
        if name in quantization:
            text(quantization[name], f"{where}.{name}")
    algorithm = quantization.get("quant_algo")
    if quantization.get("quant_method") == "fp8" and algorithm not in (None, "FP8"):
        raise OnboardError(f"{where}: quant_method fp8 contradicts quant_algo {algorithm}", f"{where}.quant_algo")
    block = quantization.get("weight_block_size")
    if block is not None:
        if not isinstance(block, list) or len(block) != 2:
            raise OnboardError(f"{where}.weight_block_size must be two integers, found {block!r}", where)
        for size in block:
            integer(size, f"{where}.weight_block_size")
    for name in ("ignore", "modules_to_not_convert"):
        modules = quantization.get(name, [])
        if not isinstance(modules, list):
            raise OnboardError(f"{where}.{name} must be a list of module names, found {modules!r}", where)
        for module in modules:
            text(module, f"{where}.{name}")
    _check_groups(quantization.get("config_groups"), f"{where}.config_groups")
    scheme = kv_scheme(quantization)
    if scheme.get("type") is not None:
        text(scheme["type"], f"{where}.kv_cache_scheme.type")
    _check_tensor(scheme, f"{where}.kv_cache_scheme")


def _check_groups(groups: Any, where: str) -> None:
    if groups is None:
        return
    if not isinstance(groups, dict):
        raise OnboardError(f"{where} must be an object, found {groups!r}", where)
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise OnboardError(f"{where}.{name} must be an object, found {group!r}", where)
        for part in ("input_activations", "weights"):
            tensor = group.get(part)
            if tensor is not None and not isinstance(tensor, dict):
                raise OnboardError(f"{where}.{name}.{part} must be an object, found {tensor!r}", where)
            _check_tensor(tensor or {}, f"{where}.{name}.{part}")


def _check_tensor(tensor: Mapping[str, Any], where: str) -> None:
    if "num_bits" in tensor:
        integer(tensor["num_bits"], f"{where}.num_bits")
    if "dynamic" in tensor and type(tensor["dynamic"]) is not bool:
        raise OnboardError(f"{where}.dynamic must be true or false, found {tensor['dynamic']!r}", where)


def precision_facts(config: Mapping[str, Any], *, has_sidecar: bool) -> Facts:
    """Modes of weights and cache that the checkpoint's files establish, with the source of each.

    Parameters
    ----------
    config: the configuration in use, as from `attach_sidecar` where there is one.

    Returns
    -------
    By field of a deployment profile: mode name, source. What is absent is not established.

    >>> precision_facts({"dtype": "bfloat16"}, has_sidecar=False)["moe_quant_mode"][0]
    'bfloat16'
    """
    quantization = config.get("quantization_config")
    if has_sidecar:
        weights, source = _algorithm_weights(config), _WITH_SIDECAR
    elif quantization is None:
        # Metadata of another kind is no proof of plain weights.
        unknown = config.get("hf_quant_config") is not None or config.get("quant_algo") is not None
        plain = not unknown and dtype(config) == "bfloat16"
        weights, source = ("bfloat16", "bfloat16") if plain else (None, None), _ASSUMED
    else:
        weights, source = _labelled_weights(quantization), _LABEL
    facts: Facts = {
        name: (mode, source)
        for name, mode in zip(("gemm_quant_mode", "moe_quant_mode"), weights, strict=True)
        if mode is not None
    }
    stated = config.get("kv_cache_quant_algo") if has_sidecar else (quantization or {}).get("kv_cache_quant_algo")
    cache = _CACHE_DTYPES.get(normalized("kv_cache_quant_algo", stated) or "") or scheme_dtype(quantization or {})
    return facts | ({} if cache is None else {"kv_cache_dtype": (cache, _CACHE)})


Weights = tuple[str | None, str | None]


def _labelled_weights(quantization: Mapping[str, Any]) -> Weights:
    """Modes of linear layers and experts of a quantisation without a sidecar."""
    method = str(quantization.get("quant_method", "")).lower()
    algorithm = str(quantization.get("quant_algo", method)).lower()
    if algorithm == "nvfp4" and method in ("nvfp4", "modelopt", ""):
        return "nvfp4", "nvfp4"
    if algorithm != "fp8" or method not in ("fp8", "modelopt", ""):
        return None, None
    block = quantization.get("weight_block_size")
    if block:
        return ("fp8_block", "fp8_block") if block == [128, 128] else (None, None)
    if quantization.get("activation_scheme") not in (None, "static", "dynamic"):
        return None, "fp8"
    return _per_tensor(is_dynamic(quantization)), "fp8"


def _algorithm_weights(config: Mapping[str, Any]) -> Weights:
    """The same of a checkpoint with a sidecar, as the collector classifies it."""
    quantization = config.get("quantization_config") or {}
    section = config["hf_quant_config"].get("quantization") or {}
    per_tensor = _per_tensor(config.get("quant_dynamic"))
    match config.get("quant_algo"):
        case "fp8":
            gemm, moe = per_tensor, "fp8"
        case "fp8_block" | "nvfp4" as algorithm:
            gemm, moe = algorithm, algorithm
        case "mxfp4":
            gemm, moe = "bfloat16", "w4a16_mxfp4"
        case "mixed_precision":
            gemm, moe = mixed_precision_weights(quantization, section)
            gemm = per_tensor if gemm == "fp8" else gemm
        case "compressed-tensors":
            base, attention, experts = compressed_weights(quantization)
            gemm, moe = "" if attention else base, "" if experts else base
        case _:
            return None, None
    if _has_fp4_experts(config) and moe != "nvfp4":
        moe = "w4a8_mxfp4_mxfp8"
    return gemm or None, moe or None


def _per_tensor(dynamic: bool | None) -> str:
    return "fp8" if dynamic is True else "fp8_static"


def _has_fp4_experts(config: Mapping[str, Any]) -> bool:
    # Its experts are in another format than the label says.
    named = config.get("architectures") or [None]
    return named[0] == "DeepseekV4ForCausalLM" and str(config.get("expert_dtype", "")).lower() == "fp4"
