"""A cell: one phase of one deployment, measured by one launch of the engine.

Source: collector.md section 1.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fpmsdk.collect.topology import Topology
from fpmsdk.documents.canonical import digest
from fpmsdk.errors import OnboardError

POINT_SOURCE = "dynamo_native_self_benchmark"
# Layouts whose decode timings depend on real cache contents.
WARM_KV_STRATEGIES = frozenset(("tep", "dep", "pure_tp"))

EXECUTION_COLUMNS = ("model_config_sha256", "execution_profile", "engram_residency", "input_modality")
# What every model has whose timings are not bound to its configuration file.
PLAIN_EXECUTION = {
    "model_config_sha256": "",
    "execution_profile": "full",
    "engram_residency": "none",
    "input_modality": "text",
}

_COMMON_KEYS = (
    "cell_id",
    "workload_kind",
    "point_source",
    "topology",
    "parallel_strategy",
    "weight_quantization",
    "kv_cache_dtype",
    "resolved_dtypes",
    "backend_policy",
)
_EXECUTION_KEYS = ("execution_identity", "input_text_sha256")
_DTYPE_KEYS = (
    "gemm_quant_mode",
    "moe_quant_mode",
    "fmha_quant_mode",
    "comm_quant_mode",
    "kvcache_quant_mode",
    "fmha_resolution",
)
_POLICY_KEYS = ("policy_id", "generator_overrides", "expected_markers", "aic_fields", "admission_reason")


@dataclass(frozen=True)
class Cell:
    """One phase of one deployment. Mappings are read, never changed.

    Parameters
    ----------
    cell_id: `fpm-` and 16 hexadecimal digits.
    workload_kind: `prefill` or `decode`.
    topology, parallel_strategy: the layout and its name.
    weight_quantization, kv_cache_dtype: precision of the weights and of the cache.
    resolved_dtypes: the six quantisation modes.
    backend_policy: what is asked of the engine beyond its defaults.
    execution_identity: four further columns of identity; None in plans of schema 10.
    input_text_sha256: digest of the text that is run; None in plans of schema 10.
    """

    cell_id: str
    workload_kind: str
    topology: Topology
    parallel_strategy: str
    weight_quantization: str
    kv_cache_dtype: str
    resolved_dtypes: Mapping[str, str | None]
    backend_policy: Mapping[str, Any]
    execution_identity: Mapping[str, str] | None = None
    input_text_sha256: str | None = None
    point_source: str = POINT_SOURCE

    @property
    def backend_columns(self) -> dict[str, str | bool]:
        """Backends of MoE and attention (`auto` when the engine chooses), wide EP and load balancing of experts."""
        fields = self.backend_policy["aic_fields"]
        return backend_columns(fields)

    @property
    def execution_columns(self) -> dict[str, str]:
        """The four columns of execution identity, with the defaults of schema 10."""
        return dict(PLAIN_EXECUTION if self.execution_identity is None else self.execution_identity)

    @property
    def is_config_bound(self) -> bool:
        """Whether the timings hold for exactly one configuration file of the model."""
        return bool(self.execution_columns["model_config_sha256"])

    @property
    def needs_warm_kv(self) -> bool:
        """Whether decode timings need real cache contents."""
        return self.parallel_strategy in WARM_KV_STRATEGIES

    def document(self) -> dict[str, Any]:
        """The cell as it stands in a plan."""
        document: dict[str, Any] = {
            "cell_id": self.cell_id,
            "workload_kind": self.workload_kind,
            "point_source": self.point_source,
            "topology": self.topology.document(),
            "parallel_strategy": self.parallel_strategy,
            "weight_quantization": self.weight_quantization,
            "kv_cache_dtype": self.kv_cache_dtype,
            "resolved_dtypes": dict(self.resolved_dtypes),
            "backend_policy": dict(self.backend_policy),
        }
        if self.execution_identity is not None:
            document["execution_identity"] = dict(self.execution_identity)
            document["input_text_sha256"] = self.input_text_sha256
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any], where: str = "cell") -> Cell:
        """Read a cell of a saved plan.

        Raises
        ------
        OnboardError: a key is missing or unknown, or a value is none that a plan writes; names `where`.
        """
        _check(document, where)
        return cls(
            cell_id=document["cell_id"],
            workload_kind=document["workload_kind"],
            topology=Topology.from_document(document["topology"], f"{where}.topology"),
            parallel_strategy=document["parallel_strategy"],
            weight_quantization=document["weight_quantization"],
            kv_cache_dtype=document["kv_cache_dtype"],
            resolved_dtypes=document["resolved_dtypes"],
            backend_policy=document["backend_policy"],
            execution_identity=document.get("execution_identity"),
            input_text_sha256=document.get("input_text_sha256"),
        )


def cell_id(
    *,
    backend: str,
    model_path: str,
    system: str,
    phase: str,
    topology: Topology,
    weight_quantization: str,
    kv_cache_dtype: str,
    backend_columns: Mapping[str, str | bool],
    execution: Mapping[str, str] = PLAIN_EXECUTION,
    input_text_sha256: str = "",
) -> str:
    """The name of a cell: `fpm-` and 16 hexadecimal digits of the digest of its identity.

    Precision of the attention kernels is no part of it: variants of it need separate data roots.

    Example
    -------
    >>> auto = {"moe_backend": "auto", "attention_backend": "auto", "enable_wideep": False, "enable_eplb": False}
    >>> cell_id(backend="vllm", model_path="example/slurm-fpm-model", system="gb200", phase="prefill",
    ...         topology=Topology(tp=8, moe_ep=8), weight_quantization="bfloat16", kv_cache_dtype="bfloat16",
    ...         backend_columns=auto)
    'fpm-880f66661adf28cd'
    """
    identity = {
        "backend": backend,
        "model_path": model_path,
        "system": system,
        "phase": phase,
        "topology": topology.document(),
        "weight_quantization": weight_quantization,
        "kv_cache_dtype": kv_cache_dtype,
        **backend_columns,
        **execution,
        "input_text_sha256": input_text_sha256,
        "point_source": POINT_SOURCE,
    }
    return f"fpm-{digest(identity)[:16]}"


def backend_columns(fields: Mapping[str, Any]) -> dict[str, str | bool]:
    """The four identity columns of a backend policy's fields: None stands for `auto`, flags are real booleans.

    >>> backend_columns({"moe_backend": None, "enable_eplb": True})["moe_backend"]
    'auto'
    """
    named = {
        name: "auto" if fields.get(name) is None else str(fields[name]) for name in ("moe_backend", "attention_backend")
    }
    return {**named, **{name: bool(fields.get(name)) for name in ("enable_wideep", "enable_eplb")}}


def _check(document: Any, where: str) -> None:
    def require(holds: bool, name: str, accepted: str, found: Any) -> None:
        if not holds:
            place = f"{where}.{name}" if name else where
            raise OnboardError(f"{place}: expected {accepted}, found {found!r}; plan again", place)

    require(isinstance(document, Mapping), "", "an object", document)
    found = set(document)
    require(
        found in (set(_COMMON_KEYS), {*_COMMON_KEYS, *_EXECUTION_KEYS}),
        "",
        f"the keys {', '.join(_COMMON_KEYS)}, and both or none of {' and '.join(_EXECUTION_KEYS)}",
        sorted(found),
    )
    for name in ("cell_id", "parallel_strategy", "weight_quantization", "kv_cache_dtype"):
        require(isinstance(document[name], str) and bool(document[name]), name, "words", document[name])
    kind, source = document["workload_kind"], document["point_source"]
    require(kind in ("prefill", "decode"), "workload_kind", "prefill or decode", kind)
    require(source == POINT_SOURCE, "point_source", POINT_SOURCE, source)
    dtypes = document["resolved_dtypes"]
    require(isinstance(dtypes, Mapping), "resolved_dtypes", "an object", dtypes)
    require(set(dtypes) == set(_DTYPE_KEYS), "resolved_dtypes", f"the keys {', '.join(_DTYPE_KEYS)}", sorted(dtypes))
    kv = dtypes["kvcache_quant_mode"]
    require(kv == document["kv_cache_dtype"], "resolved_dtypes.kvcache_quant_mode", document["kv_cache_dtype"], kv)
    policy = document["backend_policy"]
    require(isinstance(policy, Mapping), "backend_policy", "an object", policy)
    require(set(policy) == set(_POLICY_KEYS), "backend_policy", f"the keys {', '.join(_POLICY_KEYS)}", sorted(policy))
    fields = policy["aic_fields"]
    require(isinstance(fields, Mapping), "backend_policy.aic_fields", "an object", fields)
    if "execution_identity" not in document:
        return
    identity, text = document["execution_identity"], document["input_text_sha256"]
    require(
        isinstance(identity, Mapping)
        and set(identity) == set(EXECUTION_COLUMNS)
        and all(isinstance(value, str) for value in identity.values()),
        "execution_identity",
        f"the words {', '.join(EXECUTION_COLUMNS)}",
        identity,
    )
    require(isinstance(text, str), "input_text_sha256", "words", text)
