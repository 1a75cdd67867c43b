"""Write the page: figures on top, pictures below, everything in one file."""

from __future__ import annotations

from collections import Counter
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from fpmsdk.errors import ConfigError, MissingCapabilityError
from fpmsdk.files import whole_file
from fpmsdk.replay.formats.recorded import RecordedRun
from fpmsdk.replay.page import charts
from fpmsdk.replay.report import ReplayReport


def write_page(
    path: str | Path, report: ReplayReport, measured: RecordedRun | None = None, title: str = "Replay"
) -> None:
    """Write a replay as one web page that needs nothing else, whole or not at all.

    Parameters
    ----------
    path: the file, usually `.html`.
    report: with its passes.
    measured: the measured run of the same requests, to draw beside the replay.
    title: of the page.

    Raises
    ------
    ConfigError: passes were not recorded.
    MissingCapabilityError: plotly is not installed.
    TraceError: the measured run is of other requests or has no token times.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as fault:
        raise MissingCapabilityError(
            "a report page needs plotly, which is not installed; pip install 'fpmsdk[report]'"
        ) from fault
    if not len(report.pass_columns["worker"]):
        raise ConfigError("the replay has kept no passes to draw; leave record_passes at True", "record_passes")
    data: dict[str, Any] = {
        "cdf": charts.latency_cdfs(report, None if measured is None else measured.latencies()),
        "time": charts.over_time(report, _kv_capacity(report)),
        "timeline": charts.timeline(report),
    }
    if measured is not None:
        data["measured"] = charts.against_measured(report, measured)
    here = files("fpmsdk.replay.page")
    page = (here / "page.html").read_text("utf-8")
    parts = {
        "{{title}}": escape(title),
        "{{banner}}": _banner(report),
        "{{cards}}": _cards(report.summary),
        "{{options}}": escape(msgspec.json.format(msgspec.json.encode(report.options), indent=2).decode()),
        "{{style}}": (here / "page.css").read_text("utf-8"),
        "{{script}}": (here / "page.js").read_text("utf-8"),
        "{{plotly}}": get_plotlyjs(),
        # The data are inside a script element: no text in them may end it.
        "{{data}}": msgspec.json.encode(data).decode().replace("</", "<\\/"),
    }
    # One pass over the frame, so that no part is searched for the marks of another.
    text = [parts.get(piece.strip(), piece.replace("{{title}}", parts["{{title}}"])) for piece in page.split("\n")]
    with whole_file(path) as file:
        file.write("\n".join(text).encode())


def _kv_capacity(report: ReplayReport) -> float:
    """Blocks, or bytes, of all ranks together."""
    passes, options = report.pass_columns, report.options
    ranks = len({*zip(passes["pool"].tolist(), passes["worker"].tolist(), strict=True)})
    if "kv_cache_used_bytes" in passes:
        return float(options["launch"]["engine"]["kv_cache_capacity_bytes"]) * ranks
    capacity: dict[tuple[str, int], int] = {}
    totals = passes["active_blocks"] + passes["free_blocks"]
    for pool in set(passes["pool"].tolist()):
        of_pool = passes["pool"] == pool
        capacity[pool, 0] = int(totals[of_pool].max()) * len(set(passes["worker"][of_pool].tolist()))
    return float(sum(capacity.values()))


def _banner(report: ReplayReport) -> str:
    notes = []
    if report.partial:
        notes.append(
            "Partial: the replay was interrupted. Requests that had not ended by then are not in the latencies."
        )
    columns = report.request_columns
    for status, became in (("rejected", "were rejected"), ("failed", "failed")):
        reasons = Counter(columns["rejection_reason"][columns["status"] == status].tolist())
        if reasons:
            why = "; ".join(f"{reason} ({count:,} x)" for reason, count in reasons.most_common())
            notes.append(f"{reasons.total():,} of {len(columns['status']):,} requests {became}: {why}.")
    return "\n".join(f'<p class="banner">{escape(note)}</p>' for note in notes)


def _cards(summary: dict[str, Any]) -> str:
    cards = [
        ("Requests completed", f"{summary['completed_requests']:,}", f"of {summary['num_requests']:,} that arrived"),
        ("Simulated time", _seconds(summary["duration_ms"]), f"in {_seconds(summary['wall_time_ms'])} of real time"),
        (
            "Output",
            f"{summary['output_throughput_tok_s']:,.0f} <small>tok/s</small>",
            f"{summary['request_throughput_rps']:,.2f} requests/s",
        ),
    ]
    cards += [
        (
            label,
            f"{_milliseconds(summary[f'median_{name}_ms'])}",
            f"p90 {_milliseconds(summary[f'p90_{name}_ms'])}<br>p99 {_milliseconds(summary[f'p99_{name}_ms'])}",
        )
        for label, name in (
            ("TTFT, median", "ttft"),
            ("Token gap, median", "itl"),
            ("End to end, median", "e2e_latency"),
        )
    ]
    if "goodput_completed_requests" in summary:
        share = summary["goodput_completed_requests"] / summary["completed_requests"]
        cards.append(("Goodput", f"{share:.1%}", f"{summary['goodput_request_throughput_rps']:,.2f} requests/s"))
    if summary["prefix_cache_reused_ratio"] > 0:
        cards.append(("Prompt tokens reused", f"{summary['prefix_cache_reused_ratio']:.1%}", "from the prefix cache"))
    return "\n".join(
        f'<div class="card"><h3>{label}</h3><p class="figure">{figure}</p><p class="detail">{detail}</p></div>'
        for label, figure, detail in cards
    )


def _seconds(milliseconds: float) -> str:
    seconds = milliseconds / 1e3
    return f"{seconds:,.1f} <small>s</small>" if seconds >= 1 else f"{milliseconds:,.1f} <small>ms</small>"


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} <small>ms</small>" if value >= 100 else f"{value:,.2f} <small>ms</small>"
