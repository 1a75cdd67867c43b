"""What `fpmsdk predict` prints: a compact table of the figures that exist, or the summary as one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.cli.console import number

_COLUMNS = {"mean": "avg", "min": "min", "max": "max", "p99": "p99", "p90": "p90", "p75": "p75", "std": "std"}
_DISTRIBUTIONS = {
    "ttft_ms": "time to first token, ms",
    "ttst_ms": "time to second token, ms",
    "e2e_latency_ms": "request latency, ms",
    "itl_ms": "inter-token latency, ms",
    "output_token_throughput_per_user": "output tokens/s per user",
}
_TOTALS = {
    "output_throughput_tok_s": "output tokens/s",
    "total_throughput_tok_s": "tokens/s",
    "request_throughput_rps": "requests/s",
    "goodput_request_throughput_rps": "requests/s within the SLA",
    "goodput_output_throughput_tok_s": "output tokens/s within the SLA",
    "duration_ms": "duration, ms",
    "gpu_hours": "GPU hours",
    "prefix_cache_reused_ratio": "share of prompt tokens found in the cache",
}
_COORDINATES = ("batch_size", "total_prefill_tokens", "total_kv_read_tokens")
# The report has these beside its summary.
_NO_SUMMARY = ("per_request", "options", "details")


def summary_json(report: Mapping[str, Any]) -> str:
    """The summary in one line, keys sorted, beside the details where there are some; the rest stays in the file.

    >>> summary_json({"duration_ms": 2.0, "completed_requests": 1, "per_request": []})
    '{"completed_requests":1,"duration_ms":2.0}'
    """
    summary = {name: value for name, value in report.items() if name not in _NO_SUMMARY}
    document = {"summary": summary, "details": report["details"]} if "details" in report else summary
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def summary_table(report: Mapping[str, Any], path: Path) -> str:
    """Latencies, totals, what priced the passes, and where the report is; figures that do not exist have no line.

    >>> report = {"completed_requests": 1, "num_requests": 1, "duration_ms": 2.0, "prediction_provenance": {}}
    >>> print(summary_table(report, Path("prediction.json")))
    1 of 1 requests completed
    duration, ms  2.00
    report: prediction.json
    """
    lines = [f"{report['completed_requests']:,} of {report['num_requests']:,} requests completed"]
    if "prediction_diagnostic" in report:
        lines.append(report["prediction_diagnostic"])
    lines += aligned(_distributions(report))
    lines += aligned([[label, _figure(name, report[name])] for name, label in _TOTALS.items() if _has(report, name)])
    for role, record in report["prediction_provenance"].items():
        version = f", data version {record['data_version']}" if record["data_version"] else ""
        lines.append(f"{role}: passes priced by {record['estimator']}{version}")
    for role, cache in report.get("kv_cache_precision", {}).items():
        lines.append(f"{role}: KV cache of {cache['dtype']} ({cache['source']})")
    if (coverage := report.get("fpm_query_coverage")) is not None:
        counts = coverage["queries"]
        lines.append(
            f"measured table: {counts['measured']:,} queries measured, {counts['interpolated']:,} interpolated"
        )
    lines.append(f"report: {path}")
    return "\n".join(lines)


def uncovered_text(coverage: Mapping[str, Any]) -> str:
    """The first point that a measured table lacks, and how it gets there.

    >>> point = {"batch_size": 1.0, "total_prefill_tokens": 3.0, "total_kv_read_tokens": 512.0}
    >>> gaps = [{"phase": "prefill", "coordinates": point}]
    >>> uncovered_text({"roles": [{"worker_type": "aggregated", "coverage": {"gaps": gaps}}]})  # doctest: +ELLIPSIS
    'the measured table does not cover prefill with batch_size 1, total_prefill_tokens 3, total_kv_read_tokens 512 ...
    """
    for role in coverage["roles"]:
        for gap in role["coverage"]["gaps"]:
            named = ((name, gap["coordinates"].get(name)) for name in _COORDINATES)
            point = ", ".join(f"{name} {value:g}" for name, value in named if value is not None)
            return (
                f"the measured table does not cover {gap['phase']} with {point} ({role['worker_type']} worker); "
                "measure this point and add it with `fpmsdk table merge`, or let `--on-uncovered collect-plan` plan "
                "how to collect all missing points"
            )
    return "the measured table does not cover the workload"


def _distributions(report: Mapping[str, Any]) -> list[list[str]]:
    rows = [
        [label, *(number(report[f"{key}_{name}"]) for key in _COLUMNS)]
        for name, label in _DISTRIBUTIONS.items()
        if _has(report, f"mean_{name}")
    ]
    return [["", *_COLUMNS.values()], *rows] if rows else []


def _has(report: Mapping[str, Any], name: str) -> bool:
    return report.get(name) is not None


def _figure(name: str, value: float) -> str:
    return number(value, 6 if name == "gpu_hours" else 4 if name.endswith("_ratio") else 2)


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table with the first column to the left, the others to the right.

    >>> list(aligned([["a", "1"], ["bc", "10"]]))
    ['a    1', 'bc  10']
    """
    if rows:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for label, *cells in rows:
            figures = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            yield "  ".join((label.ljust(widths[0]), *figures))
