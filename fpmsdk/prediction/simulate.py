"""One prediction without files: what a deployment makes of its workload, or why it makes nothing of it.

Source: predict-recommend.md sections 1.2, 4 and 5.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from fpmsdk.errors import FpmUncoveredError, PerfDataNotAvailableError, ReplayError, TimingError
from fpmsdk.prediction.compile import compile_config, replay_options
from fpmsdk.prediction.compile.workload import workload_of
from fpmsdk.prediction.config import PredictConfig, TraceSource
from fpmsdk.prediction.deployment import ModelCache, SizedRole, sized_roles
from fpmsdk.prediction.kv_load import kv_load_of
from fpmsdk.prediction.plays import play_evidence
from fpmsdk.prediction.provenance import provenance_of
from fpmsdk.prediction.report import capacity_of, flat_report
from fpmsdk.replay import replay_trace
from fpmsdk.replay.report import ReplayReport
from fpmsdk.replay.trace import Trace

Status = Literal["completed", "no_completed_requests", "uncovered", "failed"]


class TraceCache(Struct):
    """Workloads by what describes them, shared by predictions of one process; safe to use from several threads."""

    _workloads: dict[bytes, tuple[Trace, dict[str, Any]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, config: PredictConfig, kv_concurrency: int | None) -> tuple[Trace, dict[str, Any]]:
        """The requests and load options of a configuration; raises as `workload_of`."""
        first = next(iter(config.roles.values()))
        key = msgspec.json.encode(
            [config.traffic.model_dump(mode="json"), kv_concurrency, first.kv_cache.block_size], order="deterministic"
        )
        with self._lock:
            if key not in self._workloads:
                self._workloads[key] = workload_of(config, kv_concurrency)
            return self._workloads[key]


class Simulation(Struct, frozen=True, dict=True):
    """How a prediction ended.

    Attributes
    ----------
    report: the flat figures of `prediction.json`; None when the replay did not end.
    replay: the replay behind it.
    coverage: how measured tables answered, where that was counted.
    error: why there is no result.
    kv_load: what a share of the cache came to, as `concurrency`, `capacity_requests` and `capacity_tokens`.
    provenance: what priced the passes of each role.
    roles: the sized workers by role.
    """

    status: Status
    report: dict[str, Any] | None
    replay: ReplayReport | None
    coverage: Mapping[str, Any] | None
    error: str | None
    kv_load: dict[str, Any] | None
    provenance: Mapping[str, Mapping[str, Any]]
    roles: Mapping[str, SizedRole]

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """A record for every request; empty without a replay."""
        if self.replay is None:
            return []
        records: list[dict[str, Any]] = json.loads(self.replay.to_json())["per_request"]
        return records

    @property
    def capacity_by_role(self) -> dict[str, dict[str, Any]]:
        """The cache of one rank of each role: blocks and their tokens, or bytes of a grouped cache."""
        return {name: capacity_of(role) for name, role in self.roles.items()}

    def to_pandas(self) -> Any:
        """A data frame with a row for every request.

        Raises
        ------
        ImportError: pandas is not installed.
        """
        import pandas  # an optional library

        return pandas.DataFrame.from_records(self.records)


class Prepared(Struct, frozen=True):
    """A prediction with everything built and read that its replay needs.

    Attributes
    ----------
    roles: the sized workers by role.
    trace, load: the requests, and the options of the replay that say how they arrive.
    kv_load: as in `Simulation`.
    """

    config: PredictConfig
    roles: Mapping[str, SizedRole]
    trace: Trace
    load: Mapping[str, Any]
    kv_load: dict[str, Any] | None


def simulate(
    config: PredictConfig, *, models: ModelCache | None = None, traces: TraceCache | None = None
) -> Simulation:
    """Replay the workload of a configuration on its deployment; the replay itself runs without the GIL.

    Parameters
    ----------
    config: the deployment and its workload.
    models, traces: what predictions of one process share; None shares nothing.

    Raises
    ------
    ConfigError, TraceError, TimingError, PerfDataNotAvailableError, InfeasibleMemoryError, NoCapacityError: the
        deployment or the workload cannot be built.
    ReplayInterrupted: Ctrl-C.

    Source: predict-recommend.md section 4.

    >>> timing = {"type": "fixed", "prefill_ms": 10, "decode_ms": 1}
    >>> worker = {"timing": timing, "kv_cache": {"capacity": {"type": "fixed", "blocks": 64}}}
    >>> config = PredictConfig.model_validate({
    ...     "traffic": {"source": {"type": "synthetic", "input_tokens": 64, "output_tokens": 3},
    ...                 "load": {"type": "concurrency", "concurrency": 1}, "stop": {"requests": 2}},
    ...     "engine": {"model": "org/m", "hardware": "any", "workers": {"aggregated": worker}}})
    >>> simulate(config).report["mean_ttft_ms"]
    10.0
    """
    return replay_prepared(prepare(config, models=models, traces=traces))


def prepare(config: PredictConfig, *, models: ModelCache | None = None, traces: TraceCache | None = None) -> Prepared:
    """Build what the replay of a configuration needs; parameters and errors are those of `simulate`."""
    return _prepared(config, sized_roles(compile_config(config), models or ModelCache()), traces)


def replay_on(config: PredictConfig, roles: Mapping[str, SizedRole], traces: TraceCache | None = None) -> Simulation:
    """`simulate` on workers that are sized already."""
    return replay_prepared(_prepared(config, roles, traces))


def _prepared(config: PredictConfig, roles: Mapping[str, SizedRole], traces: TraceCache | None) -> Prepared:
    kv_load = kv_load_of(config, roles)
    trace, load = (traces or TraceCache()).get(config, None if kv_load is None else kv_load.concurrency)
    return Prepared(config, roles, trace, load, None if kv_load is None else kv_load.document())


def replay_prepared(prepared: Prepared, *, record_passes: bool = False) -> Simulation:
    """The replay of what `prepare` has built.

    Parameters
    ----------
    record_passes: keep a row for every pass, which the details of a prediction are made from.

    Raises
    ------
    ReplayInterrupted: Ctrl-C.
    """
    config, roles = prepared.config, prepared.roles
    provenance = {name: provenance_of(config, role) for name, role in roles.items()}
    try:
        replay = replay_trace(
            prepared.trace,
            **system_of(roles),
            **prepared.load,
            **replay_options(config),
            record_passes=record_passes,
            allow_empty=True,
        )
    except (ReplayError, TimingError, PerfDataNotAvailableError) as fault:
        text: str | None = getattr(fault, "fpm_query_coverage", None)
        status: Status = "uncovered" if isinstance(fault, FpmUncoveredError) else "failed"
        coverage = None if text is None else json.loads(text)
        return Simulation(status, None, None, coverage, str(fault), prepared.kv_load, provenance, roles)
    report = flat_report(config, roles, replay, provenance)
    result = Simulation(
        "completed" if report["completed_requests"] else "no_completed_requests",
        report,
        replay,
        replay.fpm_query_coverage,
        None,
        prepared.kv_load,
        provenance,
        roles,
    )
    if prepared.kv_load is not None:
        report["kv_load"] = prepared.kv_load
    source = config.traffic.source
    if isinstance(source, TraceSource) and source.format == "weka":
        report |= play_evidence(prepared.trace, result.records)
    return result


def system_of(roles: Mapping[str, SizedRole]) -> dict[str, Any]:
    """The workers as arguments of `replay_trace`."""
    main = roles.get("aggregated") or roles["decode"]
    system: dict[str, Any] = {"launch": main.launch, "timing": main.timing, "num_workers": main.num_workers}
    if (prefill := roles.get("prefill")) is not None:
        system |= {
            "prefill_launch": prefill.launch,
            "prefill_timing": prefill.timing,
            "num_prefill_workers": prefill.num_workers,
        }
    return system
