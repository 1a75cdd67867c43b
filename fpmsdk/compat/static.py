"""Static estimates of a batch from an operator model, in the objects that the Planner's bootstrap sweep works with.

A database names where latencies come from, a model what runs, and a backend answers: latency of the whole prefill and
of the whole decode of a batch of equal requests, and the memory of a rank. Numbers are those of `op_level`.

Source: clients.md section 1, tier 1; op-level.md section 5.4.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from fpmsdk.config import resolve_systems_paths
from fpmsdk.errors import ConfigError, PerfDataNotAvailableError, UnknownSystemError

if TYPE_CHECKING:
    from fpmsdk.opgraph import ModelConfig as ModelShape
    from fpmsdk.perfmodel.model import ForwardPassPerfModel

Mode = str | Enum  # a quantisation mode, or the member of an enumeration that is named after it

PHASES = ("static", "static_ctx", "static_gen")
STRIDE = 32
_GIB = 1 << 30


@dataclass
class ModelConfig:
    """How a model is divided over GPUs and in which precisions it runs; None leaves a precision to the checkpoint."""

    tp_size: int = 1
    pp_size: int = 1
    gemm_quant_mode: Mode | None = None
    moe_quant_mode: Mode | None = None
    kvcache_quant_mode: Mode | None = None
    fmha_quant_mode: Mode | None = None
    comm_quant_mode: Mode | None = None
    moe_tp_size: int | None = None
    moe_ep_size: int | None = None
    attention_dp_size: int = 1
    nextn: int = 0


@dataclass
class RuntimeConfig:
    """A batch of equal requests of one attention-DP rank; `prefix` of the `isl` prompt tokens are cached."""

    batch_size: int
    isl: int
    osl: int
    beam_width: int = 1
    prefix: int = 0


class Database(NamedTuple):
    """Measurements of one system, backend and version below a systems root; `system_spec` is its hardware file."""

    system: str
    backend: str
    version: str
    root: str
    system_spec: Mapping[str, Any]


class StaticModel(NamedTuple):
    """A model, divided."""

    model_path: str
    config: ModelConfig
    backend: str


class StaticSummary:
    """What one batch takes."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def get_summary_df(self) -> Any:
        """The figures as a pandas frame of one row."""
        import pandas as pd

        return pd.DataFrame([self.row])


def latest_version(system: str, backend: str, systems_paths: str | list[str] | None = None) -> str | None:
    """The version that answers when none is asked for; None where nothing was measured.

    Example
    -------
    >>> latest_version("no-such-system", "vllm") is None
    True
    """
    found = _resolved(system, backend, None, systems_paths)
    return None if found is None else found[1]


def open_database(
    system: str, backend: str, version: str | None, systems_paths: str | list[str] | None = None
) -> Database | None:
    """The database of a version; None where the system, the backend or the version was not measured."""
    from fpmsdk.perfdb.documents import read_mapping

    found = _resolved(system, backend, version, systems_paths)
    if found is None:
        return None
    root, literal = found
    return Database(system, backend, literal, root, read_mapping(os.path.join(root, f"{system}.yaml")))


def _resolved(
    system: str, backend: str, version: str | None, systems_paths: str | list[str] | None
) -> tuple[str, str] | None:
    from fpmsdk.perfdb import open_root

    entries = [systems_paths] if isinstance(systems_paths, str) else systems_paths or []
    try:
        paths = resolve_systems_paths(entries)
    except ConfigError:
        if entries:
            raise
        return None  # no data is installed
    for path in paths:
        root = open_root(path)
        try:
            found = root.resolve_version(system, backend, version).version
        except (UnknownSystemError, PerfDataNotAvailableError):
            continue
        if found is not None:
            return root.path, found
    return None


class StaticBackend:
    """Answers for one serving engine.

    Parameters
    ----------
    name: vllm, sglang or trtllm.
    """

    def __init__(self, name: str) -> None:
        if name not in ("vllm", "sglang", "trtllm"):
            raise ConfigError(f"unknown backend {name!r}; expected vllm, sglang or trtllm", "backend")
        self.name = name

    def run_static(
        self, model: StaticModel, database: Database, runtime_config: RuntimeConfig, mode: str, stride: int = STRIDE
    ) -> StaticSummary:
        """Latency in ms and throughput of a batch, prefilled and decoded to its end.

        Parameters
        ----------
        mode: `static` for both phases, `static_ctx` for the prefill, `static_gen` for the decode alone.
        stride: decode steps priced as one; 32 is the only one.

        Raises
        ------
        ConfigError: another mode, stride or beam width, or a configuration that is refused.
        PerfDataNotAvailableError: the data do not cover the batch.
        """
        if mode not in PHASES:
            raise ConfigError(f"unknown mode {mode!r}; expected one of {', '.join(PHASES)}", "mode")
        if stride != STRIDE or runtime_config.beam_width != 1:
            raise ConfigError(
                f"a stride of {STRIDE} and a beam width of 1 are served, found {stride} and {runtime_config.beam_width}"
            )
        batch, isl, osl = runtime_config.batch_size, runtime_config.isl, runtime_config.osl
        priced = _priced(model, database)
        context_ms = generation_ms = 0.0
        if mode != "static_gen":
            context_ms = priced.predict_prefill_latency(batch, isl, runtime_config.prefix)
        if mode != "static_ctx":
            generation_ms = priced.static_phase_latency(
                batch_size=batch, input_tokens=isl, output_tokens=osl, prefill=False
            )
        return StaticSummary(_row(model, database, runtime_config, mode, context_ms, generation_ms))

    def _get_memory_usage(  # the name that clients call
        self,
        model: StaticModel,
        database: Database,
        batch_size: int,
        beam_width: int,
        isl: int,
        osl: int,
        num_tokens: int = 0,
        prefix: int = 0,
    ) -> dict[str, float]:
        """GiB of one rank by what holds them, and their `total`; `num_tokens` pass at once, 0: all prompts."""
        from fpmsdk.opgraph import Deployment, build_graph
        from fpmsdk.opgraph.kv_layout import kv_bytes_per_sequence
        from fpmsdk.opgraph.memory import RankMemory, SystemMemory
        from fpmsdk.perfdb import open_root

        hardware = open_root(database.root).spec(database.system)
        config = _config(model, database)
        shape = _shape(model.model_path, database.root)
        deployment = Deployment.from_config(
            config, backend_version=database.version, sm_version=hardware.sm_version, systems_path=database.root
        )
        spec = build_graph(shape, deployment, lambda _kind, _table: ())
        system = SystemMemory(hardware.mem_capacity_bytes or 0, hardware.nccl_mem_bytes, hardware.other_mem_bytes)
        tokens = num_tokens or (isl - prefix) * batch_size
        rank = RankMemory.of(shape, deployment, spec, system, tokens)
        cache = batch_size * kv_bytes_per_sequence(shape, spec.precision, deployment.tp, isl + beam_width * osl)
        parts = {
            "weights": rank.weights,
            "activations": rank.activations * (1 + model.config.nextn),
            "kvcache": cache,
            "nccl": rank.comm,
            "others": rank.runtime,
        }
        return {"total": sum(parts.values()) / _GIB} | {name: size / _GIB for name, size in parts.items()}


def _row(
    model: StaticModel, database: Database, runtime: RuntimeConfig, mode: str, context_ms: float, generation_ms: float
) -> dict[str, Any]:
    config, osl = model.config, runtime.osl
    gpus = config.tp_size * config.pp_size * config.attention_dp_size
    global_batch = runtime.batch_size * config.attention_dp_size
    tpot_ms = generation_ms / (osl - 1) if osl > 1 else 0.0
    request_ms = context_ms + generation_ms
    requests_per_s = global_batch / request_ms * 1000 * config.pp_size if request_ms > 0 else 0.0
    tokens = {"static": osl, "static_gen": osl - 1, "static_ctx": 1}[mode]
    return {
        "model": model.model_path,
        "isl": runtime.isl,
        "osl": osl,
        "prefix": runtime.prefix,
        "concurrency": global_batch,
        "bs": runtime.batch_size,
        "global_bs": global_batch,
        "ttft": context_ms,
        "tpot": tpot_ms,
        "seq/s": requests_per_s,
        "seq/s/gpu": requests_per_s / gpus,
        "tokens/s": requests_per_s * tokens,
        "tokens/s/gpu": requests_per_s * tokens / gpus,
        "tokens/s/user": 1000.0 / tpot_ms if tpot_ms > 0 else 0.0,
        "request_latency": request_ms,
        "context_latency": context_ms,
        "generation_latency": generation_ms,
        "num_total_gpus": gpus,
        "tp": config.tp_size,
        "pp": config.pp_size,
        "dp": config.attention_dp_size,
        "moe_tp": config.moe_tp_size,
        "moe_ep": config.moe_ep_size,
        "backend": database.backend,
        "version": database.version,
        "system": database.system,
    }


def _config(model: StaticModel, database: Database) -> dict[str, Any]:
    config = model.config
    written = {
        "model": model.model_path,
        "system": database.system,
        "backend": model.backend,
        "backend_version": database.version,
        "worker_type": "aggregated",
        "estimation_mode": "op_level",
        "systems_paths": [database.root],
        "tp": config.tp_size,
        "pp": config.pp_size,
        "attention_dp": config.attention_dp_size,
        "nextn": config.nextn,
    }
    if _shape(model.model_path, database.root).is_moe:
        # Clients give a dense model sizes of experts, too; they divide nothing.
        written |= {"moe_tp_size": config.moe_tp_size, "moe_ep_size": config.moe_ep_size}
    for field in ("gemm_quant_mode", "moe_quant_mode", "kvcache_quant_mode", "fmha_quant_mode", "comm_quant_mode"):
        mode = getattr(config, field)
        written[field] = mode.name if isinstance(mode, Enum) else mode
    return {field: value for field, value in written.items() if value is not None}


@lru_cache(maxsize=16)
def _shape(model_path: str, root: str) -> "ModelShape":
    from fpmsdk.opgraph import read_model_config

    return read_model_config(model_path, [os.path.join(os.path.dirname(root), "model_configs")])


def _priced(model: StaticModel, database: Database) -> "ForwardPassPerfModel":
    config = _config(model, database)
    return _built(tuple(sorted((key, tuple(v) if isinstance(v, list) else v) for key, v in config.items())))


@lru_cache(maxsize=16)
def _built(items: tuple[tuple[str, Any], ...]) -> "ForwardPassPerfModel":
    # A sweep asks one deployment hundreds of times.
    from fpmsdk.perfmodel.model import ForwardPassPerfModel

    return ForwardPassPerfModel.best_available(
        {key: list(value) if isinstance(value, tuple) else value for key, value in items}
    )


def compile_engine(
    model_path: str, system: str, backend: str, backend_version: str | None = None, **sizes: Any
) -> bytes:
    """The engine specification of a deployment, as JSON.

    Parameters
    ----------
    model_path, system, backend, backend_version: what is deployed.
    sizes: further fields of the canonical configuration, or their aliases such as `tp_size`.

    Raises
    ------
    ConfigError: a field is unknown or refused.
    """
    from fpmsdk.perfmodel.model import ForwardPassPerfModel
    from fpmsdk.perfmodel.oplevel import engine_spec

    written = {"model": model_path, "system": system, "backend": backend, "worker_type": "aggregated"} | sizes
    if backend_version is not None:
        written["backend_version"] = backend_version
    config = ForwardPassPerfModel.normalize_config(written | {"estimation_mode": "op_level"})
    return json.dumps(engine_spec(config).to_dict(), separators=(",", ":")).encode()


def model_facts(model_path: str) -> dict[str, Any]:
    """Shape of a model by the names of its fields, its longest context and its `config.json`.

    Raises
    ------
    ModelConfigError, UnsupportedModelError: see `fpmsdk.opgraph.read_model_config`.
    """
    import msgspec

    from fpmsdk.opgraph.model_config import read_model_config, read_raw_config

    search = [os.path.join(os.path.dirname(root), "model_configs") for root in resolve_systems_paths([])]
    shape = msgspec.structs.asdict(read_model_config(model_path, search))
    return shape | {
        "max_position_embeddings": shape["context_length"],
        "raw_config": read_raw_config(model_path, search),
    }
