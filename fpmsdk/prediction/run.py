"""Run one prediction and keep its evidence: the report, a record per request, and how the tables covered it.

Source: predict-recommend.md sections 1.2, 1.3, 5.2 and 9.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpmsdk.files import whole_file
from fpmsdk.prediction.compile import compile_config
from fpmsdk.prediction.config import PredictConfig
from fpmsdk.prediction.deployment import ModelCache, sized_roles
from fpmsdk.prediction.documents import SEARCH_SECTIONS, read_document
from fpmsdk.prediction.kv_load import kv_load_of
from fpmsdk.prediction.output import EVENTS, REPORT, REQUESTS, RESOURCES, prepare_output
from fpmsdk.prediction.preflight import checked_config
from fpmsdk.prediction.resources import peak_rss_bytes
from fpmsdk.prediction.simulate import Simulation, TraceCache, replay_on
from fpmsdk.replay.coverage import write_coverage

SUCCESS, FAILED, UNCOVERED = 0, 1, 4
_EXIT_CODES = {"completed": SUCCESS, "no_completed_requests": FAILED, "uncovered": UNCOVERED, "failed": FAILED}


@dataclass(frozen=True)
class Prediction:
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
) -> Prediction:
    """Replay the workload of a configuration on its deployment and write what came out.

    Parameters
    ----------
    config: the deployment and its workload: a configuration, a mapping, or a YAML file.
    output_dir: an empty or new directory.
    capture_per_request: write `requests.jsonl`, and the records into the report.
    overwrite: whether the directory may hold the files of an earlier prediction, which are removed first.

    Returns
    -------
    Exit code 0 with `prediction.json`; 1 when no request completed, with the report; 4 when a table lacks a point and 1
    when the replay failed otherwise, both without a report. `fpm-coverage.json` is there in every case in which
    coverage was collected.

    Raises
    ------
    OnboardError: the configuration is faulty, or the output directory is in use.
    ConfigError, TraceError, TimingError, PerfDataNotAvailableError: the deployment cannot be built; nothing was written
        or removed.
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
    started = time.monotonic()
    # Nothing is removed for what cannot run, be it a trace with a bad row.
    roles = sized_roles(compile_config(config), ModelCache())
    traces, kv_load = TraceCache(), kv_load_of(config, roles)
    traces.get(config, None if kv_load is None else kv_load.concurrency)
    folder = prepare_output(output_dir, overwrite=overwrite)
    result = replay_on(config, roles, traces)
    exit_code = _EXIT_CODES[result.status]
    write_coverage(folder, None if result.coverage is None else dict(result.coverage))
    report = _write(folder, result, capture_per_request)
    _account(folder, exit_code, time.monotonic() - started)
    return Prediction(exit_code, folder, report, result.coverage, result.error)


def _write(folder: Path, result: Simulation, capture_per_request: bool) -> dict[str, Any] | None:
    if result.report is None:
        return None
    report = dict(result.report)
    if capture_per_request:
        report["per_request"] = result.records()
        with whole_file(folder / REQUESTS) as file:
            file.writelines(_line(record) for record in report["per_request"])
    with whole_file(folder / REPORT) as file:
        file.write((json.dumps(report, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())
    return report


def _account(folder: Path, exit_code: int, wall_seconds: float) -> None:
    """What the run took."""
    event = {"event": "prediction_ended", "exit_code": exit_code, "wall_seconds": wall_seconds}
    with whole_file(folder / EVENTS) as file:
        file.write(_line(event))
    status = {"exit_code": exit_code, "wall_seconds": wall_seconds, "peak_rss_bytes": peak_rss_bytes()}
    with whole_file(folder / RESOURCES) as file:
        file.write((json.dumps(status, indent=2, sort_keys=True) + "\n").encode())


def _line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n").encode()
