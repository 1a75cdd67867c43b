"""What a trace asks for, in figures and in a plot: lengths, arrivals, sessions, and how much of its prompts repeats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk.errors import MissingCapabilityError
from fpmsdk.files import whole_file
from fpmsdk.replay.latency import Distribution
from fpmsdk.replay.trace import Trace

_BINS = 120


def trace_stats(trace: Trace) -> dict[str, Any]:
    """`Trace.summary` with distributions, the busiest second, and the share of prompt blocks that came before.

    Returns
    -------
    A dict: the summary, then `prompt_tokens`, `output_tokens`, `interarrival_ms` and `turns_per_session` as
    distributions (mean, min, max, median, p75, p90, p95, p99, std), `busiest_second_requests`, and
    `repeated_block_ratio`: the share of prompt blocks that an earlier request of the trace has, in the order of the
    trace; None without blocks. It bounds what a prefix cache can reuse.

    >>> trace = Trace.from_arrays([0.0, 10.0], [8, 8], [1, 1], hash_ids=[[1, 2], [1, 3]], block_tokens=4)
    >>> trace_stats(trace)["repeated_block_ratio"]
    0.25
    """
    arrivals = _arrivals(trace)
    turns = np.bincount(trace.session_index)
    return {
        **trace.summary(),
        "prompt_tokens": _figures(trace.prompt_tokens),
        "output_tokens": _figures(trace.output_tokens),
        "interarrival_ms": _figures(np.diff(arrivals)),
        "turns_per_session": _figures(turns),
        "busiest_second_requests": int(np.unique(arrivals // 1000, return_counts=True)[1].max()),
        "repeated_block_ratio": _repeated(trace),
    }


def _arrivals(trace: Trace) -> NDArray[np.float64]:
    arrivals: NDArray[np.float64] = trace.arrival_ms[trace.turn_index == 0]
    return arrivals


def _figures(values: NDArray[Any]) -> dict[str, float]:
    return {name.removesuffix("_"): value for name, value in Distribution.of_sample(values).named("").items()}


def _repeated(trace: Trace) -> float | None:
    if not len(trace.hash_ids):
        return None
    return 1.0 - len(np.unique(trace.hash_ids)) / len(trace.hash_ids)


def write_plot(trace: Trace, path: str | Path, title: str) -> None:
    """Write one self-contained page: arrivals over time, and the distributions of prompt and output lengths.

    Raises
    ------
    MissingCapabilityError: Plotly is not installed.
    OSError: the file cannot be written.
    """
    try:
        from plotly import graph_objects
        from plotly.subplots import make_subplots
    except ImportError as fault:
        raise MissingCapabilityError("a plot needs Plotly; install fpmsdk[plot]") from fault
    figure = make_subplots(
        rows=2,
        cols=2,
        specs=[[{"colspan": 2}, None], [{}, {}]],
        subplot_titles=["requests per second", "prompt tokens", "output tokens"],
    )
    seconds, rates = _rates(trace)
    figure.add_trace(graph_objects.Scatter(x=seconds, y=rates, mode="lines", line_shape="hv", name="arrivals"), 1, 1)
    for column, lengths in enumerate((trace.prompt_tokens, trace.output_tokens), 1):
        values, shares = _cumulated(lengths)
        figure.add_trace(graph_objects.Scatter(x=values, y=shares, mode="lines", line_shape="hv"), 2, column)
        figure.update_xaxes(title_text="tokens", row=2, col=column)
        figure.update_yaxes(title_text="share of requests", row=2, col=column)
    figure.update_xaxes(title_text="s", row=1, col=1)
    figure.update_layout(title_text=f"{title}: {len(trace):,} requests", showlegend=False)
    page = figure.to_html(include_plotlyjs=True, full_html=True)
    with whole_file(path) as file:
        file.write(page.encode())


def _rates(trace: Trace) -> tuple[list[float], list[float]]:
    arrivals = _arrivals(trace) / 1e3
    counts, edges = np.histogram(arrivals, min(_BINS, max(1, len(arrivals))))
    width = max(float(edges[1] - edges[0]), 1e-9)
    return edges[:-1].tolist(), (counts / width).tolist()


def _cumulated(lengths: NDArray[np.int64]) -> tuple[list[int], list[float]]:
    values, counts = np.unique(lengths, return_counts=True)
    return values.tolist(), (np.cumsum(counts) / len(lengths)).tolist()
