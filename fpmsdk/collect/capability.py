"""What a model's configuration says that a campaign needs to know: experts, attention, precision, cache layout.

Source: collector.md section 1.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fpmsdk.collect.cache_markers import cache_markers
from fpmsdk.collect.layer_declarations import check_layer_declarations
from fpmsdk.collect.model_evidence import ModelEvidence
from fpmsdk.config.modes import KV_CACHE_MODES
from fpmsdk.errors import MissingCapabilityError, OnboardError, UnsupportedModelError
from fpmsdk.opgraph.precision import CheckpointPrecision, checkpoint_precision

NATIVE_RUNTIME = "native_runtime"
NATIVE_TEMPLATE = "generic:native_runtime"
_TEMPLATE_VERSION = 1
# Their timings are bound to runtime adapters that are pinned to the sources of one engine.
_CONFIG_BOUND = ("DeepseekV41ForCausalLM", "Glm5NextForConditionalGeneration")

_FAMILIES = {
    "LLAMA": ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MiMoForCausalLM"),
    "QWEN3VL": ("Qwen3VLForConditionalGeneration",),
    "QWEN3VL_MOE": ("Qwen3VLMoeForConditionalGeneration",),
    "DEEPSEEK": ("DeepSeekForCausalLM", "DeepseekV3ForCausalLM"),
    "DEEPSEEKV32": ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
    "DEEPSEEKV4": ("DeepseekV4ForCausalLM",),
    "KIMIK25": ("KimiK25ForConditionalGeneration",),
    "KIMIK3": ("KimiK3ForConditionalGeneration",),
    "NEMOTRONNAS": ("NemotronForCausalLM", "DeciLMForCausalLM"),
    "NEMOTRONH": ("NemotronHForCausalLM", "NemotronH_Omni_Reasoning_V3"),
    "MOE": (
        "MixtralForCausalLM",
        "GptOssForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "MiniMaxM2ForCausalLM",
    ),
    "MINIMAXM3": ("MiniMaxM3ForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
    "STEP3P7": (
        "Step3p7ForConditionalGeneration",
        "Step3p5ForCausalLM",
        "Step3p7FlashForCausalLM",
        "Step3p5FlashForCausalLM",
    ),
    "HYBRIDMOE": ("MiMoV2FlashForCausalLM", "Llama4ForConditionalGeneration"),
    "QWEN35": (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
    ),
    "GEMMA4MIX": ("Gemma4ForConditionalGeneration",),
    "MUSEGLIMMER": ("MuseGlimmerForConditionalGeneration",),
    "MISTRAL3": ("Mistral3ForConditionalGeneration",),
}
_FAMILY_OF = {architecture: family for family, names in _FAMILIES.items() for architecture in names}
_SPARSE = {"DEEPSEEKV4": ("dsv4_module", "moe_dsv4"), "MINIMAXM3": ("dsa_module", "moe_msa")}
_EXPERT_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts")
_KV_SPELLINGS = {"bf16": "bfloat16", "fp8_e4m3": "fp8"}


@dataclass(frozen=True, kw_only=True)
class ResolvedDtypes:
    """Quantisation modes of the checkpoint; those of attention by the precision of the cache."""

    gemm: str
    moe: str
    comm: str
    native_kv_cache: str
    kv_caches: tuple[str, ...]
    fmha: Mapping[str, str]
    fmha_resolution: Mapping[str, str]

    def document(self) -> dict[str, Any]:
        """`dtype_profile` of a plan."""
        first = self.kv_caches[0]
        return {
            "gemm_quant_mode": self.gemm,
            "moe_quant_mode": self.moe,
            "fmha_quant_mode": self.fmha[first],
            "comm_quant_mode": self.comm,
            "native_kv_cache_dtype": self.native_kv_cache,
            "kv_cache_dtypes": list(self.kv_caches),
            "fmha_resolution": self.fmha_resolution[first],
            "fmha_by_kv_dtype": dict(self.fmha),
            "fmha_resolution_by_kv_dtype": dict(self.fmha_resolution),
        }


@dataclass(frozen=True, kw_only=True)
class ModelCapability:
    """What is known of a model. `markers` say why its cache layout is left to the engine; empty when it is not."""

    architecture: str | None
    family: str | None
    is_moe: bool
    attention_source: str
    attention_kind: str
    support_level: str
    template_id: str
    support_reason: str
    database_version: str
    evidence: ModelEvidence
    dtypes: ResolvedDtypes
    markers: tuple[str, ...] = ()

    @property
    def allow_pure_tp(self) -> bool:
        """Whether experts may be divided by tensor parallelism alone."""
        return self.is_moe

    def document(self) -> dict[str, Any]:
        """`capability` of a plan."""
        return {
            "architecture": self.architecture,
            "model_family": self.family,
            "is_moe": self.is_moe,
            "attention_source": self.attention_source,
            "attention_kind": self.attention_kind,
            "support_level": self.support_level,
            "template_id": self.template_id,
            "template_version": _TEMPLATE_VERSION,
            "support_reason": self.support_reason,
            "allow_pure_tp": self.allow_pure_tp,
            "aic_database_version": self.database_version,
            "model_config": self.evidence.document(),
            "dtype": self.dtypes.document(),
        }


def resolve_capability(
    evidence: ModelEvidence,
    *,
    database_version: str,
    weight_quantizations: Sequence[str] = (),
    kv_cache_dtypes: Sequence[str] = ("auto",),
    architecture: str | None = None,
) -> ModelCapability:
    """Read the capability of a model; precision is that of the checkpoint.

    Parameters
    ----------
    evidence: result of `load_model_evidence`.
    database_version: version label under which measurements are published.
    weight_quantizations: the checkpoint's own must be the only one, when any is named.
    kv_cache_dtypes: precisions of the cache to measure; `auto` is the checkpoint's own.
    architecture: stands in where the configuration names none.

    Raises
    ------
    OnboardError: contradicting layers, an unknown precision, or one that the checkpoint does not have.
    MissingCapabilityError: a model whose timings are bound to source-pinned adapters of its engine.
    """
    name = evidence.architecture(architecture)
    if name in _CONFIG_BOUND:
        raise MissingCapabilityError(
            f"{name} is measured by adapters that are pinned to one engine's sources; this release has none of them"
        )
    config = evidence.decoder
    family = _FAMILY_OF.get(name or "")
    is_moe = any(_experts(config, field) > 1 for field in _EXPERT_COUNTS)
    markers = cache_markers(config, name)
    if markers:
        check_layer_declarations(config, has_markers=True)
        reasons = ", ".join(markers)
        level, source, template = NATIVE_RUNTIME, NATIVE_RUNTIME, NATIVE_TEMPLATE
        kind = f"{'moe' if is_moe else 'dense'}_native_runtime"
        reason = f"config.json cannot describe this cache layout ({reasons}). The native runtime measures every cell."
    else:
        source, kind = _attention(config, name, family, is_moe)
        level = "family_template" if family else "bootstrap_template"
        template = f"aic_family:{family.lower()}:{kind}" if family else f"generic:{kind}"
        reason = (
            "no exact collector model case; derived from the registered AIC model family"
            if family
            else "architecture is not registered by AIC; using a conservative config-derived template"
        )
    return ModelCapability(
        architecture=name,
        family=family,
        is_moe=is_moe,
        attention_source=source,
        attention_kind=kind,
        support_level=level,
        template_id=template,
        support_reason=reason,
        database_version=database_version,
        evidence=evidence,
        dtypes=_dtypes(evidence, name, is_moe, weight_quantizations, kv_cache_dtypes),
        markers=markers,
    )


def _experts(config: Mapping[str, Any], field: str) -> int:
    count = config.get(field) or 0
    if type(count) is not int:
        raise OnboardError(f"config.json: {field}: expected an integer, found {count!r}", field)
    return count


def _attention(config: Mapping[str, Any], name: str | None, family: str | None, is_moe: bool) -> tuple[str, str]:
    if family in _SPARSE:
        return _SPARSE[family]
    check_layer_declarations(config)
    if "dsa" in (name or "").lower() or family == "DEEPSEEKV32":
        return "dsa_module", "moe_dsa"
    latent = any(config.get(field) is not None for field in ("kv_lora_rank", "q_lora_rank"))
    if latent or family in ("DEEPSEEK", "KIMIK25"):
        return "mla_module", f"{'moe' if is_moe else 'dense'}_mla"
    heads = config.get("num_attention_heads") or 1
    kv_heads = config.get("num_key_value_heads") or heads
    return "dense_attention", f"{'moe' if is_moe else 'dense'}_{'mha' if heads == kv_heads else 'gqa'}"


@dataclass(frozen=True)
class _Metadata:
    quantization: dict[str, Any]
    sidecar: dict[str, Any]
    is_moe: bool


def declared_precision(evidence: ModelEvidence, name: str | None, is_moe: bool) -> CheckpointPrecision:
    """Precision of a checkpoint by its metadata, and by what its architecture always has.

    Raises
    ------
    OnboardError: it declares an algorithm that no mode stands for.
    """
    try:
        found = checkpoint_precision(_Metadata(evidence.quantization, evidence.sidecar, is_moe))
    except UnsupportedModelError as fault:
        raise OnboardError(f"config.json: {fault}", "quantization_config") from None
    if name == "DeepseekV4ForCausalLM":
        # Its sparse attention needs an FP8 cache; experts in FP4 are fed with FP8 activations.
        found = found._replace(kv_cache="fp8")
        if str(evidence.decoder.get("expert_dtype", "")).lower() == "fp4" and found.moe != "nvfp4":
            found = found._replace(moe="w4a8_mxfp4_mxfp8")
    return found


def _dtypes(
    evidence: ModelEvidence, name: str | None, is_moe: bool, weights: Sequence[str], kv_caches: Sequence[str]
) -> ResolvedDtypes:
    found = declared_precision(evidence, name, is_moe)
    asked = {mode.lower() for mode in weights}
    if asked and asked != {found.gemm}:
        raise OnboardError(
            f"--fpm-weight-quantizations: the checkpoint has {found.gemm}, and only that can be measured; found "
            f"{', '.join(sorted(asked))}",
            "weight_quantizations",
        )
    resolved = tuple(dict.fromkeys(_kv_cache(word, found.kv_cache) for word in kv_caches))
    if not resolved:
        raise OnboardError("--fpm-kv-cache-dtypes: name at least one, auto for the checkpoint's own", "kv_cache_dtypes")
    fmha = {kv: "bfloat16" if kv == "bfloat16" else found.fmha for kv in resolved}
    return ResolvedDtypes(
        gemm=found.gemm,
        moe=found.moe,
        comm="half",
        native_kv_cache=found.kv_cache,
        kv_caches=resolved,
        fmha=fmha,
        # With a bfloat16 cache the engine runs attention in bfloat16, whatever the weights are.
        fmha_resolution={
            kv: "checkpoint_native" if mode == found.fmha else f"kv_dtype_dispatch_from_{found.fmha}"
            for kv, mode in fmha.items()
        },
    )


def _kv_cache(word: str, native: str) -> str:
    name = word.lower()
    name = native if name == "auto" else _KV_SPELLINGS.get(name, name)
    if name not in KV_CACHE_MODES:
        raise OnboardError(
            f"--fpm-kv-cache-dtypes: use auto, {', '.join(KV_CACHE_MODES)}, found {word!r}", "kv_cache_dtypes"
        )
    if name == "int8":
        raise OnboardError("--fpm-kv-cache-dtypes: vLLM has no int8 cache; use bfloat16 or fp8", "kv_cache_dtypes")
    return name
