"""The deployment that a learned forest stands for: which fields of a configuration it was trained under.

Source: regression-and-learned.md section 3.5.
"""

from collections.abc import Mapping
from typing import Any

from fpmsdk.config.schema import shown
from fpmsdk.errors import LearnedModelError

IDENTITY_KEYS = (
    "attention_backend",
    "attention_dp",
    "backend",
    "backend_version",
    "comm_quant_mode",
    "dcp",
    "decoder_replay",
    "enable_eplb",
    "enable_shared_layer",
    "fmha_quant_mode",
    "fpm_fmha_quant_mode",
    "fpm_profile",
    "gemm_quant_mode",
    "kv_block_size",
    "kvcache_quant_mode",
    "model",
    "moe_backend",
    "moe_ep_size",
    "moe_kernel_source",
    "moe_quant_mode",
    "moe_tp_size",
    "nextn",
    "pp",
    "speculation",
    "system",
    "tp",
    "wideep_num_slots",
    "worker_type",
)


def learned_identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The identity in a canonical configuration: 28 of its fields, in alphabetical order.

    Parameters
    ----------
    config: result of `fpmsdk.config.normalize_config`.

    Source: regression-and-learned.md section 3.5.

    Example
    -------
    >>> from fpmsdk.config import normalize_config
    >>> identity = learned_identity(normalize_config(
    ...     {"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode", "tp": 2}))
    >>> identity["tp"], identity["gemm_quant_mode"], len(identity)
    (2, None, 28)
    """
    return {key: config[key] for key in IDENTITY_KEYS}


def require_identity(stored: Any, config: Mapping[str, Any], where: str) -> None:
    """Check that a stored identity is that of a configuration.

    Parameters
    ----------
    stored: what an artifact or a checkpoint says.
    config: canonical configuration.
    where: the file, for the error.

    Raises
    ------
    LearnedModelError: it is another deployment's; names the first field that differs.

    Example
    -------
    >>> from fpmsdk.config import normalize_config
    >>> config = normalize_config({"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode"})
    >>> require_identity(learned_identity(config) | {"tp": 4}, config, "artifact.json")
    Traceback (most recent call last):
        ...
    fpmsdk.errors.LearnedModelError: learned forward-pass model: artifact.json: identity.tp: expected 1, that of the \
configuration, found 4; train for this deployment, or configure the one it was trained on
    """
    expected = learned_identity(config)
    found = stored if isinstance(stored, dict) else {}
    for key in (*IDENTITY_KEYS, *sorted(set(found) - set(IDENTITY_KEYS))):
        absent = "nothing"
        theirs = found.get(key, absent)
        ours = expected.get(key, absent)
        if theirs is absent or ours is absent or type(theirs) is not type(ours) or theirs != ours:
            raise LearnedModelError(
                f"learned forward-pass model: {where}: identity.{key}: expected {shown(ours)}, that of the "
                f"configuration, found {shown(theirs)}; train for this deployment, or configure the one it was trained "
                "on",
                f"identity.{key}",
            )
