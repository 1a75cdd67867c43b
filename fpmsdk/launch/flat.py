"""The flat legacy form of an engine launch: aliases, loose spellings, and what a native timing model implies.

Turns a flat mapping into the canonical one; checks nothing that the canonical reader checks again.
Source: engine-and-replay.md sections 1.2 and 1.4.
"""

from collections.abc import Mapping
from typing import Any

from fpmsdk.config.schema import describe
from fpmsdk.errors import LaunchConfigError
from fpmsdk.launch.fields import LAUNCH, NATIVE_PROVIDERS

ALIASES = {
    "engine_type": "backend",
    "ais_nextn": "aic_nextn",
    "ais_nextn_accept_rates": "aic_nextn_accept_rates",
    "ais_mtp_seed": "aic_mtp_seed",
    "kv_bytes_per_token": "kv_transfer_bytes_per_token",
}
CASELESS = ("backend", "worker_type", "preemption_mode", "kv_transfer_timing_mode")
LAUNCH_KEYS = tuple(known.name for known in LAUNCH.fields if known.name != "engine")


def canonical_form(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the canonical mapping that a flat one stands for, nothing derived from the timing model.

    Raises: `LaunchConfigError` for two spellings of one field that disagree.

    >>> canonical_form({"engine_type": "VLLM", "dp_size": 2, "is_decode": True, "block_size": 0})
    {'engine': {'backend': 'vllm', 'worker_type': 'decode'}, 'dp_size': 2}
    """
    engine = dict(flat)
    launch = {name: engine.pop(name) for name in LAUNCH_KEYS if name in engine}
    for alias, name in ALIASES.items():
        if alias in engine:
            _agree(engine, name, engine.pop(alias))
    for section in ("sglang", "trtllm"):
        _drop_nulls(engine, section)
    if isinstance(sglang := engine.get("sglang"), dict):
        if "page_size" in sglang:
            _agree(engine, "block_size", sglang.pop("page_size"))
        if sglang.get("schedule_policy") == "fcfs":
            sglang["schedule_policy"] = "fifo"
    for name in CASELESS:
        if isinstance(engine.get(name), str):
            engine[name] = engine[name].lower()
    _role(engine)
    _timing(engine)
    if engine.get("num_gpu_blocks", 1) is None:
        del engine["num_gpu_blocks"]
    if engine.get("block_size") == 0:
        del engine["block_size"]
    return {"engine": engine, **launch}


def derived_from_timing(launch: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a canonical mapping whose omitted sizes and draft count follow the timing configuration.

    Parameters: `config`, a checked forward-pass configuration.
    """
    derived = dict(launch)
    if derived.get("tensor_parallel_size") is None:
        derived["tensor_parallel_size"] = config["tp"]
    derived.setdefault("dp_size", config["attention_dp"])
    engine = derived.get("engine", {})
    if config["nextn"] != 0 and isinstance(engine, Mapping) and "aic_nextn" not in engine:
        derived["engine"] = {**engine, "aic_nextn": config["nextn"]}
    return derived


def native_timing_config(launch: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the forward-pass configuration of a native external timing model, or None for other models.

    Raises: `LaunchConfigError` for a configuration that is not an object.
    """
    engine = launch["engine"]
    timing = engine.get("timing_model") if isinstance(engine, Mapping) else None
    if not isinstance(timing, Mapping) or timing.get("type") != "external":
        return None
    if timing.get("provider") not in NATIVE_PROVIDERS:
        return None
    config = timing.get("config")
    if not isinstance(config, Mapping):
        raise LaunchConfigError(
            f"timing_model config must be a forward-pass configuration, found {describe(config)}",
            "engine.timing_model",
        )
    return config


def _agree(engine: dict[str, Any], name: str, value: Any) -> None:
    if engine.setdefault(name, value) != value:
        raise LaunchConfigError(f"conflicting values for {name}", name)


def _drop_nulls(engine: dict[str, Any], section: str) -> None:
    if section not in engine:
        return
    if engine[section] is None:
        del engine[section]
    elif isinstance(engine[section], Mapping):
        engine[section] = {key: value for key, value in engine[section].items() if value is not None}


def _role(engine: dict[str, Any]) -> None:
    flags = {role: engine.pop(f"is_{role}", False) for role in ("prefill", "decode")}
    for role, flag in flags.items():
        if not isinstance(flag, bool):
            raise LaunchConfigError(f"is_{role} must be a boolean", f"is_{role}")
    if all(flags.values()):
        raise LaunchConfigError("is_prefill and is_decode cannot both be true")
    for role, flag in flags.items():
        if flag:
            engine.setdefault("worker_type", role)


def _timing(engine: dict[str, Any]) -> None:
    if "timing_model" in engine and engine["timing_model"] is None:
        del engine["timing_model"]
    timing = engine.get("timing_model")
    if isinstance(timing, Mapping) and timing.get("type") == "default":
        engine["timing_model"] = {**timing, "type": "polynomial"}
    config = engine.pop("ais_perf_config", None)
    if config is None:
        return
    if isinstance(timing, Mapping) and timing.get("provider") == "aic":
        engine["timing_model"] = {**timing, "provider": "ais"}
    _agree(engine, "timing_model", {"type": "external", "provider": "ais", "config": config})
