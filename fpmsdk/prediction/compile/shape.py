"""Sizes that a model cannot be cut into are refused, whatever prices its passes.

Source: predict-recommend.md sections 6.2 and 15 (row 18).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fpmsdk.config.systems import resolve_systems_paths
from fpmsdk.errors import ConfigError, FpmSdkError
from fpmsdk.prediction.compile.timing import timing_config
from fpmsdk.prediction.config import Parallelism, PredictConfig


def check_shapes(config: PredictConfig) -> None:
    """Raise ConfigError for the first role whose sizes do not divide the model.

    A model whose configuration cannot be had is not checked: constants may price it.
    """
    for role, worker in config.roles.items():
        model = _model_of(timing_config(config, role))
        if model is not None and (fault := shape_fault(model, worker.parallelism)) is not None:
            raise ConfigError(f"engine.workers.{role}.parallelism: {fault}", f"engine.workers.{role}.parallelism")


def shape_fault(model: Mapping[str, Any], sizes: Parallelism) -> str | None:
    """Why a model cannot be cut so; None when it can.

    Parameters
    ----------
    model: its `config.json`, with the language model's fields on top.

    >>> shape_fault({"num_attention_heads": 32}, Parallelism(tensor=3))
    'tensor 3 does not divide the 32 attention heads; the nearest that do are 2 and 4'
    """
    heads = model.get("num_attention_heads")
    if isinstance(heads, int) and heads > 0 and heads % sizes.tensor:
        return f"tensor {sizes.tensor} does not divide the {heads} attention heads{_nearest(heads, sizes.tensor)}"
    experts = _experts(model)
    width = sizes.tensor * sizes.attention_data
    spread = sizes.moe_tensor * sizes.moe_expert
    if experts and width != spread:
        return (
            f"moe_tensor x moe_expert is {spread}, and the experts lie on the {width} GPUs of tensor x attention_data; "
            f"use moe_tensor 1 with moe_expert {width}, or moe_tensor {width} with moe_expert 1"
        )
    if experts and experts % sizes.moe_expert:
        return (
            f"moe_expert {sizes.moe_expert} does not divide the {experts} experts{_nearest(experts, sizes.moe_expert)}"
        )
    if experts == 0 and spread > 1:
        return "the model has no experts; leave moe_tensor and moe_expert out"
    return None


def _experts(model: Mapping[str, Any]) -> int | None:
    """Routed experts; 0 of a dense model, None where that cannot be told."""
    for name in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"):
        value = model.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _nearest(whole: int, size: int) -> str:
    divisors = [part for part in range(1, whole + 1) if whole % part == 0]
    near = [part for part in divisors if part < size][-1:] + [part for part in divisors if part > size][:1]
    return f"; the nearest that do are {' and '.join(map(str, near))}"


def _model_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    try:
        fields = json.loads(_config_file(config).read_bytes())
    except (FpmSdkError, OSError, ValueError):
        return None
    if not isinstance(fields, dict):
        return None
    language = fields.get("text_config")
    return fields | language if isinstance(language, dict) else fields


def _config_file(config: Mapping[str, Any]) -> Path:
    folder = Path(config["model"])
    if folder.is_dir():
        return folder / "config.json"
    # Bundled configurations lie beside the systems.
    from fpmsdk.opgraph.model_config import find_model_config

    roots = resolve_systems_paths(config.get("systems_paths") or ())
    return find_model_config(config["model"], [Path(root).parent / "model_configs" for root in roots])[0]
