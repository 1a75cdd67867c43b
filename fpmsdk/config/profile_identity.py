"""What a profile adds to a configuration: the deployment it stands for, its precision and the lookup method.

The document itself is in `profile.py`. Source: fpm-model.md section 3.3, fpm-interpolation.md sections 4.3 and 6.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from fpmsdk.config.checkpoint import check_architecture, read_checkpoint_config
from fpmsdk.config.profile import UNPINNED_VERSIONS, DeploymentProfile, FpmModelProfile, load_fpm_profile
from fpmsdk.errors import ConfigError
from fpmsdk.files import sha256


def select_deployment(profile: FpmModelProfile, config: Mapping[str, Any]) -> DeploymentProfile:
    """Return the deployment that a canonical configuration asks for.

    Raises: `ConfigError` when the model differs or no deployment has this identity and role.
    """
    if config["model"] != profile.model:
        raise ConfigError(
            f"invalid engine config: model {config['model']!r} is not that of fpm_profile, {profile.model!r}", "model"
        )
    experts = (config["moe_tp_size"] or 1, config["moe_ep_size"] or 1)
    sizes = (config["tp"], config["pp"], config["attention_dp"], *experts, 1)
    asked = (config["system"], config["backend"], config["backend_version"], sizes)
    for deployment in profile.deployments:
        offered = (deployment.system, deployment.backend, deployment.backend_version, deployment.sizes)
        if offered == asked and deployment.worker_type in (None, config["worker_type"]):
            return deployment
    raise ConfigError(
        f"invalid engine config: fpm_profile has no deployment of {profile.model!r} on {asked[0]}, {asked[1]} "
        f"{asked[2]} with (tp, pp, dp, moe_tp, moe_ep, cp) {sizes} for worker_type {config['worker_type']}; add one "
        "or ask for a recorded one",
        "fpm_profile",
    )


# The one architecture whose cells are bound to the configuration of their checkpoint.
_CONFIG_BOUND = "DeepseekV41ForCausalLM"


def checkpoint_identity(profile: FpmModelProfile) -> dict[str, str]:
    """The further identity of cells that are bound to a checkpoint's configuration; empty for other architectures.

    Raises: `ConfigError` unless that configuration keeps its engrams on the GPU and takes text, both in so many words.
    """
    if profile.architecture != _CONFIG_BOUND:
        return {}
    config = read_checkpoint_config(profile.model, profile.model_revision)
    for name, needed in (("engram_cpu_offload", False), ("input_modality", "text")):
        if name not in config or config[name] != needed or type(config[name]) is not type(needed):
            raise ConfigError(
                f"fpm_profile.model: config.json of {profile.model!r} must state {name} {needed!r}, found "
                f"{config.get(name)!r}; only such deployments of {_CONFIG_BOUND} were measured",
                "fpm_profile.model",
            )
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return {
        "model_config_sha256": sha256(text.encode()),
        "execution_profile": "full",
        "engram_residency": "hbm_tp_sharded",
        "input_modality": "text",
    }


def apply_profile(config: dict[str, Any], is_registered: Callable[[str], bool]) -> bool:
    """Fill a configuration in place from its profile.

    Parameters: `is_registered`, whether an architecture has an operator graph.
    Returns: whether that of the profile has one.
    Raises: `ConfigError` for a fault of the profile, a deployment it does not hold, a precision that differs from
    it, or a checkpoint of another architecture.
    """
    profile = load_fpm_profile(config["fpm_profile"])
    if config["backend_version"].lower() in UNPINNED_VERSIONS:
        raise ConfigError(
            f"invalid engine config: fpm_profile needs a literal backend_version, found {config['backend_version']!r}",
            "backend_version",
        )
    deployment = select_deployment(profile, config)
    for name, mode in deployment.modes().items():
        if config[name] not in (None, mode):
            raise ConfigError(
                f"invalid engine config: {name} {config[name]!r} contradicts fpm_profile, which records {mode!r}", name
            )
        config[name] = mode
    check_architecture(profile.model, profile.model_revision, profile.architecture)
    config["fpm_profile"] = profile.model_dump(mode="json")
    return is_registered(profile.architecture)
