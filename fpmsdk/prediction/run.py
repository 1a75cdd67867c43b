"""Run one prediction and keep its evidence: the report, a record per request, and how the tables covered it.

Source: predict-recommend.md sections 1.2, 1.3, 5.2 and 9.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from fpmsdk.errors import ReplayInterrupted
from fpmsdk.files import whole_file
from fpmsdk.prediction.config import PredictConfig
from fpmsdk.prediction.deadline import start_deadline
from fpmsdk.prediction.details import OF_PASSES, checked_sections, details_of
from fpmsdk.prediction.documents import SEARCH_SECTIONS, read_document
from fpmsdk.prediction.evidence import RunEvidence
from fpmsdk.prediction.output import REPORT, REQUESTS, prepare_output
from fpmsdk.prediction.preflight import checked_config
from fpmsdk.prediction.resources import memory_plan
from fpmsdk.prediction.simulate import Prepared, Simulation, prepare, replay_prepared, system_of
from fpmsdk.replay.coverage import coverage_roles, replay_coverage, write_coverage

SUCCESS, FAILED, NO_MEMORY, UNCOVERED, INTERRUPTED = 0, 1, 3, 4, 130
_EXIT_CODES = {"completed": SUCCESS, "no_completed_requests": FAILED, "uncovered": UNCOVERED, "failed": FAILED}


class Prediction(Struct, frozen=True):
    """What a prediction has written and how it ended; `report` and `coverage` are None where there are none.

    >>> Prediction(UNCOVERED, Path("output"), None, None, "no such point").exit_code
    4
    """

    exit_code: int
    output_dir: Path
    report: dict[str, Any] | None
    coverage: Mapping[str, Any] | None
    error: str | None = None


def predict(
    config: PredictConfig | Mapping[str, Any] | str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    capture_per_request: bool = False,
    overwrite: bool = False,
    details: Collection[str] = (),
) -> Prediction:
    """Replay the workload of a configuration on its deployment and write what came out.

    Parameters
    ----------
    config: the deployment and its workload: a configuration, a mapping, or a YAML file.
    output_dir: an empty or new directory.
    capture_per_request: write `requests.jsonl`, and the records into the report.
    overwrite: whether the directory may hold the files of an earlier prediction, which are removed first.
    details: sections of `details` in the report: `summary`, `memory`, `time`, `energy`, `source`, or `all`.

    Returns
    -------
    Exit code 0 with `prediction.json`; 1 when no request completed, with the report; without a report 3 when the memory
    of the machine does not suffice, 4 when a table lacks a point, and 1 when the replay failed otherwise.
    `fpm-coverage.json` is there in every case in which coverage was collected, and what the run took in
    `execution-events.jsonl` and `resource-runtime.json`.

    Raises
    ------
    OnboardError: the configuration is faulty, or the output directory is in use.
    ConfigError, TraceError, TimingError, PerfDataNotAvailableError: the deployment or the workload cannot be built;
        nothing was written or removed.
    StartTimeoutError: they were not built in time; nothing was written or removed.
    ReplayInterrupted: Ctrl-C; coverage up to then and the evidence of the run are kept.
    OSError: something cannot be written.

    Source: predict-recommend.md sections 1.2 and 9.

    >>> import tempfile
    >>> from fpmsdk.sample.forward import forward_config
    >>> place = tempfile.mkdtemp()
    >>> timing = forward_config(place)
    >>> sizes = ("weights_bytes", "activations_bytes", "runtime_overhead_bytes", "comm_overhead_bytes")
    >>> timing["fpm_profile"]["deployments"][0]["resources"].update(dict.fromkeys(sizes, 1))
    >>> worker = {"kv_cache": {"capacity": {"type": "fixed", "blocks": 64}}}
    >>> config = {
    ...     "traffic": {"source": {"type": "synthetic", "input_tokens": 64, "output_tokens": 3},
    ...                 "load": {"type": "concurrency", "concurrency": 1}, "stop": {"requests": 2}},
    ...     "engine": {"model": timing["model"], "hardware": timing["system"], "workers": {"aggregated": worker},
    ...                **{name: timing[name] for name in (
    ...                    "backend_version", "fpm_profile", "estimation_mode", "systems_paths", "estimator_config")}}}
    >>> predict(config, place + "/output").report["completed_requests"]
    2
    """
    if not isinstance(config, PredictConfig):
        config = checked_config(read_document(config, forbidden=SEARCH_SECTIONS))
    wanted = checked_sections(details)
    # Nothing is removed for what cannot run.
    with start_deadline(config.execution.resources.initialization_timeout_seconds):
        prepared = prepare(config)
    folder = prepare_output(output_dir, overwrite=overwrite)
    plan = memory_plan(prepared.trace, config.execution.resources)
    evidence = RunEvidence(folder, plan)
    if plan.refusal is not None:
        evidence.refuse(NO_MEMORY)
        return Prediction(NO_MEMORY, folder, None, None, plan.refusal)
    try:
        result = replay_prepared(prepared, record_passes=bool(wanted & OF_PASSES))
    except ReplayInterrupted as stop:
        write_coverage(folder, _coverage_until(prepared, str(stop)))
        evidence.end("interrupted", INTERRUPTED)
        raise
    except MemoryError:
        evidence.end("failed", NO_MEMORY)
        return Prediction(NO_MEMORY, folder, None, None, "the replay ran out of memory; simulate fewer requests")
    exit_code = _EXIT_CODES[result.status]
    write_coverage(folder, result.coverage)
    if result.report is not None and wanted:
        result.report["details"] = details_of(prepared, result, wanted)
    report = _write(folder, result, capture_per_request)
    evidence.end(result.status, exit_code)
    return Prediction(exit_code, folder, report, result.coverage, result.error)


def _coverage_until(prepared: Prepared, error: str) -> dict[str, Any] | None:
    """What the tables answered before a replay was stopped."""
    system = system_of(prepared.roles)
    roles = coverage_roles(*(system[name] for name in ("prefill_timing", "timing") if name in system))
    return replay_coverage(roles, completed=False, error=error) if roles else None


def _write(folder: Path, result: Simulation, capture_per_request: bool) -> dict[str, Any] | None:
    if result.report is None:
        return None
    report = dict(result.report)
    if capture_per_request:
        report["per_request"] = result.records
        with whole_file(folder / REQUESTS) as file:
            file.writelines(_line(record) for record in report["per_request"])
    with whole_file(folder / REPORT) as file:
        file.write((json.dumps(report, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())
    return report


def _line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n").encode()
