"""What a model can answer and why not, and which deployment it stands for. Read-only.

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


def readiness_report(kind: str, stores: list[tuple[str, bool, int]], min_observations: int) -> dict[str, Any]:
    """Readiness of a regression model, store by store.

    Parameters
    ----------
    kind: estimation mode.
    stores: (workload kind, ready, retained observations) in diagnostic order.
    min_observations: rows that a store needs before it is fitted.
    """
    return {
        "kind": kind,
        "ready": any(ready for _, ready, _ in stores),
        "stores": [
            {
                "store": name,
                "ready": ready,
                "reason": None if ready else _reason(retained, min_observations),
                "retained_observations": retained,
            }
            for name, ready, retained in stores
        ],
        "correction": None,
    }


def _reason(retained: int, min_observations: int) -> str:
    return "below_min_observations" if retained < min_observations else "no_usable_fit"


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
