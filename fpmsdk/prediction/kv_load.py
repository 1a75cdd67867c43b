"""Requests in flight that a share of the cache comes to.

Source: predict-recommend.md section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs

from fpmsdk.config.profile import load_fpm_profile
from fpmsdk.config.profile_identity import select_deployment
from fpmsdk.errors import ConfigError
from fpmsdk.launch.cache_budget import request_bytes
from fpmsdk.prediction.config import KvCapacityLoad, PredictConfig, SyntheticSource
from fpmsdk.prediction.deployment import SizedRole


class NoCapacityError(ConfigError):
    """Not one request fits the cache."""


class KvLoad(Struct, frozen=True):
    """How many requests are in flight, and how many the cache holds: `capacity_tokens` is None of a grouped cache."""

    concurrency: int
    capacity_requests: int
    capacity_tokens: int | None

    def document(self) -> dict[str, int | None]:
        """The fields by name."""
        return structs.asdict(self)


def kv_load_of(config: PredictConfig, roles: Mapping[str, SizedRole]) -> KvLoad | None:
    """The load of the cache that decodes; None where the configuration asks for none.

    Raises
    ------
    NoCapacityError: not one request fits.
    """
    load, source = config.traffic.load, config.traffic.source
    if not isinstance(load, KvCapacityLoad):
        return None
    assert isinstance(source, SyntheticSource)
    role = roles.get("aggregated") or roles["decode"]
    tokens = source.input_tokens + source.output_tokens // 2
    groups = role.launch.engine.kv_cache_groups
    held = _grouped_requests(role, tokens) if groups else role.kv_tokens // tokens
    if held < 1:
        raise NoCapacityError(
            f"the cache of all workers holds no request of {tokens} tokens (input and half of the output); raise the "
            "capacity or shorten the requests"
        )
    return KvLoad(max(1, math.floor(load.fraction * held)), held, None if groups else role.kv_tokens)


def _grouped_requests(role: SizedRole, tokens: int) -> int:
    assert role.model is not None
    config: dict[str, Any] = role.model.diagnostics()["provenance"]["config"]
    resources = select_deployment(load_fpm_profile(config["fpm_profile"]), config).resources
    engine = role.launch.engine
    chunk = engine.max_num_batched_tokens or tokens
    ranks = role.launch.dp_size * role.num_workers
    return ranks * ((engine.kv_cache_capacity_bytes or 0) // request_bytes(resources, tokens, chunk))
