"""The profile of measured deployments: identity, precision, cache geometry and memory evidence of each.

A strict document model; sizes are those of one rank. What follows from the sizes is in `fpmsdk.launch.cache_budget`.
Source: fpm-interpolation.md section 6.
"""

import json
import marshal
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_serializer, model_validator

from fpmsdk.config.modes import COMM_MODES, GEMM_MODES, KV_CACHE_MODES, MOE_MODES, RECORDED_FMHA_MODES
from fpmsdk.errors import ConfigError

MAX_BYTES = 2**53
UNPINNED_REVISIONS = frozenset({"main", "master", "head", "latest", "current", "unknown", "tbd", "unpinned"})
UNPINNED_VERSIONS = UNPINNED_REVISIONS | {"previous", "next"}
DECLARED_FIELDS = ("weights_bytes", "activations_bytes", "runtime_overhead_bytes", "comm_overhead_bytes")

Size = Annotated[int, Field(ge=1)]
U32 = Annotated[int, Field(ge=1, le=2**32 - 1)]
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
SomeBytes = Annotated[int, Field(ge=1, le=MAX_BYTES)]
Words = Annotated[str, Field(min_length=1, pattern=r"\S")]

_MODES = {
    "gemm_quant_mode": GEMM_MODES,
    "moe_quant_mode": MOE_MODES,
    "fmha_quant_mode": RECORDED_FMHA_MODES,
    "comm_quant_mode": COMM_MODES,
    "kv_cache_dtype": KV_CACHE_MODES,
}


class _Document(BaseModel):
    # Only the outermost model of a document is compiled.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    # Fields that are left out of the written form while they are unset, so that older documents keep their bytes.
    @model_serializer(mode="wrap")
    def _write(self, write: Any) -> dict[str, Any]:
        document: dict[str, Any] = write(self)
        return {key: value for key, value in document.items() if not (key in self._omitted() and value in (None, []))}

    def _omitted(self) -> frozenset[str]:
        return frozenset()


class CacheGroup(_Document):
    """Layers that share pages of the cache. `page_size_bytes` covers all of them on one rank, padding included."""

    name: Words
    kind: Literal["attention", "convolution"]
    num_layers: U32
    block_size_tokens: U32
    page_size_bytes: SomeBytes
    sliding_window: U32 | None = None

    @model_validator(mode="after")
    def _needs_window(self) -> "CacheGroup":
        if self.kind == "convolution" and self.sliding_window is None:
            raise ValueError("a convolution group needs a sliding_window")
        return self


class RuntimeMemory(_Document):
    """Cache bytes that a running engine reported for exactly these settings."""

    kv_cache_bytes: SomeBytes
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
    max_model_len: Annotated[int, Field(ge=1, le=2**64 - 1)]
    provenance: Words


class Resources(_Document):
    """Cache geometry and scheduler envelope of one rank, with what is known of its memory."""

    weights_bytes: Bytes | None = None
    activations_bytes: Bytes | None = None
    runtime_overhead_bytes: Bytes | None = None
    comm_overhead_bytes: Bytes | None = None
    runtime_memory: RuntimeMemory | None = None
    kv_bytes_per_token: SomeBytes | None = None
    cache_layout: Literal["linear", "grouped"]
    cache_groups: list[CacheGroup] = []
    max_num_tokens: Size
    max_batch_size: Size
    provenance: Words

    def _omitted(self) -> frozenset[str]:
        return frozenset({*DECLARED_FIELDS, "runtime_memory", "kv_bytes_per_token", "cache_groups"})

    @model_validator(mode="after")
    def _consistent(self) -> "Resources":
        declared = [value for value in self.declared() if value is not None]
        if sum(declared) > MAX_BYTES:
            raise ValueError(f"the declared bytes add up to more than {MAX_BYTES}")
        if self.runtime_memory is not None and declared:
            raise ValueError(f"runtime_memory cannot be combined with any of {', '.join(DECLARED_FIELDS)}")
        grouped = self.cache_layout == "grouped"
        if grouped != bool(self.cache_groups) or grouped != (self.kv_bytes_per_token is None):
            raise ValueError(
                "cache_layout linear needs kv_bytes_per_token and no cache_groups, grouped the other way round"
            )
        if len({group.name for group in self.cache_groups}) < len(self.cache_groups):
            raise ValueError("names of cache_groups must be unique")
        return self

    def declared(self) -> tuple[int | None, ...]:
        """The bytes that are not cache, each None when unknown."""
        return tuple(getattr(self, name) for name in DECLARED_FIELDS)

    @property
    def memory_source(self) -> Literal["runtime", "declared", "pending"]:
        """Where the memory figures come from."""
        if self.runtime_memory is not None:
            return "runtime"
        return "pending" if None in self.declared() else "declared"

    def require_memory(self) -> None:
        """Raise `ConfigError` while the memory figures are pending."""
        if self.memory_source == "pending":
            raise ConfigError(
                "fpm_profile: memory is pending runtime profiling; measure and finalise runtime_memory, or declare "
                f"all of {', '.join(DECLARED_FIELDS)}",
                "fpm_profile",
            )


class SpeculativeRound(_Document):
    """Timings of whole speculative rounds, as part of the identity of a deployment."""

    kind: Literal["speculative_round"]
    method: Literal["eagle3"]
    num_draft_tokens: Annotated[int, Field(ge=1, le=5)]
    draft_model: Words
    draft_revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    timing_scope: Literal["model_step_cuda"]

    @field_validator("draft_model")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if name != name.strip() or any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 for char in name):
            raise ValueError("must be trimmed and free of control characters")
        return name


class DeploymentProfile(_Document):
    """One deployment: where and how the model runs, in which precision, with which resources."""

    system: Words
    backend: Literal["vllm"]
    backend_version: Words | None = None
    tp: Size
    pp: int = 1
    dp: Size
    moe_tp: Size
    moe_ep: Size
    cp: int = 1
    gemm_quant_mode: str
    moe_quant_mode: str
    fmha_quant_mode: str
    comm_quant_mode: str
    kv_cache_dtype: str
    moe_backend: Words = "auto"
    attention_backend: Words = "auto"
    enable_wideep: bool = False
    enable_eplb: bool = False
    worker_type: Literal["prefill", "decode", "aggregated"] | None = None
    execution_profile: SpeculativeRound | None = None
    resources: Resources

    def _omitted(self) -> frozenset[str]:
        return frozenset({"worker_type", "execution_profile"})

    @field_validator("backend_version")
    @classmethod
    def _literal_version(cls, version: str | None) -> str | None:
        if version is None:
            return None
        unsafe = version in (".", "..") or any(char.isspace() or char in "/\\\0" for char in version)
        if unsafe or version.lower() in UNPINNED_VERSIONS:
            raise ValueError("must be a literal version that can name a directory")
        return version

    @field_validator("pp", "cp")
    @classmethod
    def _one(cls, size: int) -> int:
        if size != 1:
            raise ValueError("must be 1")
        return size

    @field_validator("enable_wideep", "enable_eplb")
    @classmethod
    def _off(cls, flag: bool) -> bool:
        if flag:
            raise ValueError("must be false")
        return flag

    @field_validator(*_MODES)
    @classmethod
    def _known_mode(cls, name: str, info: Any) -> str:
        accepted = _MODES[info.field_name]
        if name not in accepted:
            raise ValueError(f"must be one of {', '.join(accepted)}")
        return name

    @model_validator(mode="after")
    def _round_topology(self) -> "DeploymentProfile":
        if self.execution_profile is not None and (self.dp != 1 or self.moe_ep != 1 or self.moe_tp not in (1, self.tp)):
            raise ValueError("execution_profile needs pure tensor parallelism")
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """tp, pp, dp, moe_tp, moe_ep, cp."""
        return self.tp, self.pp, self.dp, self.moe_tp, self.moe_ep, self.cp

    def match_identity(self) -> dict[str, str]:
        """The identity of the deployment's cell in a measured table, by column."""
        names = (*_MODES, "tp", "pp", "dp", "moe_tp", "moe_ep", "cp", "moe_backend", "attention_backend")
        return {name: str(getattr(self, name)) for name in (*names, "enable_wideep", "enable_eplb")}

    def execution_identity(self, model_revision: str) -> dict[str, str]:
        """The further identity of a cell of speculative rounds; empty for plain decoding.

        Raises: `ConfigError` when the revision of the target model is not a full commit.
        """
        profile = self.execution_profile
        if profile is None:
            return {}
        if len(model_revision) != 40 or set(model_revision) - set("0123456789abcdef"):
            raise ConfigError(
                "fpm_profile.model_revision must be a full lower-case commit for an execution_profile, found "
                f"{model_revision!r}",
                "fpm_profile.model_revision",
            )
        fields = {"model_revision": model_revision, "execution_profile": profile.model_dump(mode="json")}
        return {
            "execution_profile": "speculative_round_v1:" + json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
        }

    def modes(self) -> dict[str, str]:
        """Precision and attention backend under the names of the canonical configuration."""
        return {
            "gemm_quant_mode": self.gemm_quant_mode,
            "moe_quant_mode": self.moe_quant_mode,
            "fmha_quant_mode": self.fmha_quant_mode,
            "kvcache_quant_mode": self.kv_cache_dtype,
            "comm_quant_mode": self.comm_quant_mode,
            "attention_backend": self.attention_backend,
        }


class FpmModelProfile(_Document):
    """One checkpoint with its measured deployments."""

    schema_version: Literal[1]
    model: Words
    model_revision: Words
    architecture: Words
    context_length: Size
    num_experts: Annotated[int, Field(ge=0)]
    provenance: Words
    deployments: Annotated[list[DeploymentProfile], Field(min_length=1)]

    @field_validator("schema_version", mode="before")
    @classmethod
    def _integer(cls, version: Any) -> Any:
        if type(version) is not int:
            raise ValueError("must be an integer")
        return version

    @field_validator("model_revision")
    @classmethod
    def _pinned(cls, revision: str) -> str:
        if revision.strip().lower() in UNPINNED_REVISIONS:
            raise ValueError("must name one revision, not a branch or placeholder")
        return revision

    @model_validator(mode="after")
    def _deployments_are_distinct(self) -> "FpmModelProfile":
        roles: dict[tuple[Any, ...], list[str | None]] = {}
        for place, deployment in enumerate(self.deployments):
            _check_topology(deployment, self.num_experts, place)
            key = (deployment.system, deployment.backend, deployment.backend_version, deployment.sizes)
            known = roles.setdefault(key, [])
            if deployment.worker_type in known:
                raise ValueError(f"deployments[{place}] is a duplicate: one record per topology and worker_type")
            if known and None in (*known, deployment.worker_type):
                raise ValueError(f"deployments[{place}] is ambiguous: its topology has a record without worker_type")
            known.append(deployment.worker_type)
        return self


def _check_topology(deployment: DeploymentProfile, num_experts: int, place: int) -> None:
    tp, _, dp, moe_tp, moe_ep, _ = deployment.sizes
    if num_experts == 0:
        accepted = dp == 1 and moe_ep == 1 and moe_tp in (1, tp)
    else:
        tensor = (dp, moe_ep, moe_tp) == (1, 1, tp)
        data_expert = (tp, moe_tp, moe_ep) == (1, 1, dp)
        tensor_expert = (dp, moe_tp, moe_ep) == (1, 1, tp)
        accepted = tensor or data_expert or tensor_expert
    if not accepted:
        raise ValueError(f"deployments[{place}] must be dense TP, or MoE TP, DEP or TEP with sizes that agree")
    if moe_ep > 1 and (num_experts == 0 or num_experts % moe_ep):
        raise ValueError(f"deployments[{place}]: num_experts {num_experts} must be a multiple of moe_ep {moe_ep}")


# A sweep builds many models from one profile; profiles cannot be changed, so that they can be shared.
_KEPT_PROFILES = 64
_known_profiles: dict[bytes, FpmModelProfile] = {}


def load_fpm_profile(source: Mapping[str, Any] | str | os.PathLike[str]) -> FpmModelProfile:
    """Return the profile held by a document.

    Parameters: `source`, a mapping, or the path of a JSON or YAML file.
    Raises: `ConfigError` for the first fault, with its dotted path below `fpm_profile`.

    >>> try:
    ...     load_fpm_profile({"schema_version": 1, "model": "org/m", "model_revision": "main"})
    ... except ConfigError as fault:
    ...     fault.path
    'fpm_profile.model_revision'
    """
    document: Any = source if isinstance(source, Mapping) else _read(os.fspath(source))
    try:
        # Format 0 depends on the values alone, not on how their objects are shared.
        written = marshal.dumps(document, 0)
    except ValueError:
        return _validated(document)  # not only plain values
    profile = _known_profiles.get(written)
    if profile is None:
        profile = _validated(document)
        if len(_known_profiles) >= _KEPT_PROFILES:
            _known_profiles.clear()
        _known_profiles[written] = profile
    return profile


def _validated(document: Any) -> FpmModelProfile:
    try:
        return FpmModelProfile.model_validate(document)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        path = "fpm_profile"
        for part in fault["loc"]:
            path += f"[{part}]" if isinstance(part, int) else f".{part}"
        raise ConfigError(f"invalid engine config: {path}: {fault['msg']}", path) from None


def _read(path: str) -> Any:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            return yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"fpm_profile: cannot read {path}: {error}", "fpm_profile") from error
