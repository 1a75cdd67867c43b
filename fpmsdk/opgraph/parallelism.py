"""Which parallel layouts a model can be served in.

Checks only; the sizes themselves are in `deployment.py`. Source: op-level.md section 4.3.
"""

from fpmsdk.errors import ConfigError, MissingCapabilityError, UnsupportedModelError
from fpmsdk.opgraph.architectures import DEEPSEEK, GEMMA4, NAS
from fpmsdk.opgraph.deployment import Deployment
from fpmsdk.opgraph.model_config import ModelConfig
from fpmsdk.opgraph.precision import Precision

_DEFAULT_WEIGHT_BLOCK = (128, 128)


def check_parallelism(model: ModelConfig, deployment: Deployment, precision: Precision) -> None:
    """Refuse a deployment that the model cannot run in.

    Raises
    ------
    ConfigError: the requested sizes contradict each other.
    UnsupportedModelError: the sizes are consistent but this model cannot be divided by them.
    MissingCapabilityError: decode context parallelism or a speculation scheme, which have no operator form here.
    """
    _check_requests(model, deployment)
    if model.is_moe:
        _check_expert_width(deployment)
    _check_context_parallelism(model, deployment)
    if model.num_heads % deployment.tp:
        raise UnsupportedModelError(
            f"tp {deployment.tp} does not divide the {model.num_heads} attention heads of {model.name}", "tp"
        )
    if model.is_moe:
        _check_experts(model, deployment, precision)
    if model.family == NAS and deployment.nextn:
        raise UnsupportedModelError(f"{model.name} has no multi-token prediction; use nextn 0", "nextn")


def mtp_scale(nextn: int, num_layers: int) -> float:
    """Work of one decode step with `nextn` multi-token-prediction layers, relative to the plain model.

    >>> mtp_scale(1, 64)
    1.015625
    """
    return (nextn + num_layers) / num_layers if nextn else 1.0


def _check_requests(model: ModelConfig, deployment: Deployment) -> None:
    if deployment.nextn < 0:
        raise ConfigError(f"nextn must not be negative, found {deployment.nextn}", "nextn")
    if deployment.decoder_replay:
        raise ConfigError(f"decoder_replay does not exist for {model.architecture}; leave it false", "decoder_replay")
    if deployment.speculation is not None and deployment.speculation["kind"] != "ngram":
        raise MissingCapabilityError(
            f"op_level has no operators for the speculation scheme {deployment.speculation['kind']!r}; "
            "use ngram, or nextn for multi-token prediction"
        )
    if (deployment.dcp or 1) > 1:
        raise MissingCapabilityError(f"op_level does not price decode context parallelism (dcp {deployment.dcp})")
    if model.is_moe:
        return
    for field, unset in (
        ("enable_eplb", (False,)),
        ("wideep_num_slots", (None,)),
        ("moe_backend", (None, "default")),
        ("moe_kernel_source", (None,)),
    ):
        if getattr(deployment, field) not in unset:
            raise ConfigError(f"{field} needs a model with routed experts; {model.name} is dense", field)


def _check_expert_width(deployment: Deployment) -> None:
    attention = deployment.tp * deployment.attention_dp * deployment.cp
    experts = deployment.moe_tp * deployment.moe_ep
    if attention != experts:
        raise ConfigError(
            f"tp {deployment.tp} x attention_dp {deployment.attention_dp} x cp_size {deployment.cp} = {attention} "
            f"ranks must equal moe_tp_size {deployment.moe_tp} x moe_ep_size {deployment.moe_ep} = {experts}; "
            "give both MoE sizes for a model with routed experts",
            "moe_ep_size",
        )


def _check_context_parallelism(model: ModelConfig, deployment: Deployment) -> None:
    if deployment.cp == 1:
        return
    if deployment.backend != "sglang" or model.family == NAS:
        raise UnsupportedModelError(
            f"cp_size {deployment.cp}: context parallelism of {model.name} is modelled on sglang only", "cp_size"
        )
    if deployment.tp != 1 or deployment.attention_dp != 1:
        raise ConfigError(
            f"cp_size {deployment.cp} on sglang needs tp 1 and attention_dp 1, found tp {deployment.tp} "
            f"and attention_dp {deployment.attention_dp}",
            "cp_size",
        )


def _check_experts(model: ModelConfig, deployment: Deployment, precision: Precision) -> None:
    if max(model.num_experts, 1) < deployment.moe_ep:
        raise UnsupportedModelError(
            f"moe_ep_size {deployment.moe_ep} exceeds the {model.num_experts} experts of {model.name}", "moe_ep_size"
        )
    if precision.moe != "fp8_block" or model.family in (DEEPSEEK, GEMMA4):
        return
    block = (model.quantization.get("weight_block_size") or _DEFAULT_WEIGHT_BLOCK)[0]
    per_rank = model.moe_inter_size // deployment.moe_tp
    if per_rank % block:
        raise UnsupportedModelError(
            f"moe_tp_size {deployment.moe_tp} leaves {per_rank} of {model.moe_inter_size} expert columns a rank, "
            f"which is no multiple of the weight block size {block}",
            "moe_tp_size",
        )
