"""The ModelOpt sidecar `hf_quant_config.json` beside a `config.json`: read on its own, and checked against it.

Its bytes are never written into the configuration; what both together say is kept under the names that quantisation
has there. Source: onboarding.md section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fpmsdk.errors import OnboardError

NAME = "hf_quant_config.json"
# Names under which the outcome is kept in the configuration in use.
OUTCOME = ("quant_algo", "quant_dynamic", "kv_cache_quant_algo")

_MIXED = "mixed_precision"
# Say how a checkpoint is packed; a sidecar may say what its algorithm is.
_CONTAINERS = frozenset({"modelopt", "compressed-tensors"})
_SPELLINGS = {
    "quant_algo": {"w4a16_mxfp4": "mxfp4", "mixed-precision": _MIXED, "mixedprecision": _MIXED},
    "kv_cache_quant_algo": {
        "e4m3": "fp8",
        "e5m2": "fp8",
        "fp16": "bfloat16",
        "float16": "bfloat16",
        "bf16": "bfloat16",
    },
}


def normalized(name: str, value: Any) -> str | None:
    """One spelling for each algorithm of weights (`quant_algo`) or of the cache (`kv_cache_quant_algo`).

    >>> normalized("kv_cache_quant_algo", "E4M3"), normalized("quant_algo", None)
    ('fp8', None)
    """
    algorithm = str(value or "").strip().lower()
    return _SPELLINGS[name].get(algorithm, algorithm) or None


def kv_scheme(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """The `kv_cache_scheme` of a quantisation as an object; empty when there is none.

    >>> kv_scheme({"kv_cache_scheme": "FP8"})
    {'num_bits': 8, 'type': 'float'}
    """
    scheme = quantization.get("kv_cache_scheme")
    if scheme is None:
        return {}
    if isinstance(scheme, str) and scheme.strip().upper() == "FP8":
        return {"num_bits": 8, "type": "float"}
    if not isinstance(scheme, dict):
        raise OnboardError(
            f"quantization_config.kv_cache_scheme must be an object or FP8, found {scheme!r}",
            "quantization_config.kv_cache_scheme",
        )
    return scheme


def scheme_dtype(quantization: Mapping[str, Any]) -> str | None:
    """The cache dtype that an 8-bit `kv_cache_scheme` stands for, None for any other.

    >>> scheme_dtype({"kv_cache_scheme": {"num_bits": 8, "type": "int"}})
    'int8'
    """
    scheme = kv_scheme(quantization)
    return {"float": "fp8", "int": "int8"}.get(scheme.get("type", "")) if scheme.get("num_bits") == 8 else None


def is_dynamic(quantization: Mapping[str, Any]) -> bool | None:
    """Whether activations are scaled while the engine runs; None when the checkpoint does not say.

    >>> is_dynamic({"activation_scheme": "static"}), is_dynamic({})
    (False, None)
    """
    scheme = str(quantization.get("activation_scheme") or "").lower()
    if scheme in ("dynamic", "static"):
        return scheme == "dynamic"
    found = [
        bool(tensor["dynamic"])
        for group in (quantization.get("config_groups") or {}).values()
        for tensor in (group.get("input_activations"), group.get("weights"))
        if isinstance(tensor, dict) and "dynamic" in tensor
    ]
    return any(found) if found else None


def attach_sidecar(config: Mapping[str, Any], sidecar: Any) -> dict[str, Any]:
    """The configuration in use, with what it and its sidecar say of quantisation under `OUTCOME`.

    Parameters
    ----------
    config: the text decoder's part of a `config.json`, its `quantization_config` checked.
    sidecar: the document beside it; only its `quantization` is read.

    Raises
    ------
    OnboardError: malformed, or the two contradict each other; names the field.
    """
    section = _section(sidecar)
    inline = config.get("quantization_config")
    own = _outcome(inline or {}, {})
    if (scheme := scheme_dtype(inline or {})) is not None:
        own.setdefault("kv_cache_quant_algo", scheme)
    merged = dict(config)
    merged["hf_quant_config"] = sidecar
    if "quantization_config" not in config and (stated := _as_quantization(section)):
        merged["quantization_config"] = stated
    outcome = _outcome(merged.get("quantization_config") or {}, section)
    if "kv_cache_quant_algo" in own:
        outcome.setdefault("kv_cache_quant_algo", own["kv_cache_quant_algo"])
    _check_agreement(config, own, outcome)
    for name, value in outcome.items():
        if merged.get(name) is None or (name == "quant_algo" and merged[name] in _CONTAINERS):
            merged[name] = value
    return merged


def _section(sidecar: Any) -> dict[str, Any]:
    if not isinstance(sidecar, dict):
        raise OnboardError(f"{NAME} must be an object, found {type(sidecar).__name__}", NAME)
    section = sidecar.get("quantization")
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise OnboardError(f"{NAME}: quantization must be an object, found {section!r}", NAME)
    for name in ("quant_algo", "quantization_algo", "kv_cache_quant_algo"):
        value = section.get(name)
        if value is not None and (not isinstance(value, str) or not value.strip()):
            raise OnboardError(f"{NAME}: quantization.{name} must be text other than blanks, found {value!r}", NAME)
    algorithms = {name: section[name] for name in ("quant_algo", "quantization_algo") if section.get(name)}
    if len({normalized("quant_algo", value) for value in algorithms.values()}) > 1:
        raise OnboardError(f"{NAME}: two algorithms that disagree: {algorithms}; keep one", NAME)
    return section


def _as_quantization(section: Mapping[str, Any]) -> dict[str, Any]:
    # A checkpoint with nothing but a sidecar.
    algorithm = section.get("quant_algo") or section.get("quantization_algo")
    stated = {"quant_method": algorithm, "kv_cache_quant_method": section.get("kv_cache_quant_algo")}
    return {name: value.lower() for name, value in stated.items() if value}


def _outcome(quantization: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    names = ("quant_algo", "quant_method", "quantization_method")
    algorithm = normalized("quant_algo", section.get("quant_algo") or _first(quantization, names))
    if algorithm == "fp8" and quantization.get("weight_block_size"):
        algorithm = "fp8_block"
    names = ("kv_cache_quant_algo", "kv_cache_quant_method", "kv_cache_dtype")
    cache = normalized("kv_cache_quant_algo", section.get("kv_cache_quant_algo") or _first(quantization, names))
    cache = cache or _scheme_algorithm(quantization.get("kv_cache_scheme"))
    outcome = {"quant_algo": algorithm, "kv_cache_quant_algo": cache, "quant_dynamic": is_dynamic(quantization)}
    return {name: value for name, value in outcome.items() if value is not None}


def _scheme_algorithm(scheme: Any) -> str | None:
    # As the collector reads a scheme, wider than what establishes a precision on its own.
    if not isinstance(scheme, dict):
        return None
    kind, bits = str(scheme.get("type", "")).lower(), scheme.get("num_bits")
    if "fp8" in kind:
        return "fp8"
    if kind != "float" or type(bits) is not int:
        return None
    return "fp8" if bits <= 8 else "bfloat16" if bits >= 16 else None


def _first(quantization: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := quantization.get(name))), None)


def _check_agreement(config: Mapping[str, Any], own: Mapping[str, Any], outcome: Mapping[str, Any]) -> None:
    for name in ("quant_algo", "kv_cache_quant_algo"):
        after = _comparable(name, outcome.get(name))
        for value in (config.get(name), own.get(name)):
            before = _comparable(name, value)
            # Containers and algorithms by layer are no single algorithm to compare.
            if before is None or after is None or before in _CONTAINERS or after in (_MIXED, before):
                continue
            raise OnboardError(
                f"{name}: config.json says {before!r} and {NAME} {after!r}; repair the one that is wrong", name
            )
    dynamic = config.get("quant_dynamic")
    if dynamic is not None and type(dynamic) is not bool:
        raise OnboardError(f"quant_dynamic must be true, false or null, found {dynamic!r}", "quant_dynamic")
    if dynamic is not None and outcome.get("quant_dynamic", dynamic) != dynamic:
        raise OnboardError("quant_dynamic contradicts the scaling of quantization_config", "quant_dynamic")


def _comparable(name: str, value: Any) -> str | None:
    algorithm = normalized(name, value)
    return "bfloat16" if name == "kv_cache_quant_algo" and algorithm == "none" else algorithm
