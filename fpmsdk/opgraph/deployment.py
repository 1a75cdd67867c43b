"""How a model is served: engine, hardware facts, parallel sizes and requested precisions.

The part of a configuration that shapes an operator graph; nothing is checked here.
"""

from collections.abc import Mapping
from typing import Any

import msgspec


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment; the fields carry the names of the canonical configuration.

    `backend_version` is the name of a data directory, never an alias. `sm_version` is the compute capability of
    the system (90 for Hopper), None when unknown. `moe_tp_size` and `moe_ep_size` are given together or not at all.

    Source: op-level.md sections 4.2 and 4.3.

    >>> deployment = Deployment(system="h200_sxm", backend="vllm", tp=2, moe_tp_size=1, moe_ep_size=2)
    >>> deployment.moe_ep, deployment.cp, deployment.database_mode
    (2, 1, 'SILICON')
    """

    system: str
    backend: str
    backend_version: str | None = None
    sm_version: int | None = None
    tp: int = 1
    pp: int = 1
    attention_dp: int = 1
    moe_tp_size: int | None = None
    moe_ep_size: int | None = None
    cp_size: int | None = None
    dcp: int | None = None
    gemm_quant_mode: str | None = None
    moe_quant_mode: str | None = None
    fmha_quant_mode: str | None = None
    kvcache_quant_mode: str | None = None
    comm_quant_mode: str | None = None
    nextn: int = 0
    speculation: dict[str, Any] | None = None
    kv_block_size: int | None = None
    decoder_replay: bool = False
    attention_backend: str | None = None
    moe_kernel_source: str | None = None
    moe_backend: str | None = None
    enable_eplb: bool = False
    wideep_num_slots: int | None = None
    database_mode: str = "SILICON"
    transfer_policy: tuple[str, ...] | None = None
    enable_shared_layer: bool | None = None
    strict_provenance: bool = False
    tolerate_dirless_version: bool = False
    systems_path: str | None = None

    @property
    def cp(self) -> int:
        """Context-parallel size, 1 when not given."""
        return self.cp_size or 1

    @property
    def moe_tp(self) -> int:
        """Tensor-parallel size of the experts, 1 when not given."""
        return self.moe_tp_size or 1

    @property
    def moe_ep(self) -> int:
        """Expert-parallel size, 1 when not given."""
        return self.moe_ep_size or 1

    @property
    def verify_width(self) -> int:
        """Tokens that a decode step verifies for each request: the next one and those that were speculated."""
        if self.speculation is not None and self.speculation["kind"] == "ngram":
            return int(self.speculation["params"]["num_speculative_tokens"]) + 1
        return self.nextn + 1

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **facts: Any) -> "Deployment":
        """The deployment of a canonical configuration.

        Parameters
        ----------
        config: result of `fpmsdk.config.normalize_request`; fields that do not shape a graph are ignored.
        facts: what the configuration leaves open: `backend_version`, `sm_version`, `systems_path`,
            `tolerate_dirless_version`.

        >>> Deployment.from_config({"system": "h200_sxm", "backend": "vllm", "tp": 2}, sm_version=90).tp
        2
        """
        values = {field: config[field] for field in cls.__struct_fields__ if field in config}
        if values.get("transfer_policy") is not None:
            values["transfer_policy"] = tuple(values["transfer_policy"])
        return cls(**(values | facts))
