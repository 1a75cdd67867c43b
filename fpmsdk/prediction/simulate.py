"""One prediction without files: what a deployment makes of its workload, or why it makes nothing of it.

Source: predict-recommend.md sections 1.2, 4 and 5.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from fpmsdk.errors import FpmUncoveredError, PerfDataNotAvailableError, ReplayError, TimingError
from fpmsdk.prediction.compile import compile_config
from fpmsdk.prediction.compile.workload import workload_of
from fpmsdk.prediction.config import PredictConfig, TraceSource
from fpmsdk.prediction.deployment import ModelCache, SizedRole, sized_roles
from fpmsdk.prediction.kv_load import KvLoad, kv_load_of
from fpmsdk.prediction.plays import play_evidence
from fpmsdk.prediction.report import flat_report
from fpmsdk.replay import replay_trace
from fpmsdk.replay.report import ReplayReport
from fpmsdk.replay.trace import Trace

Status = Literal["completed", "no_completed_requests", "uncovered", "failed"]


@dataclass
class TraceCache:
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


@dataclass(frozen=True)
class Simulation:
    """How a prediction ended.

    Attributes
    ----------
    report: the flat figures of `prediction.json`; None when the replay did not end.
    replay: the replay behind it.
    coverage: how measured tables answered, where that was counted.
    error: why there is no result.
    kv_load: requests in flight that a share of the cache came to.
    provenance: what priced the passes of each role.
    roles: the sized workers by role.
    """

    status: Status
    report: dict[str, Any] | None
    replay: ReplayReport | None
    coverage: Mapping[str, Any] | None
    error: str | None
    kv_load: KvLoad | None
    provenance: Mapping[str, Mapping[str, Any]]
    roles: Mapping[str, SizedRole]

    def records(self) -> list[dict[str, Any]]:
        """A record for every request; empty without a replay."""
        if self.replay is None:
            return []
        records: list[dict[str, Any]] = json.loads(self.replay.to_json())["per_request"]
        return records


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
    return replay_on(config, sized_roles(compile_config(config), models or ModelCache()), traces)


def replay_on(config: PredictConfig, roles: Mapping[str, SizedRole], traces: TraceCache | None = None) -> Simulation:
    """The second half of `simulate`: the replay on workers that are sized."""
    options = compile_config(config).options
    kv_load = kv_load_of(config, roles)
    trace, load = (traces or TraceCache()).get(config, None if kv_load is None else kv_load.concurrency)
    provenance = {name: provenance_of(config, name, role) for name, role in roles.items()}
    try:
        replay = replay_trace(trace, **_system(roles), **load, **options, record_passes=False, allow_empty=True)
    except (ReplayError, TimingError, PerfDataNotAvailableError) as fault:
        text: str | None = getattr(fault, "fpm_query_coverage", None)
        status: Status = "uncovered" if isinstance(fault, FpmUncoveredError) else "failed"
        coverage = None if text is None else json.loads(text)
        return Simulation(status, None, None, coverage, str(fault), kv_load, provenance, roles)
    report = flat_report(config, roles, replay, provenance)
    source = config.traffic.source
    result = Simulation(
        "completed" if report["completed_requests"] else "no_completed_requests",
        report,
        replay,
        replay.fpm_query_coverage,
        None,
        kv_load,
        provenance,
        roles,
    )
    if isinstance(source, TraceSource) and source.format == "weka":
        report |= play_evidence(trace, result.records())
    return result


def provenance_of(config: PredictConfig, name: str, role: SizedRole) -> dict[str, Any]:
    """What prices the passes of a role, and of which version its data are."""
    if role.model is None:
        return {"data_version": None, "estimator": role.timing["type"], "timing_source": "configured"}
    record = role.model.diagnostics()["provenance"] or {}
    profile = config.engine.fpm_profile
    return {
        # A profile names the revision of the model that was measured.
        "data_version": None if profile is None else profile.get("model_revision"),
        "estimator": record.get("selected_estimation_mode"),
        "timing_source": "aic",
        **({"diagnostics": record} if record else {}),
    }


def _system(roles: Mapping[str, SizedRole]) -> dict[str, Any]:
    main = roles.get("aggregated") or roles["decode"]
    system: dict[str, Any] = {"launch": main.launch, "timing": main.timing, "num_workers": main.num_workers}
    if (prefill := roles.get("prefill")) is not None:
        system |= {
            "prefill_launch": prefill.launch,
            "prefill_timing": prefill.timing,
            "num_prefill_workers": prefill.num_workers,
        }
    return system
