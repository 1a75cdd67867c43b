"""Run one prediction and keep its evidence: the report, a record per request, and how the tables covered it.

Source: predict-recommend.md sections 1.2, 1.3, 5.2 and 9.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpmsdk.errors import FpmUncoveredError, PerfDataNotAvailableError, ReplayError, TimingError
from fpmsdk.files import whole_file
from fpmsdk.launch import EngineLaunchConfig
from fpmsdk.perfmodel.model import ForwardPassPerfModel
from fpmsdk.prediction.compile import ReplayInputs, compile_config
from fpmsdk.prediction.config import PredictConfig, TraceSource
from fpmsdk.prediction.output import REPORT, REQUESTS, prepare_output
from fpmsdk.prediction.plays import play_evidence
from fpmsdk.replay import ReplayReport, replay_trace
from fpmsdk.replay.coverage import write_coverage

SUCCESS, FAILED, UNCOVERED = 0, 1, 4


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
    config: PredictConfig,
    output_dir: str | os.PathLike[str],
    *,
    capture_per_request: bool = False,
    overwrite: bool = False,
) -> Prediction:
    """Replay the workload of a configuration on its deployment and write what came out.

    Parameters
    ----------
    config: the deployment and its workload.
    output_dir: an empty or new directory.
    capture_per_request: write `requests.jsonl`, and the records into the report.
    overwrite: whether the directory may hold the files of an earlier prediction, which are removed first.

    Returns
    -------
    Exit code 0 with `prediction.json`; 4 when a table lacks a point and 1 when the replay failed otherwise, both
    without a report. `fpm-coverage.json` is there in every case in which coverage was collected.

    Raises
    ------
    OnboardError: the output directory is in use.
    ConfigError, TraceError, PerfDataNotAvailableError: the deployment cannot be built; nothing was written or removed.
    OSError: something cannot be written.

    Source: predict-recommend.md sections 1.2 and 9.

    >>> import tempfile
    >>> from fpmsdk.sample.forward import forward_config
    >>> place = tempfile.mkdtemp()
    >>> timing = forward_config(place)
    >>> sizes = ("weights_bytes", "activations_bytes", "runtime_overhead_bytes", "comm_overhead_bytes")
    >>> timing["fpm_profile"]["deployments"][0]["resources"].update(dict.fromkeys(sizes, 1))
    >>> worker = {"kv_cache": {"capacity": {"type": "fixed", "blocks": 64}}}
    >>> config = PredictConfig.model_validate({
    ...     "traffic": {"source": {"type": "synthetic", "input_tokens": 64, "output_tokens": 3},
    ...                 "load": {"type": "concurrency", "concurrency": 1}, "stop": {"requests": 2}},
    ...     "engine": {"model": timing["model"], "hardware": timing["system"], "workers": {"aggregated": worker},
    ...                **{name: timing[name] for name in (
    ...                    "backend_version", "fpm_profile", "estimation_mode", "systems_paths", "estimator_config")}}})
    >>> predict(config, place + "/output").report["completed_requests"]
    2
    """
    inputs = compile_config(config)
    model = ForwardPassPerfModel.best_available(inputs.timing)
    model.sized_launch(EngineLaunchConfig.from_mapping(inputs.launch))  # nothing is removed for what cannot run
    folder = prepare_output(output_dir, overwrite=overwrite)
    try:
        report = replay_trace(inputs.trace, launch=inputs.launch, timing=model, **inputs.options)
    except (ReplayError, TimingError, PerfDataNotAvailableError) as fault:
        text: str | None = getattr(fault, "fpm_query_coverage", None)
        write_coverage(folder, text)
        exit_code = UNCOVERED if isinstance(fault, FpmUncoveredError) else FAILED
        return Prediction(exit_code, folder, None, None if text is None else json.loads(text), str(fault))
    document = _document(config, inputs, model, report, capture_per_request)
    write_coverage(folder, report.fpm_query_coverage)
    if capture_per_request:
        with whole_file(folder / REQUESTS) as file:
            file.writelines(_line(record) for record in document["per_request"])
    with whole_file(folder / REPORT) as file:
        file.write((json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())
    return Prediction(SUCCESS, folder, document, report.fpm_query_coverage)


def _document(
    config: PredictConfig, inputs: ReplayInputs, model: ForwardPassPerfModel, report: ReplayReport, per_request: bool
) -> dict[str, Any]:
    """The flat report."""
    written = json.loads(report.to_json())
    document: dict[str, Any] = {
        **written["summary"],
        "options": written["options"],
        "prediction_provenance": {"aggregated": model.diagnostics()["provenance"]},
    }
    if report.fpm_query_coverage is not None:
        document["fpm_query_coverage"] = report.fpm_query_coverage
    source = config.traffic.source
    if isinstance(source, TraceSource) and source.format == "weka":
        document |= play_evidence(inputs.trace, written["per_request"])
    if per_request:
        document["per_request"] = written["per_request"]
    return document


def _line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n").encode()
