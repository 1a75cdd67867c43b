"""Which precision each part of a checkpoint runs in: explicit wishes, checkpoint metadata, then defaults.

Decides on mode names only; what a mode costs is in `quantization.py`. Source: op-level.md section 4.2.
"""

import re
from typing import Any, NamedTuple, Protocol

from fpmsdk.config.modes import GEMM_MODES, MOE_MODES
from fpmsdk.errors import UnsupportedModelError
from fpmsdk.opgraph.architectures import DEEPSEEK, GEMMA4
from fpmsdk.opgraph.deployment import Deployment
from fpmsdk.opgraph.mixed_precision import mixed_precision_weights
from fpmsdk.opgraph.model_config import ModelConfig
from fpmsdk.opgraph.quantization import check_mode

BF16, FP8, FP8_BLOCK, FP8_STATIC, NVFP4 = "bfloat16", "fp8", "fp8_block", "fp8_static", "nvfp4"


class Precision(NamedTuple):
    """Mode names of a graph.

    `attention_bf16` holds the groups (`q`, `kv`, `o`) of attention projections that the checkpoint keeps unquantised,
    `shared_experts` and `experts` the modes in which the experts run; `moe` is the mode that identifies the deployment.

    Source: op-level.md section 4.2.

    >>> Precision(gemm="fp8", kv_cache="fp8").fmha
    'bfloat16'
    """

    gemm: str = BF16
    moe: str = BF16
    fmha: str = BF16
    kv_cache: str = BF16
    comm: str = "half"
    experts: str = BF16
    shared_experts: str = BF16
    attention_bf16: frozenset[str] = frozenset()


class CheckpointMetadata(Protocol):
    """What precision is inferred from: sections of `config.json` and its sidecar, and whether there are experts."""

    @property
    def quantization(self) -> dict[str, Any]: ...  # noqa: D102
    @property
    def sidecar(self) -> dict[str, Any]: ...  # noqa: D102
    @property
    def is_moe(self) -> bool: ...  # noqa: D102


class CheckpointPrecision(NamedTuple):
    """The modes that a checkpoint declares, with bfloat16 where it says nothing."""

    gemm: str = BF16
    moe: str = BF16
    fmha: str = BF16
    kv_cache: str = BF16


def infer_precision(model: ModelConfig, deployment: Deployment) -> Precision:
    """Return the precisions of a model in a deployment: wishes of the deployment, then what the checkpoint declares.

    Parameters
    ----------
    model: result of `read_model_config`.
    deployment: its `*_quant_mode` fields are the wishes.

    Raises
    ------
    ConfigError: a requested mode is unknown; the accepted ones are named.
    UnsupportedModelError: the checkpoint declares an algorithm that no mode stands for.

    Source: op-level.md section 4.2.

    >>> import tempfile
    >>> from fpmsdk.opgraph import read_model_config
    >>> from fpmsdk.sample.tiny import write_checkpoint
    >>> model = read_model_config(write_checkpoint(tempfile.mkdtemp()))
    >>> wishes = Deployment(system="h200_sxm", backend="vllm", kvcache_quant_mode="fp8")
    >>> infer_precision(model, wishes)[:4]
    ('bfloat16', 'bfloat16', 'bfloat16', 'fp8')
    """
    inferred = checkpoint_precision(model)
    gemm = _chosen(deployment, "gemm_quant_mode", inferred.gemm)
    fmha = inferred.fmha
    if deployment.backend == "vllm" or _runs_mla_in_bf16(model, deployment):
        fmha = BF16
    moe = _chosen(deployment, "moe_quant_mode", inferred.moe)
    precision = Precision(
        gemm=gemm,
        moe=moe,
        fmha=_chosen(deployment, "fmha_quant_mode", fmha),
        kv_cache=_chosen(deployment, "kvcache_quant_mode", inferred.kv_cache),
        comm=_chosen(deployment, "comm_quant_mode", "half"),
        experts=moe,
        shared_experts=gemm,
    )
    return _with_exclusions(precision, model, explicit=deployment.gemm_quant_mode is not None)


def _with_exclusions(precision: Precision, model: ModelConfig, *, explicit: bool) -> Precision:
    """The precision with the parts in bfloat16 that the checkpoint excludes from quantisation.

    An explicit mode for linear layers overrides what it says of shared experts, and in Gemma 4 all of it.
    """
    patterns = [pattern.lower() for pattern in _exclusion_patterns(model)]
    if model.family == DEEPSEEK:
        shared = BF16 if not explicit and any("shared_expert" in pattern for pattern in patterns) else precision.gemm
        projections = _excluded_projections(_exclusion_patterns(model))
        return precision._replace(attention_bf16=projections, shared_experts=shared)
    if model.family != GEMMA4 or explicit:
        return precision
    if any("self_attn" in pattern for pattern in patterns):
        precision = precision._replace(attention_bf16=frozenset(_PROJECTIONS))
    if any(".mlp" in pattern for pattern in patterns):
        precision = precision._replace(shared_experts=BF16, experts=BF16)
    return precision


def _chosen(deployment: Deployment, field: str, inferred: str) -> str:
    requested: str | None = getattr(deployment, field)
    return inferred if requested is None else check_mode(field, requested)


def _runs_mla_in_bf16(model: ModelConfig, deployment: Deployment) -> bool:
    """SGLang 0.5.14 on SM 90 runs latent attention of bfloat16 checkpoints in bfloat16, whatever the cache holds."""
    return (
        (deployment.backend, deployment.backend_version, deployment.sm_version) == ("sglang", "0.5.14", 90)
        and deployment.attention_backend in (None, "fa3")
        and model.architecture == "DeepseekV3ForCausalLM"
        and (model.kv_lora_rank, model.qk_rope_head_dim, model.dtype) == (512, 64, BF16)
    )


def checkpoint_precision(model: CheckpointMetadata) -> CheckpointPrecision:
    """The precision of a checkpoint of any architecture, from its metadata alone.

    Raises
    ------
    UnsupportedModelError: it declares an algorithm that no mode stands for.
    """
    algorithm = quant_algorithm(model)
    cache = kv_cache_algorithm(model)
    gemm, moe = _weights(model, algorithm)
    if cache == "none":
        # Explicitly unquantised: the cache decides for attention as well, whatever the weights are.
        return CheckpointPrecision(gemm, moe)
    if algorithm in (FP8, FP8_BLOCK, NVFP4) or (algorithm and cache == FP8):
        return CheckpointPrecision(gemm, moe, fmha=FP8, kv_cache=FP8)
    return CheckpointPrecision(gemm, moe, kv_cache=cache or BF16)


def quant_algorithm(model: CheckpointMetadata) -> str:
    """The checkpoint's quantisation algorithm in lower case, `fp8_block` for block-scaled FP8, empty when it has none.

    The sidecar wins over `quantization_config`.
    """
    config, sidecar = model.quantization, model.sidecar
    named = sidecar.get("quant_algo") or next(
        (value for key in ("quant_algo", "quant_method", "quantization_method") if (value := config.get(key))), ""
    )
    if not named and not config:
        named = sidecar.get("quantization_algo") or ""
    algorithm = str(named).strip().lower()
    algorithm = {"w4a16_mxfp4": "mxfp4", "mixed-precision": "mixed_precision", "mixedprecision": "mixed_precision"}.get(
        algorithm, algorithm
    )
    if algorithm == FP8 and config.get("weight_block_size"):
        return FP8_BLOCK
    return algorithm


def kv_cache_algorithm(model: CheckpointMetadata) -> str:
    """What the checkpoint says of its KV cache: `fp8`, `bfloat16`, `none` for explicitly unquantised, or empty.

    A null or empty entry counts as missing.

    Raises
    ------
    UnsupportedModelError: any other algorithm.
    """
    config = model.quantization
    named = model.sidecar.get("kv_cache_quant_algo") or next(
        (
            value
            for key in ("kv_cache_quant_algo", "kv_cache_quant_method", "kv_cache_dtype")
            if (value := config.get(key))
        ),
        "",
    )
    algorithm = str(named).strip().lower()
    if not algorithm:
        return _cache_scheme(config.get("kv_cache_scheme"))
    if algorithm == "none":
        return algorithm
    if algorithm in (FP8, "e4m3", "e5m2"):
        return FP8
    if algorithm in ("fp16", "float16", "bf16", BF16):
        return BF16
    raise UnsupportedModelError(
        f"unsupported kv cache algorithm {algorithm!r} in the checkpoint's quantisation; "
        "known are fp8, e4m3, e5m2, fp16, float16, bf16, bfloat16 and none",
        "kvcache_quant_mode",
    )


def _cache_scheme(scheme: Any) -> str:
    if not isinstance(scheme, dict):
        return ""
    kind, bits = str(scheme.get("type", "")).lower(), scheme.get("num_bits")
    if FP8 in kind:
        return FP8
    if kind != "float" or not isinstance(bits, int):
        return ""
    if bits <= 8:
        return FP8
    return BF16 if bits >= 16 else ""


def _weights(model: CheckpointMetadata, algorithm: str) -> tuple[str, str]:
    """GEMM and MoE modes of an algorithm."""
    match algorithm:
        case "":
            return BF16, BF16
        case "fp8":
            return _per_tensor_fp8(model), FP8
        case "fp8_block" | "nvfp4":
            return algorithm, algorithm
        case "mxfp4":
            return BF16, "w4a16_mxfp4"
        case "compressed-tensors":
            return _compressed_tensors(model)
        case "mixed_precision":
            gemm, moe = mixed_precision_weights(model.quantization, model.sidecar)
            return {"": BF16, FP8: _per_tensor_fp8(model)}.get(gemm, gemm), moe or BF16
    raise UnsupportedModelError(
        f"unsupported quantisation algorithm {algorithm!r} in the checkpoint; "
        "known are fp8, fp8_block, nvfp4, mxfp4, compressed-tensors and mixed_precision",
        "gemm_quant_mode",
    )


def _per_tensor_fp8(model: CheckpointMetadata) -> str:
    """Static unless the checkpoint says that activations are scaled dynamically."""
    return FP8 if _is_dynamic(model.quantization) else FP8_STATIC


def _is_dynamic(config: dict[str, Any]) -> bool:
    scheme = str(config.get("activation_scheme", "")).lower()
    if scheme in ("dynamic", "static"):
        return scheme == "dynamic"
    return any(
        bool(item.get("dynamic"))
        for group in _groups(config)
        for key in ("input_activations", "weights")
        if isinstance(item := group.get(key), dict)
    )


def _groups(config: dict[str, Any]) -> list[dict[str, Any]]:
    groups = config.get("config_groups")
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _compressed_tensors(model: CheckpointMetadata) -> tuple[str, str]:
    named, attention, experts = compressed_weights(model.quantization)
    base = named or BF16
    gemm = BF16 if attention else base
    # A dense model has no experts, but the engine record names their mode where there is one.
    moe = BF16 if experts or not (model.is_moe or base in MOE_MODES) else base
    for mode, modes, part in ((gemm, GEMM_MODES, "linear layers"), (moe, MOE_MODES, "experts")):
        if mode not in modes:
            raise UnsupportedModelError(
                f"the checkpoint quantises its {part} as {mode}, which has no performance model"
            )
    return gemm, moe


def compressed_weights(config: dict[str, Any]) -> tuple[str, bool, bool]:
    """What a `compressed-tensors` configuration quantises its weights to, empty when it does not say; and whether it
    leaves out attention projections, and routed experts.

    Source: op-level.md section 4.2.

    >>> compressed_weights({"config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}, "ignore": ["lm_head"]})
    ('int4_wo', False, False)
    """
    base = next(filter(None, map(_compressed_base, _groups(config))), "")
    ignored = [str(pattern).lower() for pattern in config.get("ignore") or ()]
    attention = any(re.search("self_attn|[qkvo]_proj", pattern) for pattern in ignored)
    experts = any("expert" in pattern and "shared_expert" not in pattern for pattern in ignored)
    return base, attention, experts


def _compressed_base(group: dict[str, Any]) -> str:
    weights = group.get("weights") or {}
    bits, kind = weights.get("num_bits"), str(weights.get("type", "")).lower()
    match bits, "int" in kind, "float" in kind:
        case 4, True, _:
            return "int4_wo"
        case 8, True, _:
            return "int8_wo"
        case 8, _, True:
            block = str(weights.get("strategy", "")).lower() == "block" or weights.get("block_structure")
            return FP8_BLOCK if block else FP8
        case 4, _, True:
            return "w4a16_mxfp4"
    return ""


def _exclusion_patterns(model: ModelConfig) -> list[str]:
    """Patterns of modules that the checkpoint keeps unquantised."""
    lists = [model.quantization.get(key) for key in ("modules_to_not_convert", "exclude_modules", "ignore")]
    lists += [model.sidecar.get(key) for key in ("exclude_modules", "ignore")]
    return [str(pattern) for patterns in lists for pattern in patterns or ()]


# Names of latent-attention projections by group.
_PROJECTIONS = {
    "q": ("q_a_proj", "q_b_proj", "q_proj"),
    "kv": ("kv_a_proj", "kv_b_proj", "kv_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
}


def _excluded_projections(patterns: list[str]) -> frozenset[str]:
    """Projection groups that patterns exclude: one that names the attention block but no projection means all."""
    excluded: set[str] = set()
    for pattern in patterns:
        named = {group for group, names in _PROJECTIONS.items() if any(name in pattern for name in names)}
        whole = "self_attn" in pattern and not named and "indexer" not in pattern
        excluded |= set(_PROJECTIONS) if whole else named
    return frozenset(excluded)
