"""What `fpmsdk predict --detail` prints of the details that are in the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fpmsdk.cli.console import number
from fpmsdk.cli.predict_table import aligned


def detail_lines(details: Mapping[str, Any], top_n: int) -> Iterator[str]:
    """Lines of every section, with at most so many operations of a phase; the report has all.

    >>> operation = {"name": "fpm_decode", "latency_ms": 9.0, "source": "fpm_interpolation"}
    >>> phase = {"role": "aggregated", "name": "decode", "latency_ms": 9.0, "operations": [operation]}
    >>> details = {"sections": {"time": {"phases": [phase]}}, "skipped": {"energy": "no data"}}
    >>> print(*detail_lines(details, 12), sep="\\n")
    time by operation, ms
    aggregated decode  9.00  fpm_decode  fpm_interpolation
    energy: no data
    """
    sections = details["sections"]
    if (time := sections.get("time")) is not None:
        yield "time by operation, ms"
        yield from aligned(
            [
                [f"{phase['role']} {phase['name']}", number(row["latency_ms"]), row["name"], row["source"]]
                for phase in time["phases"]
                for row in sorted(phase["operations"], key=lambda row: -row["latency_ms"])[:top_n]
            ]
        )
    if (memory := sections.get("memory")) is not None:
        yield f"memory of {memory['scope']}"
        yield from aligned(
            [
                [f"{role} {name}", number(value, 0) if isinstance(value, int | float) else str(value)]
                for role, figures in memory["roles"].items()
                for name, value in figures.items()
            ]
        )
    for phase in sections.get("source", ()):
        for row in phase["operations"][:top_n]:
            points = len(row.get("fpm_estimates", ()))
            estimates = f", {points:,} different estimates" if points else ""
            yield f"{phase['role']} {phase['phase']}: {row['name']} from {row['source']}{estimates}"
    for name, reason in details["skipped"].items():
        yield f"{name}: {reason}"
