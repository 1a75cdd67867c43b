"""Rules of the canonical configuration that go beyond types: ranges, pairs, exclusions.

Faults are reported one at a time, in a specified order. Nothing here opens a file; systems paths are only
checked for existence. Source: fpm-model.md section 3.
"""

import os
import re
from typing import Any

from fpmsdk.config.estimator import SELECTOR
from fpmsdk.config.modes import FMHA_MODES
from fpmsdk.config.validate_estimator import require, validate_estimator

TRANSFER_KINDS = ("xshape", "xquant", "xprofile", "xop")
MOE_BACKENDS = ("default", "deepep_moe", "megamoe")
UNPINNED_VERSIONS = ("current", "previous", "next")
SPECULATION_KINDS = ("dflash", "draft_model", "dspark", "eagle3", "mtp", "ngram", "none")
MAX_NEXTN = 5


def validate(config: dict[str, Any]) -> None:
    """Check every rule of a parsed configuration.

    Parameters: `config`, the stored form of `fields.CONFIG`, every field present.
    Raises: `ConfigError` for the first rule that does not hold.
    Source: fpm-model.md sections 3.1 and 3.2.
    """
    estimator = config["estimator_config"]
    _execution_profile(config, estimator)
    _selector(config, estimator)
    _learned_gates(config, estimator)
    _state_snapshot(config, estimator["state_snapshot"])
    _coverage(config, estimator["fpm_interpolation"])
    _identity(config)
    _topology(config, estimator["fpm_interpolation"])
    _moe(config)
    _interpolation_exclusions(config)
    _speculation(config)
    _precision(config)
    _data_sources(config)
    validate_estimator(estimator)
    _recursive_features(config, estimator)
    _speculation_scheme(config)
    _profile(config, estimator["fpm_interpolation"])


def _selector(config: dict[str, Any], estimator: dict[str, Any]) -> None:
    require(
        estimator["selector"] == SELECTOR.read({})
        or (config["estimation_mode"] == "fpm_learned" and estimator["fpm_learned"]["adaptation"] == "causal_selector"),
        "needs a model of estimation_mode fpm_learned with adaptation causal_selector",
        "estimator_config.selector",
    )


def _recursive_features(config: dict[str, Any], estimator: dict[str, Any]) -> None:
    if config["estimation_mode"] != "fpm_regression" or estimator["fpm_regression"]["fit"]["kind"] != "recursive":
        return
    for name, weight in estimator["features"].items():
        path = f"estimator_config.features.{name}"
        require(weight == 1.0, "must be left out: recursive finds the weight of every kind of work itself", path)


def _learned_gates(config: dict[str, Any], estimator: dict[str, Any]) -> None:
    learned = estimator["fpm_learned"]
    correction = estimator["correction"]
    sources = [name for name in ("artifact_path", "checkpoint_path") if learned[name] is not None]
    if config["estimation_mode"] != "fpm_learned":
        require(not sources, "artifact_path and checkpoint_path need estimation_mode fpm_learned")
        return
    require(config["fallback_policy"] == "deny", "estimation_mode fpm_learned needs fallback_policy deny")
    require(len(sources) == 1, "fpm_learned needs exactly one of artifact_path and checkpoint_path")
    adaptation = learned["adaptation"]
    require(
        adaptation == "frozen" or learned["checkpoint_path"] is not None,
        f"fpm_learned adaptation {adaptation} needs checkpoint_path, the training checkpoint",
    )
    require(
        adaptation != "online" or not correction["enabled"],
        "fpm_learned adaptation online needs estimator_config.correction.enabled false",
    )
    require(
        adaptation != "causal_selector" or (correction["enabled"] and correction["mode"] in ("auto", "hybrid")),
        "fpm_learned adaptation causal_selector needs correction enabled, in mode auto or hybrid",
    )
    require(
        config["nextn"] == 0 and not _speculates(config),
        "estimation_mode fpm_learned takes neither nextn nor speculation",
    )


def _state_snapshot(config: dict[str, Any], snapshot: dict[str, Any] | None) -> None:
    if snapshot is None:
        return
    path = "estimator_config.state_snapshot"
    require(config["estimation_mode"] != "auto", "needs an explicit estimation_mode, not auto", path)
    require(config["fallback_policy"] == "deny", "needs fallback_policy deny", path)
    require(snapshot["path"] != "", "must not be empty", f"{path}.path")
    require(
        snapshot["sha256"] is None or _is_sha256(snapshot["sha256"]),
        "must be 64 lower-case hexadecimal digits",
        f"{path}.sha256",
    )


def _coverage(config: dict[str, Any], interpolation: dict[str, Any]) -> None:
    if not interpolation["collect_coverage"]:
        return
    require(
        config["estimation_mode"] == "fpm_interpolation"
        and config["fallback_policy"] == "deny"
        and interpolation["method"] == "direct",
        "collect_coverage needs estimation_mode fpm_interpolation, fallback_policy deny and the written method direct",
    )


def _identity(config: dict[str, Any]) -> None:
    for name in ("model", "system", "backend_version", "moe_kernel_source"):
        require(config[name] is None or config[name].strip() != "", f"{name} must not be blank")


def _topology(config: dict[str, Any], interpolation: dict[str, Any]) -> None:
    tp, cp_size, dcp = config["tp"], config["cp_size"], config["dcp"]
    attention_dp = config["attention_dp"]
    require(min(tp, config["pp"], attention_dp) > 0, "tp, pp and attention_dp must be positive")
    require(cp_size != 0, "cp_size must be positive")
    require(dcp is None or (dcp > 0 and tp % dcp == 0), "dcp must be positive and divide tp")
    for unrecorded in interpolation["unrecorded_quant_modes"]:
        overrides = ("fmha_quant_mode", "fpm_fmha_quant_mode") if unrecorded == "fmha" else ("comm_quant_mode",)
        for name in overrides:
            require(config[name] is None, f"{name} contradicts unrecorded_quant_modes, which lists {unrecorded}")
    moe_tp, moe_ep = config["moe_tp_size"], config["moe_ep_size"]
    require((moe_tp is None) == (moe_ep is None), "moe_tp_size and moe_ep_size are given together or not at all")
    if moe_tp is None:
        return
    require(min(moe_tp, moe_ep) > 0, "moe_tp_size and moe_ep_size must be positive")
    if config["fpm_profile"] is None:
        require(
            tp * attention_dp * (cp_size or 1) == moe_tp * moe_ep,
            "topology: tp * attention_dp * cp_size must equal moe_tp_size * moe_ep_size",
        )


def _moe(config: dict[str, Any]) -> None:
    moe_backend = config["moe_backend"]
    require(config["wideep_num_slots"] != 0, "wideep_num_slots must be positive")
    require(
        moe_backend is None or moe_backend in MOE_BACKENDS,
        f"moe_backend {moe_backend!r} is unknown, expected one of {', '.join(MOE_BACKENDS)}",
    )
    require(
        moe_backend in (None, "default") or config["backend"] == "sglang",
        f"moe_backend {moe_backend!r} needs backend sglang",
    )


def _interpolation_exclusions(config: dict[str, Any]) -> None:
    if config["estimation_mode"] != "fpm_interpolation" and config["fpm_profile"] is None:
        return
    require(
        not config["enable_eplb"]
        and config["wideep_num_slots"] is None
        and config["moe_backend"] in (None, "default")
        and config["moe_kernel_source"] is None,
        "fpm_interpolation takes no enable_eplb, wideep_num_slots, moe_backend or moe_kernel_source override",
    )


def _speculation(config: dict[str, Any]) -> None:
    nextn, speculation = config["nextn"], config["speculation"]
    require(nextn <= MAX_NEXTN, f"nextn must be in 0..={MAX_NEXTN}")
    require(nextn == 0 or speculation is None, "speculation cannot be combined with nextn")
    require(
        nextn == 0 or config["estimation_mode"] != "fpm_interpolation",
        "estimation_mode fpm_interpolation takes no nextn",
    )
    if speculation is None:
        return
    params = speculation["params"]
    require(speculation["kind"].strip() != "", "speculation kind must not be blank")
    if speculation["kind"] == "none":
        require(not params, "speculation of kind none takes no params")
    if speculation["kind"] == "ngram":
        require(set(params) == {"num_speculative_tokens"}, "ngram params must be exactly num_speculative_tokens")
        tokens = params["num_speculative_tokens"]
        require(
            isinstance(tokens, int) and not isinstance(tokens, bool) and 1 <= tokens <= MAX_NEXTN,
            f"ngram num_speculative_tokens must be an integer in 1..={MAX_NEXTN}",
        )
        require(config["backend"] == "vllm", "speculation of kind ngram needs backend vllm")


def _speculates(config: dict[str, Any]) -> bool:
    return config["speculation"] is not None and config["speculation"]["kind"] != "none"


def _speculation_scheme(config: dict[str, Any]) -> None:
    if config["speculation"] is None:
        return
    kind = config["speculation"]["kind"]
    require(
        kind in SPECULATION_KINDS,
        f"speculation kind {kind!r} is unknown, expected one of {', '.join(SPECULATION_KINDS)}",
    )
    require(
        kind in ("ngram", "none"),
        f"speculation kind {kind!r} needs draft data that this configuration cannot carry; use nextn for MTP",
    )


def _precision(config: dict[str, Any]) -> None:
    mode = config["fpm_fmha_quant_mode"]
    if mode is None:
        return
    require(
        config["estimation_mode"] == "fpm_interpolation",
        "fpm_fmha_quant_mode needs estimation_mode fpm_interpolation",
    )
    require(mode in FMHA_MODES, f"fpm_fmha_quant_mode must be one of {', '.join(FMHA_MODES)}")


def _data_sources(config: dict[str, Any]) -> None:
    for kind in config["transfer_policy"] or ():
        require(
            kind in TRANSFER_KINDS,
            f"transfer_policy has the unknown kind {kind!r}, expected one of {', '.join(TRANSFER_KINDS)}",
        )
    check_systems_paths(config)


def check_systems_paths(config: dict[str, Any]) -> None:
    """Raise `ConfigError` for an entry of `systems_paths` that is no existing directory."""
    for entry in config["systems_paths"]:
        require(
            os.path.isdir(entry),
            f"systems_paths entry is not an existing directory: {entry!r}",
        )


def _profile(config: dict[str, Any], interpolation: dict[str, Any]) -> None:
    if config["fpm_profile"] is None:
        return
    for name in ("text_only", "unrecorded_quant_modes"):
        require(not interpolation[name], f"fpm_profile cannot be combined with {name}")
    require(config["dcp"] is None, "fpm_profile cannot be combined with dcp")
    version = config["backend_version"]
    literal = f"fpm_profile needs a literal backend_version, found {version!r}"
    require(version is not None, literal)
    require(config["nextn"] == 0, "fpm_profile cannot be combined with nextn")
    require(not _speculates(config), "fpm_profile cannot be combined with speculation")
    require(version not in UNPINNED_VERSIONS, literal)


def _execution_profile(config: dict[str, Any], estimator: dict[str, Any]) -> None:
    profile = estimator["op_level"]["execution_profile"]
    if profile is None:
        return
    path = "estimator_config.op_level.execution_profile"
    accepted: dict[str, tuple[Any, ...]] = {
        "estimation_mode": ("op_level",),
        "database_mode": ("SILICON",),
        "fallback_policy": ("deny",),
        "enable_shared_layer": (False,),
        "decoder_replay": (False,),
        "worker_type": ("prefill", "decode"),
        "pp": (1,),
        "attention_dp": (1,),
        "cp_size": (1, None),
        "dcp": (1, None),
        "nextn": (0,),
        "speculation": (None,),
        "encoder_parallel": (None,),
        "fpm_profile": (None,),
    }
    for name, values in accepted.items():
        require(
            config[name] in values,
            f"needs {name} {' or '.join(map(str, values))}, found {config[name]!r}",
            path,
        )
    require(not estimator["correction"]["enabled"], "needs estimator_config.correction.enabled false", path)
    version = config["backend_version"]
    require(version not in (None, "next", "latest"), f"needs a literal backend_version, found {version!r}", path)
    require(os.path.isabs(profile["path"]), "must be absolute", f"{path}.path")
    require(_is_sha256(profile["sha256"]), "must be 64 lower-case hexadecimal digits", f"{path}.sha256")


def _is_sha256(digest: str) -> bool:
    return re.fullmatch("[0-9a-f]{64}", digest) is not None
