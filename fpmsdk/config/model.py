"""The public configuration class: a plain frozen dataclass, validated only when it is normalised.

No pydantic here: clients copy, pickle, compare and pick fields of it by name.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from fpmsdk.config.legacy import migrate_legacy_config
from fpmsdk.config.request import resolve_request


@dataclass(frozen=True)
class ForwardPassPerfModelConfig:
    """The identity of a deployment and how its forward passes are to be estimated.

    Fields, defaults and rules are those of the canonical configuration; `asdict` is loss-free and
    machine-independent, `to_dict` resolves what depends on this machine. Unknown keywords are a `TypeError`.
    Source: fpm-model.md section 3, clients.md section 2.2.

    >>> config = ForwardPassPerfModelConfig("m", "s", "vllm", "decode", estimation_mode="fpm_regression")
    >>> config.to_dict()["tp"], config.to_dict()["systems_paths"]
    (1, [])
    """

    model: str
    system: str
    backend: str
    worker_type: str
    backend_version: str | None = None
    fpm_profile: dict[str, Any] | None = field(default=None, kw_only=True)
    tp: int = 1
    pp: int = 1
    attention_dp: int = 1
    dcp: int | None = field(default=None, kw_only=True)
    moe_tp_size: int | None = None
    moe_ep_size: int | None = None
    cp_size: int | None = field(default=None, kw_only=True)
    gemm_quant_mode: str | None = None
    moe_quant_mode: str | None = None
    fmha_quant_mode: str | None = None
    fpm_fmha_quant_mode: str | None = field(default=None, kw_only=True)
    kvcache_quant_mode: str | None = None
    comm_quant_mode: str | None = None
    nextn: int = 0
    speculation: dict[str, Any] | None = None
    kv_block_size: int | None = None
    decoder_replay: bool = False
    estimation_mode: str = "auto"
    database_mode: str = "SILICON"
    transfer_policy: str | tuple[str, ...] | None = None
    systems_paths: tuple[str, ...] = ()
    fallback_policy: str = "deny"
    estimator_config: dict[str, Any] = field(default_factory=dict)
    attention_backend: str | None = None
    moe_kernel_source: str | None = field(default=None, kw_only=True)
    enable_shared_layer: bool | None = None
    strict_provenance: bool = False
    moe_backend: str | None = None
    enable_eplb: bool = False
    wideep_num_slots: int | None = None
    encoder_parallel: str | None = None

    def document(self) -> dict[str, Any]:
        """Return the fields as written, `encoder_parallel` only when given.

        >>> config = ForwardPassPerfModelConfig("m", "s", "vllm", "decode", transfer_policy="balanced")
        >>> config.document()["transfer_policy"]
        'balanced'
        """
        fields = asdict(self)
        if self.encoder_parallel is None:
            del fields["encoder_parallel"]
        return fields

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON values, presets and systems paths resolved on this machine.

        Returns: every field, `encoder_parallel` only when given; `systems_paths` stays empty for
        `fpm_regression` and `fpm_learned` without paths.
        Raises: `SystemsPathError` for a path that is not a directory, `ConfigError` for an unknown transfer
        preset.
        Source: fpm-model.md section 2.4.

        >>> ForwardPassPerfModelConfig("m", "s", "vllm", "decode", systems_paths=("/.",)).to_dict()["systems_paths"]
        ['/']
        """
        resolved = resolve_request(self.document())
        if isinstance(resolved["transfer_policy"], tuple):
            resolved["transfer_policy"] = list(resolved["transfer_policy"])
        return resolved

    @classmethod
    def from_legacy_engine_config(
        cls,
        config: Mapping[str, Any],
        worker_type: str,
        options: Mapping[str, Any] | None = None,
        *,
        allow_regression: bool = False,
    ) -> Self:
        """Migrate a flat legacy engine record and its flat tuning options.

        Parameters: `config`, with at least `schema_version, model_name, system_name, backend, tp_size,
        pp_size`; `options`, fields of `ForwardPassPerfOptions`; `allow_regression` chooses fallback policy
        `regression`.
        Returns: mode `op_level`, or `fpm_interpolation` for `forward_model: fpm`; validated, not resolved.
        Raises: `ConfigError`.
        Source: fpm-model.md section 2.4.

        >>> record = {"schema_version": 1, "model_name": "m", "system_name": "s", "backend": "vllm"}
        >>> record |= {"tp_size": 4, "pp_size": 1}
        >>> migrate = ForwardPassPerfModelConfig.from_legacy_engine_config
        >>> config = migrate(record, "decode", {"bucket_count": 9})
        >>> config.tp, config.estimator_config["correction"]["sampling"]["bins_per_axis"]
        (4, [3, 3])
        """
        canonical = migrate_legacy_config(config, worker_type, options, allow_regression=allow_regression)
        paths = tuple(canonical.pop("systems_paths"))
        policy = canonical.pop("transfer_policy")
        return cls(**canonical, systems_paths=paths, transfer_policy=None if policy is None else tuple(policy))
