"""Which deployment a model stands for. Read-only.

Source: fpm-model.md section 8.
"""

from typing import Any

_TOPOLOGY_FIELDS = (
    "model",
    "system",
    "backend",
    "backend_version",
    "worker_type",
    "estimation_mode",
    "tp",
    "pp",
    "attention_dp",
    "cp_size",
    "dcp",
    "moe_tp_size",
    "moe_ep_size",
    "nextn",
    "gemm_quant_mode",
    "moe_quant_mode",
    "fmha_quant_mode",
    "fpm_fmha_quant_mode",
    "kvcache_quant_mode",
    "comm_quant_mode",
    "kv_block_size",
)
_CORRECTION_LIMITS = ("max_num_tokens", "max_batch_size", "max_kv_tokens")


def deployment_topology(config: dict[str, Any], *, corrected: bool) -> dict[str, Any]:
    """Identity of the deployment that a canonical configuration describes.

    Parameters
    ----------
    config: canonical configuration.
    corrected: whether the model has correction stores, whose limits are then part of the answer.
    """
    topology = {name: config.get(name) for name in _TOPOLOGY_FIELDS}
    correction = config["estimator_config"]["correction"]
    limits = {name: correction[name] for name in _CORRECTION_LIMITS}
    return topology | {"correction_limits": limits if corrected else None}
