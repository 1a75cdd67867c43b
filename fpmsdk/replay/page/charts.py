"""The data of each picture, thinned where a run is too large to draw; every thinning is put in words.

Not the drawing (`page.js`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk.replay.formats.recorded import RecordedRun
from fpmsdk.replay.latency import RequestLatencies
from fpmsdk.replay.page.steps import Steps
from fpmsdk.replay.report import Columns, ReplayReport

Float64 = NDArray[np.float64]

# More than that makes a browser slow and no picture better.
MAX_CDF_POINTS = 1_000
MAX_STEPS = 4_000
NUM_BINS = 1_000
MAX_PASSES = 50_000
MAX_SCATTER_POINTS = 4_000

LATENCIES = {"ttft_ms": "Time to first token", "itl_ms": "Inter-token latency of a request", "e2e_ms": "End to end"}
KINDS = ("prefill", "decode", "mixed", "several")


def cdf(values: Float64) -> dict[str, Any]:
    """Sorted values and the share of the sample that is no larger; ends included when thinned.

    >>> cdf(np.array([3.0, 1.0, np.nan, 2.0, 4.0]))
    {'x': [1.0, 2.0, 3.0, 4.0], 'y': [0.25, 0.5, 0.75, 1.0], 'count': 4}
    """
    sample = np.sort(values[np.isfinite(values)])
    share = np.arange(1, len(sample) + 1) / max(len(sample), 1)
    kept = np.arange(len(sample))
    if len(sample) > MAX_CDF_POINTS:
        kept = np.unique(np.round(np.linspace(0, len(sample) - 1, MAX_CDF_POINTS)).astype(np.int64))
    return {"x": _rounded(sample[kept]), "y": _rounded(share[kept]), "count": len(sample)}


def latency_cdfs(report: ReplayReport, measured: RequestLatencies | None) -> dict[str, Any]:
    """A distribution per latency, of the completed requests; with the measured one where there is one."""
    done = report.request_columns["status"] == "completed"
    panels: list[dict[str, Any]] = []
    for name, label in LATENCIES.items():
        replayed = getattr(report.latencies, name)[done]
        curves = {"replayed": cdf(replayed)}
        if measured is not None:
            curves["measured"] = cdf(getattr(measured, name))
        panels.append({"name": name, "label": label, "curves": curves})
    largest = max(curve["count"] for panel in panels for curve in panel["curves"].values())
    note = "Every completed request is one step."
    if largest > MAX_CDF_POINTS:
        note = f"Drawn through {MAX_CDF_POINTS:,} of up to {largest:,} values, the smallest and the largest among them."
    return {"panels": panels, "note": note}


def over_time(report: ReplayReport, kv_capacity: float) -> dict[str, Any]:
    """Batch size, share of the KV cache in use and queue depth, summed over all ranks.

    Parameters
    ----------
    kv_capacity: blocks, or bytes for a cache that is a budget of bytes, of all ranks together.
    """
    passes = report.pass_columns
    begin, end = passes["start_ms"], passes["end_ms"]
    used = "kv_cache_used_bytes" if "kv_cache_used_bytes" in passes else "active_blocks"
    curves = {
        "batch": {
            "prefill requests": _during(begin, end, passes["num_prefill_requests"]),
            "decode requests": _during(begin, end, passes["num_decode_requests"]),
        },
        "kv": {"KV cache in use, %": _between(passes, passes[used] * (100.0 / max(kv_capacity, 1.0)))},
        "queue": {"waiting requests": _between(passes, passes["num_waiting"])},
    }
    steps = max(len(curve.at_ms) for panel in curves.values() for curve in panel.values())
    last_ms = float(end.max())
    if steps <= MAX_STEPS:
        note = "Exact: a step for every change."
        drawn = {
            panel: {name: {"x": _rounded(curve.at_ms), "mean": _rounded(curve.value)} for name, curve in named.items()}
            for panel, named in curves.items()
        }
        return {"panels": drawn, "note": note, "stepped": True}
    edges = np.linspace(0.0, last_ms, NUM_BINS + 1)
    note = (
        f"{steps:,} changes are too many to draw: lines are means over {NUM_BINS:,} intervals of "
        f"{_duration(last_ms / NUM_BINS)}, the shade above reaches up to the largest value within each."
    )
    drawn = {}
    for panel, named in curves.items():
        drawn[panel] = {}
        for name, curve in named.items():
            mean, largest = curve.binned(edges)
            drawn[panel][name] = {
                "x": _rounded((edges[1:] + edges[:-1]) / 2),
                "mean": _rounded(mean),
                "max": _rounded(largest),
            }
    return {"panels": drawn, "note": note, "stepped": False}


def timeline(report: ReplayReport) -> dict[str, Any]:
    """Every pass as a bar on the lane of its rank; of very long runs several neighbouring passes are one bar."""
    passes = report.pass_columns
    pool, worker = passes["pool"], passes["worker"]
    lanes, lane = np.unique(np.char.add(np.char.add(pool.astype(str), " "), worker.astype(str)), return_inverse=True)
    names = sorted(lanes.tolist(), key=lambda name: (name.split()[0], int(name.split()[1])))
    place = np.array([names.index(name) for name in lanes.tolist()])[lane]
    order = np.lexsort((passes["start_ms"], place))
    columns = {
        "lane": place,
        "start": passes["start_ms"],
        "end": passes["end_ms"],
        "kind": _kinds(passes),
        "prefill_requests": passes["num_prefill_requests"],
        "prefill_tokens": passes["sum_prefill_tokens"],
        "decode_requests": passes["num_decode_requests"],
        "decode_kv_tokens": passes["sum_decode_kv_tokens"],
        "waiting": passes["num_waiting"],
    }
    columns = {name: column[order] for name, column in columns.items()}
    count = len(order)
    per_bar = -(-count // MAX_PASSES)
    note = f"All {count:,} passes are on the page." if count > 1 else "It is the only pass."
    if per_bar > 1:
        columns = _merged(columns, per_bar)
        note = (
            f"{count:,} passes are too many for a page: each bar stands for up to {per_bar} neighbouring passes of a "
            "rank, from the start of the first to the end of the last, and tells the means of their work."
        )
    return {
        "lanes": [_lane_label(name, len(names)) for name in names],
        "kinds": KINDS,
        "note": note,
        "passes_per_bar": per_bar,
        **{name: _rounded(column) for name, column in columns.items()},
    }


def against_measured(report: ReplayReport, run: RecordedRun) -> dict[str, Any]:
    """Every request, measured across and replayed up, and the errors of the run."""
    from fpmsdk.replay.compare import compare_with_measured

    comparison = compare_with_measured(report, run)  # refuses what cannot be compared
    measured = run.latencies()
    count = len(run.trace)
    kept = np.arange(0, count, -(-count // MAX_SCATTER_POINTS))
    panels = [
        {
            "name": name,
            "label": label,
            "measured": _rounded(getattr(measured, name)[kept]),
            "replayed": _rounded(getattr(report.latencies, name)[kept]),
            "request": run.trace.request_ids[kept].tolist(),
        }
        for name, label in LATENCIES.items()
    ]
    note = "Every request is a point; on the line the replay agrees with the measurement."
    if len(kept) < count:
        note = f"{len(kept):,} of {count:,} requests, evenly chosen in order of arrival, are points."
    return {"panels": panels, "note": note, "comparison": comparison}


def _kinds(passes: Columns) -> NDArray[np.int64]:
    has_prefill, has_decode = passes["num_prefill_requests"] > 0, passes["num_decode_requests"] > 0
    kinds: NDArray[np.int64] = np.where(has_prefill & has_decode, 2, np.where(has_prefill, 0, 1))
    return kinds


def _merged(columns: dict[str, NDArray[Any]], per_bar: int) -> dict[str, NDArray[Any]]:
    lane = columns["lane"]
    # Bars of one rank each.
    first_of_lane = np.flatnonzero(np.diff(lane, prepend=-1))
    position = np.arange(len(lane)) - np.repeat(first_of_lane, np.diff(np.append(first_of_lane, len(lane))))
    begin = np.flatnonzero(position % per_bar == 0)
    last = np.append(begin[1:], len(lane)) - 1
    sizes = last - begin + 1
    merged = {name: np.add.reduceat(column, begin) / sizes for name, column in columns.items()}
    duration = columns["end"] - columns["start"]
    spans = np.maximum(columns["end"][last] - columns["start"][begin], 1e-9)
    for number, kind in enumerate(KINDS[:3]):
        merged[f"share_{kind}"] = np.add.reduceat(np.where(columns["kind"] == number, duration, 0.0), begin) / spans
    lowest, highest = (ufunc.reduceat(columns["kind"], begin) for ufunc in (np.minimum, np.maximum))
    merged["kind"] = np.where(lowest == highest, lowest, KINDS.index("several"))
    merged |= {"lane": lane[begin], "start": columns["start"][begin], "end": columns["end"][last]}
    return merged


def _lane_label(name: str, count: int) -> str:
    pool, rank = name.split()
    if count == 1:
        return "engine"
    return f"rank {rank}" if pool == "agg" else f"{pool} {rank}"


def _during(begin: Float64, end: Float64, value: NDArray[Any]) -> Steps:
    """What all ranks compute together: a value during each pass, nothing between passes."""
    amount = value.astype(np.float64)
    return Steps.of_changes(np.concatenate([begin, end]), np.concatenate([amount, -amount]))


def _between(passes: Columns, value: NDArray[Any]) -> Steps:
    """The sum over ranks of what a pass leaves until the next; an idle aggregated rank has nothing."""
    changes_at, changes = [], []
    lane = passes["worker"] * 3 + (passes["pool"] == "prefill") + 2 * (passes["pool"] == "decode")
    order = np.lexsort((passes["start_ms"], lane))
    amount = value[order].astype(np.float64)
    begin, end = passes["start_ms"][order], passes["end_ms"][order]
    is_first = np.diff(lane[order], prepend=-1) != 0
    is_last = np.append(is_first[1:], True)
    goes_idle = is_last | (np.append(begin[1:], 0.0) > end) & (passes["pool"][order] == "agg")
    before = np.append(0.0, np.where(goes_idle, 0.0, amount)[:-1])
    before[is_first] = 0.0
    changes_at += [begin, end[goes_idle]]
    changes += [amount - before, -amount[goes_idle]]
    return Steps.of_changes(np.concatenate(changes_at), np.concatenate(changes))


def _duration(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:,.2f} s" if milliseconds >= 1e3 else f"{milliseconds:,.2f} ms"


def _rounded(values: NDArray[Any]) -> list[Any]:
    """Six significant decimals of a millisecond are more than a picture shows."""
    if values.dtype.kind != "f":
        listed: list[Any] = values.tolist()
        return listed
    return [None if math.isnan(value) else value for value in np.round(values, 4).tolist()]
