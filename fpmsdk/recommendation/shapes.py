"""What of a model decides how it can be divided, and the rules by which an engine divides it.

Source: predict-recommend.md sections 6.2 and 15 (mistake 18).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from fpmsdk.config.checkpoint import read_checkpoint_config
from fpmsdk.config.profile import FpmModelProfile
from fpmsdk.errors import ConfigError, OnboardError, UnsupportedModelError
from fpmsdk.opgraph.model_config import language_config, parse_model_config, read_raw_config
from fpmsdk.prediction.compile.shape import shape_fault as predicted_fault
from fpmsdk.prediction.config import Parallelism
from fpmsdk.recommendation.parallelism import Sizes

_EXPERTS = ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts")


class ModelShape(Struct, frozen=True):
    """Sizes of a model in elements; 0 where the checkpoint leaves one open or has none.

    kv_heads: 0 too where all heads share one latent vector, which every rank holds whole.
    context_length: the longest sequence in tokens.
    """

    name: str
    heads: int = 0
    kv_heads: int = 0
    layers: int = 0
    inter_size: int = 0
    experts: int = 0
    expert_size: int = 0
    context_length: int = 0

    @property
    def is_moe(self) -> bool:
        """Whether layers have experts that a deployment divides."""
        return self.experts > 0


@functools.lru_cache(maxsize=64)
def model_shape(model: str, search: tuple[str, ...] = ()) -> ModelShape:
    """The shape of a model by name or directory.

    Parameters
    ----------
    search: directories of bundled configurations besides those of installed data packages.

    Raises
    ------
    OnboardError: there is no such model, or its `config.json` cannot be read.

    Source: predict-recommend.md section 4.1.

    >>> import tempfile
    >>> from fpmsdk.sample.tiny import write_checkpoint
    >>> model = model_shape(write_checkpoint(tempfile.mkdtemp()))
    >>> model.heads, model.is_moe
    (8, False)
    """
    try:
        raw = read_raw_config(model, search)
    except ConfigError as fault:
        raise OnboardError(f"engine.model: {fault}", "engine.model") from None
    return _shape(model, raw)


def profile_shape(profile: FpmModelProfile) -> ModelShape:
    """The shape of the pinned checkpoint of a profile; of what cannot be had only what the profile states.

    Parameters
    ----------
    profile: whose architecture is verified when a model is made of it, not here.
    """
    try:
        shape = _shape(profile.model, read_checkpoint_config(profile.model, profile.model_revision))
    except ConfigError:
        shape = ModelShape(profile.model)
    stated = {"experts": profile.num_experts, "context_length": profile.context_length}
    return structs.replace(shape, **stated)


def _shape(name: str, raw: Mapping[str, Any]) -> ModelShape:
    try:
        model = parse_model_config(name, raw)
    except UnsupportedModelError:
        return _unparsed(name, language_config(dict(raw)))
    return ModelShape(
        name,
        heads=model.num_heads,
        kv_heads=0 if model.kv_lora_rank or model.groups else model.num_kv_heads,
        layers=model.num_layers,
        inter_size=0 if model.is_moe else model.inter_size,
        experts=model.num_experts if model.is_moe else 0,
        expert_size=model.moe_inter_size,
        context_length=model.context_length,
    )


def _unparsed(name: str, text: Mapping[str, Any]) -> ModelShape:
    """Of an architecture that is known by its whole passes only: what every checkpoint calls by the same name."""

    def size(*names: str) -> int:
        values = (text.get(field) for field in names)
        return next((value for value in values if type(value) is int and value > 0), 0)

    return ModelShape(
        name,
        heads=size("num_attention_heads"),
        kv_heads=0 if size("kv_lora_rank") else size("num_key_value_heads"),
        layers=size("num_hidden_layers"),
        experts=size(*_EXPERTS),
        context_length=size("max_position_embeddings"),
    )


def shape_fault(model: ModelShape, sizes: Sizes) -> str | None:
    """Why a model cannot be divided so; None where it can.

    Parameters
    ----------
    sizes: of a worker.

    Example
    -------
    >>> shape_fault(ModelShape("m", heads=32, kv_heads=8), Sizes(tensor=3))
    'tensor 3 does not divide the 32 attention heads; the nearest that do are 2 and 4'
    """
    stated = {"num_attention_heads": model.heads, "num_experts": model.experts}
    fault = predicted_fault(stated, Parallelism(**sizes.to_dict()))
    divided = _expert_fault if model.is_moe else _dense_fault
    return fault or _attention_fault(model, sizes) or divided(model, sizes)


def _attention_fault(model: ModelShape, sizes: Sizes) -> str | None:
    tensor, shared = sizes.tensor, model.kv_heads
    if shared and shared % tensor and tensor % shared:
        return f"tensor {tensor} neither divides the {shared} key-value heads nor is a multiple of them"
    if model.layers and sizes.pipeline > model.layers:
        return f"pipeline {sizes.pipeline} exceeds the {model.layers} layers"
    return None


def _dense_fault(model: ModelShape, sizes: Sizes) -> str | None:
    if model.inter_size % sizes.tensor:
        return f"tensor {sizes.tensor} does not divide the intermediate size {model.inter_size}"
    if sizes.attention_data > 1:
        return f"attention_data {sizes.attention_data} needs a model with experts; use replicas or tensor"
    return None


def _expert_fault(model: ModelShape, sizes: Sizes) -> str | None:
    if sizes.moe_tensor > 1 and sizes.moe_expert > 1:
        return "vllm divides experts by moe_tensor or by moe_expert, not by both"
    if model.expert_size % sizes.moe_tensor:
        return f"moe_tensor {sizes.moe_tensor} does not divide the expert size {model.expert_size}"
    return None


def search_folders(roots: Sequence[str]) -> tuple[str, ...]:
    """Where systems roots have bundled configurations of models beside them.

    >>> search_folders(["/data/systems"])
    ('/data/model_configs',)
    """
    return tuple(os.path.join(os.path.dirname(root), "model_configs") for root in roots)
