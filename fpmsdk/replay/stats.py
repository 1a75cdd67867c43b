"""What a trace asks for, in figures and in a plot: lengths, arrivals, sessions, and how much of its prompts repeats.

Lengths, gaps and blocks go to disk, as the trace does: memory does not grow with it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk.errors import MissingCapabilityError
from fpmsdk.files import whole_file
from fpmsdk.replay.fold import of_sample
from fpmsdk.replay.formats import open_trace
from fpmsdk.replay.formats.reader import ReadOptions
from fpmsdk.replay.portions import Portion
from fpmsdk.replay.sorting import Spill
from fpmsdk.replay.spool import Spool

_BINS = 120
_MOST_POINTS = 2000
# Several multisets are open at once.
_VALUES_PER_RUN = 1 << 14


def trace_stats(
    path: str | Path,
    format: str | None = None,
    *,
    options: ReadOptions | None = None,
    plot: str | Path | None = None,
    advance: Callable[[int], None] = lambda rows: None,
) -> dict[str, Any]:
    """`Trace.summary` with distributions, the busiest second, and the share of prompt blocks that came before.

    Memory does not grow with the number of requests; a form that is one document (`recorded`) and a single Weka play
    are decoded whole.

    Parameters
    ----------
    path, format, options: as `Trace.read` takes them.
    plot: also write one self-contained page (HTML) there: arrivals over time, and the distributions of lengths.
    advance: called with the number of rows read since its last call.

    Returns
    -------
    A dict: the summary, then `prompt_tokens`, `output_tokens`, `interarrival_ms` and `turns_per_session` as
    distributions (mean, min, max, median, p75, p90, p95, p99, std), `busiest_second_requests`, and
    `repeated_block_ratio`: the share of prompt blocks that an earlier request of the trace has, in the order of the
    trace; None without blocks. It bounds what a prefix cache can reuse.

    Raises
    ------
    TraceError: as of `Trace.read`.
    MissingCapabilityError: a plot is wanted, and Plotly is not installed.
    OSError: the plot cannot be written.

    Example
    -------
    >>> import json, tempfile
    >>> file = Path(tempfile.mkdtemp()) / "t.jsonl"
    >>> rows = [{"timestamp": at, "input_length": 8, "output_length": 1, "hash_ids": [1, 2 + at]} for at in (0, 10)]
    >>> _ = file.write_text("\\n".join(map(json.dumps, rows)))
    >>> trace_stats(file, options=ReadOptions(block_tokens=4))["repeated_block_ratio"]
    0.25
    """
    draw = None if plot is None else _plotly()
    with closing(Spool(open_trace(path, format, options), advance)) as spool, _Survey() as survey:
        for portion in spool.portions():
            survey.add(portion, spool.block_tokens)
        if plot is not None and draw is not None:
            page = _page(survey, spool, draw, Path(path).name)
            with whole_file(plot) as file:
                file.write(page.encode())
        return survey.figures()


class _Survey:
    """Adds up portions in the order of the trace."""

    def __init__(self) -> None:
        names = ("prompt_tokens", "output_tokens", "interarrival_ms", "turns_per_session")
        self.spills = {name: Spill(_VALUES_PER_RUN) for name in names}
        self._blocks = Spill(_VALUES_PER_RUN, np.int64)
        self.first_ms: float | None = None
        self.last_ms = 0.0
        self.num_requests = self.num_sessions = 0
        self._prompt_tokens = self._output_tokens = self._zero_outputs = 0
        self._second, self._in_second, self._busiest = 0.0, 0, 0

    def __enter__(self) -> _Survey:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for spill in (*self.spills.values(), self._blocks):
                stack.callback(spill.close)

    def add(self, portion: Portion, block_tokens: int) -> None:
        """Count the requests of a portion."""
        firsts = np.flatnonzero(portion.turn_index == 0)
        self.num_requests += len(portion)
        self.num_sessions += len(firsts)
        self._prompt_tokens += int(portion.prompt_tokens.sum())
        self._output_tokens += int(portion.output_tokens.sum())
        self._zero_outputs += int((portion.output_tokens == 0).sum())
        self.spills["prompt_tokens"].add(portion.prompt_tokens)
        self.spills["output_tokens"].add(portion.output_tokens)
        self.spills["turns_per_session"].add(np.diff(np.append(firsts, len(portion))))
        # Blocks past the prompt describe an answer.
        counts = np.diff(portion.hash_offsets)
        place = np.arange(len(portion.hash_ids)) - np.repeat(portion.hash_offsets[:-1], counts)
        self._blocks.add(portion.hash_ids[place < np.repeat(-(-portion.prompt_tokens // block_tokens), counts)])
        self._add_arrivals(portion.arrival_ms[firsts])

    def _add_arrivals(self, arrivals_ms: NDArray[np.float64]) -> None:
        before = arrivals_ms[:0] if self.first_ms is None else [self.last_ms]
        self.spills["interarrival_ms"].add(np.diff(arrivals_ms, prepend=before))
        if self.first_ms is None:
            self.first_ms = float(arrivals_ms[0])
        self.last_ms = float(arrivals_ms[-1])
        seconds, counts = np.unique(arrivals_ms // 1000, return_counts=True)
        if seconds[0] == self._second:
            counts[0] += self._in_second
        self._second, self._in_second = float(seconds[-1]), int(counts[-1])
        self._busiest = max(self._busiest, int(counts.max()))

    def figures(self) -> dict[str, Any]:
        """What `trace_stats` returns."""
        span_ms = self.last_ms - (self.first_ms or 0.0)
        distributions = {name: of_sample(spill) for name, spill in self.spills.items()}
        num_blocks, num_distinct = self._blocks.total, sum(len(block) for block in self._blocks.blocks())
        return {
            "num_requests": self.num_requests,
            "num_sessions": self.num_sessions,
            "arrival_span_ms": span_ms,
            "arrival_rate_rps": (self.num_sessions - 1) / span_ms * 1e3 if span_ms > 0 else None,
            "total_prompt_tokens": self._prompt_tokens,
            "mean_prompt_tokens": self._prompt_tokens / self.num_requests,
            "max_prompt_tokens": int(distributions["prompt_tokens"].max),
            "total_output_tokens": self._output_tokens,
            "mean_output_tokens": self._output_tokens / self.num_requests,
            "max_output_tokens": int(distributions["output_tokens"].max),
            "zero_output_requests": self._zero_outputs,
            "num_prompt_blocks": num_blocks,
            "num_distinct_prompt_blocks": num_distinct,
            **{
                name: {figure.removesuffix("_"): value for figure, value in distribution.named("").items()}
                for name, distribution in distributions.items()
            },
            "busiest_second_requests": self._busiest,
            "repeated_block_ratio": 1.0 - num_distinct / num_blocks if num_blocks else None,
        }


def _plotly() -> Any:
    try:
        import plotly.graph_objects
        import plotly.subplots
    except ImportError as fault:
        raise MissingCapabilityError("a plot needs Plotly; install fpmsdk[plot]") from fault
    return plotly


def _page(survey: _Survey, spool: Spool, draw: Any, title: str) -> str:
    figure = draw.subplots.make_subplots(
        rows=2,
        cols=2,
        specs=[[{"colspan": 2}, None], [{}, {}]],
        subplot_titles=["requests per second", "prompt tokens", "output tokens"],
    )
    line = draw.graph_objects.Scatter
    seconds, rates = _rates(survey, spool)
    figure.add_trace(line(x=seconds, y=rates, mode="lines", line_shape="hv", name="arrivals"), 1, 1)
    for column, name in enumerate(("prompt_tokens", "output_tokens"), 1):
        values, shares = _cumulated(survey.spills[name])
        figure.add_trace(line(x=values, y=shares, mode="lines", line_shape="hv"), 2, column)
        figure.update_xaxes(title_text="tokens", row=2, col=column)
        figure.update_yaxes(title_text="share of requests", row=2, col=column)
    figure.update_xaxes(title_text="s", row=1, col=1)
    figure.update_layout(title_text=f"{title}: {survey.num_requests:,} requests", showlegend=False)
    page: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return page


def _rates(survey: _Survey, spool: Spool) -> tuple[list[float], list[float]]:
    """Starts of bins in s, and arrivals per second in each."""
    bins = min(_BINS, survey.num_sessions)
    between = ((survey.first_ms or 0.0) / 1e3, survey.last_ms / 1e3)
    counts = np.zeros(bins, np.int64)
    for portion in spool.portions():
        arrivals_s = portion.arrival_ms[portion.turn_index == 0] / 1e3
        some, edges = np.histogram(arrivals_s, bins, between)
        counts += some
    width = max(float(edges[1] - edges[0]), 1e-9)
    return edges[:-1].tolist(), (counts / width).tolist()


def _cumulated(spill: Spill) -> tuple[list[float], list[float]]:
    """Values, at most so many as can be seen, and the share of the sample up to each."""
    distinct = sum(len(block) for block in spill.blocks())
    step = -(-distinct // _MOST_POINTS)
    values: list[float] = []
    shares: list[float] = []
    passed = place = 0
    for block in spill.blocks():
        ends = passed + np.cumsum(block["count"])
        shown = (np.arange(place + 1, place + len(block) + 1) - distinct) % step == 0  # the last one always
        values += block["value"][shown].tolist()
        shares += (ends[shown] / spill.total).tolist()
        passed, place = int(ends[-1]), place + len(block)
    return values, shares
