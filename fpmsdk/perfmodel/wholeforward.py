"""Whole-forward models: measured passes of the whole model, looked up by totals.

Builds the engine of a configuration over one systems root and answers the static queries.
Source: fpm-interpolation.md sections 3, 4 and 8; fpm-model.md section 4.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from fpmsdk._ext.passroofline import PassRoofline
from fpmsdk._ext.wholeforward import RESOLUTIONS, DirectEngine, SolAssistedEngine, WholeForwardEngine
from fpmsdk.config.profile import FpmModelProfile, load_fpm_profile
from fpmsdk.config.profile_identity import checkpoint_identity, select_deployment
from fpmsdk.errors import ConfigError, FpmNotCollectedError, FpmUncoveredError, PerfDataWarning, UnsupportedModelError
from fpmsdk.files import sha256
from fpmsdk.opgraph import Deployment, EngineSpec, build_graph, read_model_config
from fpmsdk.opgraph.model_config import read_raw_config
from fpmsdk.perfdb import SystemSpec, SystemsRoot, open_root
from fpmsdk.perfdb.forward_cells import ForwardCell, ForwardTable, open_forward_table
from fpmsdk.perfdb.forward_schema import IDENTITY_COLUMNS, TABLE_FILE, UNRECORDED
from fpmsdk.perfmodel.coverage import CoverageLog
from fpmsdk.perfmodel.kind import Verified
from fpmsdk.perfmodel.leave_one_out import LeaveOneOut, leave_one_out, log_distance
from fpmsdk.perfmodel.native import DataSource, NativeKind, explicit_policy, load_source, resolve_version
from fpmsdk.perfmodel.wholeforward_sol import RooflineRecords
from fpmsdk.perfmodel.wholeforward_steps import decode_totals, mixed_step
from fpmsdk.perfmodel.wholeforward_tables import (
    AssistedCurves,
    assisted_curves_of,
    genuine_points_of,
    strict_curves_of,
)

# Tokens between two priced steps of a static decode.
_STRIDE = 32
_U32_MAX = 2**32 - 1
TRANSFERRED = RESOLUTIONS[-1]
# Parts of a checkpoint's configuration that stand for work beside the language model.
_ENCODERS = ("vision_config", "audio_config")
_PHASES_OF = {"prefill": ("prefill",), "decode": ("decode",), "aggregated": ("prefill", "decode")}
Coordinates = tuple[float, float | None, float]


class WholeForwardKind(NativeKind):
    """A whole-forward model with the queries that only it answers."""

    def __init__(
        self,
        engine: WholeForwardEngine,
        table: ForwardTable,
        cell: ForwardCell,
        config: dict[str, Any],
        source: DataSource,
        graph: EngineSpec | None,
    ) -> None:
        super().__init__("fpm_interpolation", engine, config, source)
        self._graph = graph
        self.table, self.cell = table, cell
        self._engine = engine
        self._kv_ceiling = genuine_points_of(table, cell).decode_kv_ceiling

    @cached_property
    def engine_spec_sha256(self) -> str:
        """Digest of the roofline's graph, of the cell and of how its points were read; the places of data left out."""
        parts = (
            None if self._graph is None else self._graph.digest(),
            self.cell.model_path,
            sorted(self.cell.identity.items()),
            self.table.heals,
        )
        return sha256(msgspec.json.encode(parts))

    def rank_evidence(self, evidence: list[Any]) -> list[dict[str, Any]]:
        """Lookups behind each rank; only direct lookups are told."""
        if not isinstance(self._engine, DirectEngine):
            return []
        return [
            _rank_record(rank, totals, parts, self.cell.model_path) for rank, (totals, parts) in enumerate(evidence)
        ]

    def explained_rank(self, rank: int, parts: tuple[tuple[int, ...], tuple[Any, Any, Any]]) -> dict[str, Any]:
        """The lookups of one rank with their anchors and the error that the table's own points suggest."""
        record = _rank_record(rank, *parts, self.cell.model_path)
        lookups = []
        error_ms: float | None = 0.0
        for query in record["queries"]:
            at = _coordinates(query["query"])
            anchors = [
                point | {"distance": log_distance(_coordinates(point["coordinates"]), at)} for point in query["support"]
            ]
            error = self.report.expected_error(query["phase"], at)
            # A floor is shared by both terms of a marginal cost; its error cancels.
            if not query["decode_baseline"] and error_ms is not None:
                error_ms = None if error is None else error_ms + error * query["latency_ms"]
            lookups.append(
                {
                    "phase": query["phase"],
                    "decode_baseline": query["decode_baseline"],
                    "coordinates": query["query"],
                    "latency_ms": query["latency_ms"],
                    "resolution": query["resolution"],
                    "in_domain": query["resolution"] != TRANSFERRED and _is_between_batches(at[0], query["support"]),
                    "distance": min((anchor["distance"] for anchor in anchors), default=None),
                    "expected_error": error,
                    "anchors": anchors,
                }
            )
        latency = record["latency_ms"]
        return {
            "rank": rank,
            "latency_ms": latency,
            "in_domain": all(lookup["in_domain"] for lookup in lookups),
            "expected_error": error_ms / latency if error_ms is not None and latency > 0.0 else None,
            "lookups": lookups,
        }

    @cached_property
    def report(self) -> LeaveOneOut:
        """The leave-one-out report of the cell, made when it is first needed."""
        return leave_one_out(self.cell, self.table.knees)

    def query_coverage(self) -> dict[str, Any] | None:
        """Counts and gaps of the lookups up to now; None unless they are collected."""
        return None if self._engine.coverage is None else self._engine.coverage.snapshot()

    def static_phase_latency(self, batch_size: int, input_tokens: int, output_tokens: int, *, prefill: bool) -> float:
        """Latency of a whole prefill, or of all decode steps after the first token."""
        if prefill:
            return self.prefill_latency(batch_size, input_tokens, 0)
        total = 0.0
        steps = _whole("output_tokens", output_tokens, 0) - 1
        for step in range(0, steps, _STRIDE):
            length = _whole("input_tokens", input_tokens, 1) + step + 1
            latency = self.decode_latency_total(batch_size, batch_size * length)
            total += latency * min(_STRIDE, steps - step)
        return total

    def prefill_latency(self, batch_size: int, isl: int, prefix: int) -> float:
        """Latency of one prefill of `isl` tokens a request, `prefix` of them cached."""
        batch, cached = _whole("batch_size", batch_size, 1), _whole("prefix", prefix, 0)
        new = _whole("isl - prefix", isl - cached, 1)
        return self._engine.prefill_latency(batch, batch * new, batch * cached)

    def prefill_latency_total(self, batch_size: int, prefill_tokens: int, kv_tokens: int) -> float:
        """Latency of one prefill, by totals over its requests."""
        batch = _whole("batch_size", batch_size, 1)
        tokens = _whole("total_prefill_tokens", prefill_tokens, batch, "each prefill request must compute a token")
        return self._engine.prefill_latency(batch, tokens, _whole("total_kv_read_tokens", kv_tokens, 0))

    def decode_latency_total(self, batch_size: int, past_kv_tokens: int) -> float:
        """Latency of one decode step, by the KV total of its requests."""
        batch = _whole("batch_size", batch_size, 1)
        return self._engine.decode_latency(batch, _whole("total_past_kv_tokens", past_kv_tokens, 0))

    def decode_latency(self, batch_size: int, context_length: int, verify_width: int) -> float:
        """Latency of one decode step, told per request."""
        return self._engine.decode_latency(*decode_totals(batch_size, context_length, verify_width))

    def mixed_step(
        self, ctx_tokens: int, gen_requests: int, isl: int, osl: int, prefix: int
    ) -> tuple[float, float, float, float]:
        """Latency of one scheduler step, with its parts."""
        names = ("ctx_tokens", "gen_requests", "isl", "osl", "prefix")
        asked = (ctx_tokens, gen_requests, isl, osl, prefix)
        return mixed_step(self._engine, *(_whole(name, value, 0) for name, value in zip(names, asked, strict=True)))

    def decode_kv_ceiling(self) -> int | None:
        """Largest KV total of a decode point measured with KV of its own; None without any."""
        return self._kv_ceiling


def _whole(name: str, value: Any, least: int, reason: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _U32_MAX:
        raise ConfigError(
            f"invalid engine config: {name} must be an integer in {least}..={_U32_MAX}, found {value!r}"
            f"{': ' + reason if reason else ''}",
            name,
        )
    return value


def _rank_record(rank: int, totals: tuple[int, ...], parts: tuple[Any, Any, Any], model_path: str) -> dict[str, Any]:
    prefill, decode, baseline = ((None if part is None else part[0]) for part in parts)
    marginal = None if decode is None or baseline is None else max(decode - baseline, 0.0)
    latency = prefill if prefill is not None else (decode or 0.0)
    num_prefill, prefill_tokens, prefill_kv, num_decode, decode_kv = totals
    at_prefill, at_decode = (num_prefill, prefill_tokens, prefill_kv), (num_decode, None, decode_kv)
    asked = (("prefill", False, at_prefill), ("decode", False, at_decode), ("decode", True, at_decode))
    return {
        "rank": rank,
        "latency_ms": latency if marginal is None else latency + marginal,
        "prefill_ms": prefill,
        "decode_ms": decode,
        "decode_baseline_ms": baseline,
        "marginal_decode_ms": marginal,
        "queries": [
            {
                "phase": phase,
                "model_path": model_path,
                "decode_baseline": is_baseline,
                "query": _named(at),
                "resolution": part[1],
                "latency_ms": part[0],
                "support": [
                    {"coordinates": _named(point), "latency_ms": latency_ms, "weight": weight}
                    for point, latency_ms, weight in part[2]
                ],
            }
            for (phase, is_baseline, at), part in zip(asked, parts, strict=True)
            if part is not None
        ],
    }


def _is_between_batches(batch: float, support: Sequence[Mapping[str, Any]]) -> bool:
    # A batch beyond those of the anchors was taken for one of them, or answered by the row on one side of it.
    batches = [point["coordinates"]["batch_size"] for point in support]
    return bool(min(batches) <= batch <= max(batches))


def _coordinates(named: Mapping[str, Any]) -> Coordinates:
    return named["batch_size"], named["total_prefill_tokens"], named["total_kv_read_tokens"]


def _named(coordinates: Coordinates) -> dict[str, float | None]:
    batch, tokens, kv = coordinates
    return {
        "batch_size": float(batch),
        "total_prefill_tokens": None if tokens is None else float(tokens),
        "total_kv_read_tokens": float(kv),
    }


# --- construction ---


def build_whole_forward(
    config: dict[str, Any], root_path: str, verified: Verified
) -> tuple[WholeForwardKind, dict[str, Any]]:
    """The whole-forward model of a configuration over one systems root, and the configuration that pins it.

    Raises
    ------
    UnknownSystemError, UnlistedVersionError, UnsupportedModelError, PerfDataNotAvailableError: another root or kind of
        model may still answer.
    ConfigError, PerfDataCorruptError: nothing else should; `InfeasibleMemoryError` when the profile does not fit.
    """
    system, backend = config["system"], config["backend"]
    options = dict(config["estimator_config"]["fpm_interpolation"])
    source = load_source(root_path, system, _external(options))
    root = open_root(root_path)
    hardware = root.spec(system)
    version = resolve_version(root, config).version
    assert version is not None
    path = _table_path(options, root, system, backend, version)
    profile = None if config["fpm_profile"] is None else load_fpm_profile(config["fpm_profile"])
    if profile is not None:
        _require_fit(profile, config, hardware)
    graph = None if options["method"] == "direct" else _graph(config, root, hardware, version)
    table = open_forward_table(path, system, backend, version)
    cell = table.select(config["model"], _identity(config, profile, graph))
    _require_phases(table, cell, config["worker_type"], direct=graph is None)
    if graph is not None and cell.kept_fake_rows:
        warnings.warn(
            f"{path}: {cell.kept_fake_rows} decode points of {cell.model_path!r} were measured without KV of their own "
            f"and stay as recorded ({cell.replaced_fake_rows} were extrapolated from real ones); measure "
            "them with real KV",
            PerfDataWarning,
            stacklevel=2,
        )
    engine = _engine(table, cell, graph, hardware, options)
    if "fpm_parquet_path" in options:
        options["fpm_parquet_path"] = path
    pinned = config | {
        "backend_version": version,
        "transfer_policy": explicit_policy(config["transfer_policy"]),
        "systems_paths": [root.path],
        "estimator_config": config["estimator_config"] | {"fpm_interpolation": options},
    }
    return WholeForwardKind(engine, table, cell, pinned, source, graph), pinned


def _require_fit(profile: FpmModelProfile, config: Mapping[str, Any], hardware: SystemSpec) -> None:
    # A deployment that no GPU of the system holds was not measured on it.
    deployment = select_deployment(profile, config)
    if hardware.mem_capacity_bytes is not None and deployment.resources.memory_source != "pending":
        from fpmsdk.launch.cache_budget import require_fit  # loads how engines are launched

        require_fit(profile, deployment, hardware.mem_capacity_bytes)


def _external(options: Mapping[str, Any]) -> str | None:
    path: str | None = options.get("fpm_parquet_path")
    return None if path is None else os.path.abspath(path)


def _table_path(options: Mapping[str, Any], root: SystemsRoot, system: str, backend: str, version: str) -> str:
    if (external := _external(options)) is not None:
        return external
    return os.path.join(root.tree(system).data_dir, backend, version, TABLE_FILE)


def _graph(config: dict[str, Any], root: SystemsRoot, hardware: SystemSpec, version: str) -> EngineSpec:
    bundles = [os.path.join(os.path.dirname(root.path), "model_configs")]
    model = read_model_config(config["model"], bundles)
    encoders = [name for name in _ENCODERS if read_raw_config(config["model"], bundles).get(name)]
    if encoders and not config["estimator_config"]["fpm_interpolation"].get("text_only", False):
        raise UnsupportedModelError(
            f"{config['model']} has an encoder ({', '.join(encoders)}), which whole-forward tables do not "
            "time; set estimator_config.fpm_interpolation.text_only for work without images and sound",
            "estimator_config.fpm_interpolation.text_only",
        )
    # A table knows decode context parallelism by its identity; the operators of a pass are the same.
    deployment = Deployment.from_config(
        config, backend_version=version, sm_version=hardware.sm_version, systems_path=root.path, dcp=None
    )
    return build_graph(model, deployment, lambda _kind, _table: ())


def _identity(config: dict[str, Any], profile: FpmModelProfile | None, graph: EngineSpec | None) -> dict[str, str]:
    """The cell that stands for a deployment: what its profile states, or what its graph runs with."""
    if profile is not None:
        deployment = select_deployment(profile, config)
        identity = (
            deployment.match_identity()
            | checkpoint_identity(profile)
            | deployment.execution_identity(profile.model_revision)
        )
    else:
        assert graph is not None  # direct needs a profile
        attention = config["attention_backend"]
        values = (
            graph.precision.gemm,
            graph.precision.moe,
            graph.precision.fmha,
            graph.precision.comm,
            graph.precision.kv_cache,
            *(str(config[name]) for name in ("tp", "pp", "attention_dp")),
            *(str(config.get(name) or 1) for name in ("moe_tp_size", "moe_ep_size", "cp_size")),
            "auto",
            "auto" if attention in (None, "", "flashinfer") else attention,
            "False",
            "False",
        )
        identity = dict(zip(IDENTITY_COLUMNS, values, strict=True))
        for mode in config["estimator_config"]["fpm_interpolation"].get("unrecorded_quant_modes", ()):
            identity[UNRECORDED[mode]] = ""
    if config["fpm_fmha_quant_mode"] is not None:
        identity["fmha_quant_mode"] = config["fpm_fmha_quant_mode"]
    if config["dcp"] is not None:
        identity["dcp"] = str(config["dcp"])
    return identity


def _require_phases(table: ForwardTable, cell: ForwardCell, worker_type: str, *, direct: bool) -> None:
    genuine = genuine_points_of(table, cell)
    strict = {"prefill": genuine.num_prefill, "decode": genuine.num_decode}
    for phase in _PHASES_OF[worker_type]:
        if not (strict[phase] if direct else len(getattr(cell, phase))):
            kind = f"direct FPM {phase}" if direct else f"FPM {phase}"
            raise FpmNotCollectedError(
                f"perf database error: {kind} interpolation has no genuine measurements for {cell.model_path!r} in "
                f"{table.path}; collect {phase} points of this deployment"
            )


def _engine(
    table: ForwardTable,
    cell: ForwardCell,
    graph: EngineSpec | None,
    hardware: SystemSpec,
    options: Mapping[str, Any],
) -> WholeForwardEngine:
    continuous = options.get("ragged_edges") == "continuous"
    if graph is None:
        describe = DirectMisses(cell).describe
        collects = options.get("collect_coverage", False)
        log = CoverageLog(cell.model_path, cell.identity, cell.cell_ids, describe) if collects else None
        return DirectEngine(*strict_curves_of(table, cell), describe, log, continuous=continuous)
    curves = assisted_curves_of(table, cell)
    rooflines = RooflineRecords(hardware)
    context, generation = (PassRoofline(rooflines.of(ops)) for ops in (graph.context_ops, graph.generation_ops))
    return SolAssistedEngine(
        curves.prefill,
        curves.decode,
        curves.rungs,
        curves.batch_limit,
        context,
        generation,
        SolMisses(cell, curves, {"prefill": context.names, "decode": generation.names}).describe,
        continuous=continuous,
    )


# --- misses ---


MissedPoint = tuple[str, Coordinates]


def _to_measure(points: Sequence[MissedPoint]) -> str:
    spelled = "; ".join(f"{phase} at {_spelled(phase, coordinates)}" for phase, coordinates in points)
    return f"the smallest set of points to measure is {spelled}"


def _spelled(phase: str, coordinates: Coordinates) -> str:
    batch, tokens, kv = coordinates
    prefill = f"total_prefill_tokens={tokens:g}, " if phase == "prefill" else ""
    return f"batch_size={batch:g}, {prefill}total_kv_read_tokens={kv:g}"


class DirectMisses:
    """Explains a direct lookup without an answer."""

    def __init__(self, cell: ForwardCell) -> None:
        self._model = cell.model_path

    def describe(
        self,
        phase: str,
        is_baseline: bool,
        coordinates: Coordinates,
        status: str,
        further: Sequence[MissedPoint] = (),
    ) -> FpmUncoveredError:
        """The exception for one lookup; `further` ones of the same iteration have no answer either."""
        if status == "not_positive":
            reason = "the interpolated latency is not finite and positive"
        elif phase == "prefill":
            reason = "no same-batch, two-sided measured support in either token-first or KV-first interpolation"
        else:
            reason = "no two-sided covered batch bracket within one capture regime"
        purpose = " baseline" if is_baseline else ""
        points = ((phase, coordinates), *further)
        asked = _spelled(phase, coordinates)
        return FpmUncoveredError(
            f"perf database error: FPM direct {phase} query ({asked}){purpose} for model_path={self._model!r} has no "
            f"genuine measured support: {reason}; collect matching real points: {_to_measure(points)}",
            points,
        )


class SolMisses:
    """Explains a lookup that neither curves nor the roofline answer."""

    def __init__(
        self, cell: ForwardCell, curves: AssistedCurves, without_formula: Mapping[str, tuple[str, ...]]
    ) -> None:
        prefill, decode = curves.prefill_curves, curves.decode_curves
        self._model = cell.model_path
        self._domains = {
            "prefill": (_extent(prefill.batch), _extent(prefill.x), _extent(prefill.second)),
            "decode": (_extent(decode.batch), None, _extent(decode.x)),
        }
        self._decode, self._rungs = decode, curves.rungs
        self._without_formula = without_formula

    def describe(
        self,
        phase: str,
        is_baseline: bool,
        coordinates: Coordinates,
        status: str,
        further: Sequence[MissedPoint] = (),
    ) -> FpmUncoveredError:
        """The exception for one lookup; `further` ones of the same iteration have no answer either."""
        reasons = {
            "no_near_site": "no site within max_site_distance",
            "no_usable_site": "no usable neighbour site",
            "not_positive": "the result is not finite and positive",
        }
        axes = {"outside_batch": 0, "outside_tokens": 1, "outside_kv": 2}
        names = ("batch_size", "total_prefill_tokens", "total_kv_read_tokens")
        asked = _spelled(phase, coordinates)
        points = ((phase, coordinates), *further)
        if status in axes:
            axis = axes[status]
            low, high = self._domains[phase][axis] or (0, 0)
            text = (
                f"FPM {phase} query {names[axis]}={coordinates[axis]:g} is outside the collected domain "
                f"[{low:g}, {high:g}] for model_path={self._model!r}"
            )
        elif status == "no_bracket":
            text = f"FPM decode query ({asked}): {self._bracket(coordinates)} for model_path={self._model!r}"
        else:
            missing = self._without_formula[phase]
            unavailable = f"; SOL roofline unavailable: {', '.join(missing)} has no formula" if missing else ""
            text = f"no data to anchor query {{{asked}}} ({reasons[status]}{unavailable})"
        return FpmUncoveredError(f"perf database error: {text}; {_to_measure(points)}", points)

    def _bracket(self, coordinates: Coordinates) -> str:
        batch, _, kv = coordinates
        spans = {
            float(b): (self._decode.x[self._decode.first[i]], self._decode.x[self._decode.first[i + 1] - 1])
            for i, b in enumerate(self._decode.batch)
        }
        rungs = [float(b) for b in self._rungs]
        low = max(rung for rung in rungs if rung < batch) + 1
        high = min((rung for rung in rungs if rung >= batch), default=max(spans))
        rows = " and ".join(f"row {b:g} over [{spans[b][0]:g}, {spans[b][1]:g}]" for b in (low, high))
        return f"neither {rows} holds total_kv_read_tokens={kv:g}"


def _extent(values: Any) -> tuple[float, float] | None:
    return (float(values.min()), float(values.max())) if len(values) else None
