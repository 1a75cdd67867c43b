"""Op-level models: the public performance database priced operator by operator.

Builds the engine of a configuration from one systems root and answers the static queries.
Source: op-level.md section 5; fpm-model.md sections 2.1 and 4.
"""

import operator
import os
from functools import cached_property
from typing import Any

from fpmsdk._ext.native import OpLevelEngine
from fpmsdk._ext.operators import MISSING_FLOPS, NOT_FINITE, UNEVEN_BATCH, Operator
from fpmsdk.errors import (
    ConfigError,
    FpmSdkError,
    MetricsError,
    MissingCapabilityError,
    MissingSystemFlopsError,
    PerfDataNotAvailableError,
    UnknownSystemError,
)
from fpmsdk.opgraph import Deployment, EngineSpec, build_graph, read_model_config
from fpmsdk.opgraph.execution_profile import (
    ExecutionProfile,
    apply_execution_profile,
    copy_retained_files,
    load_execution_profile,
)
from fpmsdk.opgraph.memory import require_weights_fit
from fpmsdk.perfdb import (
    PerfDatabase,
    ResolvedVersion,
    SystemSpec,
    SystemsRoot,
    open_database,
    open_root,
)
from fpmsdk.perfmodel.kind import Verified
from fpmsdk.perfmodel.native import DataSource, NativeKind, explicit_policy, load_source, resolve_version
from fpmsdk.perfmodel.oplevel_explain import OperatorExplainer, summarised
from fpmsdk.perfmodel.oplevel_operators import OperatorCompiler
from fpmsdk.perfmodel.oplevel_readiness import require_tables
from fpmsdk.perfmodel.oplevel_tables import tables_of

# Tokens between two priced steps of a static decode.
_STRIDE = 32
_SERVED_MODES = ("SILICON", "SOL")
_LARGEST_COUNT = 2**32 - 1


class OpLevelKind(NativeKind):
    """An op-level model with the queries that only it answers."""

    def __init__(self, engine: OpLevelEngine, spec: EngineSpec, config: dict[str, Any], source: DataSource) -> None:
        super().__init__("op_level", engine, config, source)
        self.spec = spec
        self._engine = engine
        self._draft_width = (spec.engine["nextn"] or 0) + 1
        self._explainer = OperatorExplainer()

    @cached_property
    def engine_spec_sha256(self) -> str:
        """Digest of the operator graph, the places of data left out."""
        return self.spec.digest()

    def explained_rank(self, rank: int, parts: Any) -> dict[str, Any]:
        """Every operator of one rank with its measurements and the error that their tables suggest."""
        lookups = [
            lookup
            for operator, query in parts
            for lookup in self._explainer.lookups(operator, query, at_sol=self._engine.speed_of_light)
        ]
        latency_ms = sum(lookup["latency_ms"] for lookup in lookups if not lookup["overlapped"])
        return {"rank": rank, "latency_ms": latency_ms, **summarised(lookups), "lookups": lookups}

    def static_phase_latency(self, batch_size: int, input_tokens: int, output_tokens: int, *, prefill: bool) -> float:
        """Latency of a whole prefill, or of all decode steps after the first token."""
        steps = _count("output_tokens", output_tokens) - 1
        if prefill:
            return self.prefill_latency(batch_size, input_tokens, 0)
        batch = _count("batch_size", batch_size, at_least=1) * self._draft_width
        cached = _count("input_tokens", input_tokens)
        total = 0.0
        for step in range(0, steps, _STRIDE):
            total += self._engine.generation_latency(batch, cached + step + 1) * min(_STRIDE, steps - step)
        return total

    def static_phase_diagnostics(
        self, batch_size: int, context_length: int, prefix: int, *, prefill: bool
    ) -> list[dict[str, Any]]:
        """Name, latency, energy, source and speed of light of each operator of one step."""
        if prefill:
            return _rows(
                self._engine.context_breakdown(*_prefill(batch_size, "context_length", context_length, prefix))
            )
        batch, length = _count("batch_size", batch_size, at_least=1), _count("context_length", context_length)
        if prefix != 0:
            raise ConfigError(
                f"invalid engine config: prefix belongs to prefill; a decode step takes 0, found {prefix!r}", "prefix"
            )
        return _rows(self._engine.generation_breakdown(batch * self._draft_width, length + 1))

    def prefill_latency(self, batch_size: int, isl: int, prefix: int) -> float:
        """Latency of one prefill of `isl` tokens, `prefix` of them cached."""
        return self._engine.context_latency(*_prefill(batch_size, "isl", isl, prefix))

    def prefill_latency_total(self, batch_size: int, prefill_tokens: int, kv_tokens: int) -> float:
        """Latency of one prefill, by totals over its requests."""
        batch = _count("batch_size", batch_size, at_least=1)
        tokens, cached = _count("total_prefill_tokens", prefill_tokens), _count("total_kv_read_tokens", kv_tokens)
        if tokens == 0:
            return 0.0
        if tokens < batch:
            raise ConfigError(
                f"invalid engine config: every prefill request computes a token: total_prefill_tokens {tokens} "
                f"is less than batch_size {batch}",
                "total_prefill_tokens",
            )
        # What a request reads in all is a whole number, and so is what of it is cached.
        return self._engine.context_latency(batch, (tokens + cached) // batch - cached // batch, cached // batch)

    def decode_latency_total(self, batch_size: int, past_kv_tokens: int) -> float:
        """Latency of one decode step, by the KV total of its requests."""
        batch = _count("batch_size", batch_size, at_least=1)
        return self._engine.generation_latency(batch, _count("total_past_kv_tokens", past_kv_tokens) // batch)

    def decode_kv_ceiling(self) -> int | None:
        """None: operators extrapolate."""
        return None


def build_op_level(config: dict[str, Any], root_path: str, verified: Verified) -> tuple[OpLevelKind, dict[str, Any]]:
    """The op-level model of a configuration over one systems root, and the configuration that pins it.

    Parameters
    ----------
    verified: contents of files that must not be read again.

    Raises
    ------
    UnknownSystemError, UnlistedVersionError, UnsupportedModelError, PerfDataNotAvailableError: another root or kind of
        model may still answer.
    ConfigError, PerfDataCorruptError: nothing else should; `InfeasibleMemoryError` when the weights do not fit.
    """
    if config["database_mode"] not in _SERVED_MODES:
        raise MissingCapabilityError(
            f"database_mode {config['database_mode']!r} is not part of this release; use {' or '.join(_SERVED_MODES)}"
        )
    profile = config["estimator_config"]["op_level"].get("execution_profile")
    if profile is not None:
        path, digest = profile["path"], profile["sha256"]
        loaded = load_execution_profile(path, digest, content=verified.get(path))
        return _build_profiled(config, root_path, loaded)
    source = load_source(root_path, config["system"], None)
    root = open_root(root_path)
    version = resolve_version(root, config)
    spec, database = _compile(config, root, version)
    if config["database_mode"] == "SILICON":
        require_tables(spec, tables_of(database), config["worker_type"], root.spec(config["system"]))
    return _kind(config, source, version, spec, compile_engine(spec, database, root.spec(config["system"])))


def _build_profiled(
    config: dict[str, Any], root_path: str, profile: ExecutionProfile
) -> tuple[OpLevelKind, dict[str, Any]]:
    import tempfile

    # A profile holds for exactly the files that it lists: price from a copy of those and of nothing else.
    source = load_source(root_path, config["system"], None)
    original = open_root(root_path)
    version = resolve_version(original, config)
    with tempfile.TemporaryDirectory(prefix="fpmsdk-profile-") as folder:
        copy_retained_files(profile, original.path, folder)
        root = SystemsRoot(folder)
        spec, database = _compile(config, root, version, models=original.path)
        spec = apply_execution_profile(profile, spec, config["worker_type"])
        engine = compile_engine(spec, database, root.spec(config["system"]))
    return _kind(config, source, version, spec, engine)


def _compile(
    config: dict[str, Any], root: SystemsRoot, version: ResolvedVersion, *, models: str | None = None
) -> tuple[EngineSpec, PerfDatabase]:
    # The graph of a configuration and the database that prices it; `models` is the root beside which model
    # configurations lie when `root` is only a copy for this model.
    system, backend = config["system"], config["backend"]
    assert version.version is not None
    model = read_model_config(config["model"], [os.path.join(os.path.dirname(models or root.path), "model_configs")])
    deployment = Deployment.from_config(
        config,
        backend_version=version.version,
        sm_version=root.spec(system).sm_version,
        systems_path=models or root.path,
        tolerate_dirless_version=version.tolerate_dirless,
    )
    sharing = config["enable_shared_layer"]
    database = open_database(
        root,
        system,
        backend,
        version.version,
        enable_shared_layer=config["database_mode"] == "SILICON" if sharing is None else sharing,
        strict_provenance=config["strict_provenance"],
        tolerate_dirless=version.tolerate_dirless,
        keep=models is None,
    )

    def lanes(_kind: str, table: str) -> tuple[str, ...]:
        return database.lane_order(table, model.architecture, config["attention_backend"])

    spec = build_graph(model, deployment, lanes)
    if (capacity := root.spec(system).mem_capacity_bytes) is not None:
        require_weights_fit(model, deployment, spec, capacity)
    return spec, database


def engine_spec(config: dict[str, Any]) -> EngineSpec:
    """The specification of a configuration over the first systems root that has its system.

    Raises
    ------
    UnknownSystemError, UnlistedVersionError, UnsupportedModelError, PerfDataNotAvailableError, ConfigError.
    """
    failure: FpmSdkError | None = None
    for path in config["systems_paths"]:
        root = open_root(path)
        try:
            return _compile(config, root, resolve_version(root, config))[0]
        except UnknownSystemError as fault:
            failure = fault
    raise failure or PerfDataNotAvailableError("perf database error: no systems root is configured")


def compile_engine(spec: EngineSpec, database: PerfDatabase, hardware: SystemSpec) -> OpLevelEngine:
    """The compiled engine of a specification over a database.

    Parameters
    ----------
    spec: operators of both phases; its `database_mode` SOL prices from the roofline alone.
    database: tables of the system, backend and version of the specification.
    hardware: description of the system.
    """
    compiler = OperatorCompiler(hardware, tables_of(database))
    return OpLevelEngine(
        [compiler.compile(op) for op in spec.context_ops],
        [compiler.compile(op) for op in spec.generation_ops],
        _Misses(spec).describe,
        speed_of_light=spec.engine["database_mode"] == "SOL",
    )


def _kind(
    config: dict[str, Any], source: DataSource, version: ResolvedVersion, spec: EngineSpec, engine: OpLevelEngine
) -> tuple[OpLevelKind, dict[str, Any]]:
    pinned = config | {
        "backend_version": version.version,
        "transfer_policy": explicit_policy(config["transfer_policy"]),
        "systems_paths": [source.root_path],
    }
    return OpLevelKind(engine, spec, pinned, source), pinned


class _Misses:
    """Turns an operator that cannot answer into an exception that says what is missing and what to do."""

    def __init__(self, spec: EngineSpec) -> None:
        engine = spec.engine
        self._where = f"{engine['system_name']}, {engine['backend']} {engine['backend_version']}"

    def describe(self, missing: Operator, status: int, query: tuple[int, int, int, int]) -> Exception:
        batch, seq_len, prefix, tokens = query
        asked = f"{missing.name} at batch {batch}, length {seq_len}, prefix {prefix}, {tokens} tokens"
        if status == MISSING_FLOPS:
            return MissingSystemFlopsError(
                f"{asked}: {self._where} has no FLOPS for its compute dtype; choose another quantisation"
            )
        if status == UNEVEN_BATCH:
            return MetricsError(f"{asked}: the batch does not divide by the operator's scale_num_tokens")
        if status == NOT_FINITE:
            return MetricsError(f"{asked}: the latency is beyond the range of numbers; check the token counts")
        return PerfDataNotAvailableError(
            f"perf database error: no measurement answers {asked} ({self._where}); "
            "use data that cover this shape, another version or another estimation_mode"
        )


def _rows(breakdown: list[tuple[Operator, tuple[Any, ...]]]) -> list[dict[str, Any]]:
    # Operators of one name are one row, at the place of the first.
    rows: dict[str, dict[str, Any]] = {}
    for part, (_, latency_ms, energy_wms, source, limits) in breakdown:
        sol = None if limits is None else dict(zip(("latency_ms", "math_ms", "memory_ms"), limits, strict=True))
        details: dict[str, Any] = {
            "sol": sol,
            "sol_unavailable_reason": None if sol else "the system has no FLOPS for the compute dtype",
            "fallbacks": [],
        }
        row = rows.get(part.name)
        if row is None:
            rows[part.name] = {
                "name": part.name,
                "latency_ms": latency_ms,
                "energy_wms": energy_wms,
                "source": source,
                "details": details,
            }
            continue
        row["latency_ms"] += latency_ms
        row["energy_wms"] += energy_wms
        row["source"] = source if row["source"] == source else "mixed"
        known = row["details"]["sol"]
        row["details"]["sol"] = None if known is None or sol is None else {key: known[key] + sol[key] for key in sol}
    return list(rows.values())


def _prefill(batch_size: int, name: str, length: int, prefix: int) -> tuple[int, int, int]:
    # Batch, new tokens and prefix of a prefill of `length` tokens a request.
    batch = _count("batch_size", batch_size, at_least=1)
    cached = _count("prefix", prefix)
    new = _count(name, length) - cached
    if new < 1:
        raise ConfigError(
            f"invalid engine config: {name} {length} leaves no token to compute after a prefix of {cached}", name
        )
    _count(f"batch_size x ({name} - prefix)", batch * new)
    return batch, new, cached


def _count(name: str, value: int, *, at_least: int = 0) -> int:
    try:
        count = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = -1
    if not at_least <= count <= _LARGEST_COUNT:
        raise ConfigError(
            f"invalid engine config: {name} must be an integer from {at_least} to {_LARGEST_COUNT}, found {value!r}",
            name,
        )
    return count
