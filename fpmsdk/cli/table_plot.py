"""Pictures of a measured cell: latency curves or a heat map, as PNG (Matplotlib) or as one HTML page (Plotly).

What is drawn is settled first and is the same for both; both libraries are in the extra `plot`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpmsdk.errors import ConfigError, FpmNotCollectedError, MissingCapabilityError
from fpmsdk.files import whole_file
from fpmsdk.perfdb.forward_cells import ForwardCell

_AXES = {"prefill": "prefill tokens", "decode": "KV tokens"}


class Curve(NamedTuple):
    """Latencies in ms over `x`, in ascending order of it."""

    name: str
    x: list[int]
    latency_ms: list[float]


class Picture(NamedTuple):
    """What is drawn: curves, or a grid of latencies in ms, float64[y, x], NaN where nothing was measured."""

    title: str
    x_label: str
    y_label: str
    curves: list[Curve]
    x: list[int]
    y: list[int]
    grid_ms: NDArray[np.float64] | None


def picture(cell: ForwardCell, phase: str, kind: str, batch: int | None = None) -> Picture:
    """What to draw of a cell.

    Parameters
    ----------
    phase: ``prefill`` or ``decode``.
    kind: ``curves``: latency over prefill tokens for every batch and cached length, over KV tokens for every batch in
        decode; ``heatmap``: cached length over prefill tokens of one batch, batch over KV tokens in decode.
    batch: draw only this one; a prefill heat map draws the smallest without it.

    Raises
    ------
    FpmNotCollectedError: the cell has no points of the phase, or none of the batch.
    """
    points = getattr(cell, phase)
    if not len(points):
        raise FpmNotCollectedError(f"{cell.model_path!r} has no {phase} points to draw")
    if batch is None and phase == "prefill" and kind == "heatmap":
        batch = int(points.batch.min())
    chosen = np.ones(len(points), bool) if batch is None else points.batch == batch
    if not chosen.any():
        collected = ", ".join(map(str, np.unique(points.batch).tolist()))
        raise FpmNotCollectedError(f"{cell.model_path!r} has no {phase} points of batch {batch}; it has {collected}")
    batches, kv, latency_ms = points.batch[chosen], points.kv[chosen], points.latency_ms[chosen]
    x = points.tokens[chosen] if phase == "prefill" else kv
    title = f"{cell.model_path}, {phase}" + ("" if batch is None else f", batch {batch}")
    if kind == "curves":
        series = [
            (f"batch {b}, {k} cached" if phase == "prefill" else f"batch {b}")
            for b, k in zip(batches.tolist(), kv.tolist(), strict=True)
        ]
        return Picture(title, _AXES[phase], "latency, ms", _curves(series, x, latency_ms), [], [], None)
    y = kv if phase == "prefill" else batches
    label = "cached tokens" if phase == "prefill" else "requests"
    columns, rows = np.unique(x), np.unique(y)
    grid = np.full((len(rows), len(columns)), np.nan)
    grid[np.searchsorted(rows, y), np.searchsorted(columns, x)] = latency_ms
    return Picture(title, _AXES[phase], label, [], columns.tolist(), rows.tolist(), grid)


def _curves(series: list[str], x: NDArray[np.int64], latency_ms: NDArray[np.float64]) -> list[Curve]:
    names = list(dict.fromkeys(series))
    found = []
    for name in names:
        members = np.array([own == name for own in series])
        order = np.argsort(x[members], kind="stable")
        found.append(Curve(name, x[members][order].tolist(), latency_ms[members][order].tolist()))
    return found


def draw(drawn: Picture, path: Path) -> None:
    """Write a picture; the suffix of `path` says in which form.

    Raises
    ------
    ConfigError: the suffix is neither .png nor .html.
    MissingCapabilityError: the library of that form is not installed.
    """
    writers = {".png": _png, ".html": _html}
    if path.suffix not in writers:
        raise ConfigError(f"{path}: a picture is a .png or an .html file", "output")
    try:
        content = writers[path.suffix](drawn)
    except ImportError as error:
        raise MissingCapabilityError(f"{path.suffix} pictures need {error.name}; pip install 'fpmsdk[plot]'") from None
    with whole_file(path) as file:
        file.write(content)


def _png(drawn: Picture) -> bytes:
    from io import BytesIO

    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    if drawn.grid_ms is None:
        for curve in drawn.curves:
            axes.plot(curve.x, curve.latency_ms, marker=".", label=curve.name)
        axes.set_xscale("symlog", base=2)
        axes.legend(fontsize="x-small", ncols=1 + len(drawn.curves) // 30)
    else:
        image = axes.imshow(drawn.grid_ms, origin="lower", aspect="auto")
        axes.set_xticks(range(len(drawn.x)), [str(value) for value in drawn.x], rotation=90, fontsize="x-small")
        axes.set_yticks(range(len(drawn.y)), [str(value) for value in drawn.y], fontsize="x-small")
        figure.colorbar(image, label="latency, ms")
    axes.set(title=drawn.title, xlabel=drawn.x_label, ylabel=drawn.y_label)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def _html(drawn: Picture) -> bytes:
    import plotly.graph_objects as go

    axes: dict[str, Any] = {"xaxis": {"title": drawn.x_label}, "yaxis": {"title": drawn.y_label}}
    if drawn.grid_ms is None:
        traces: list[Any] = [
            go.Scatter(x=curve.x, y=curve.latency_ms, name=curve.name, mode="lines+markers") for curve in drawn.curves
        ]
    else:
        traces = [
            go.Heatmap(
                x=[str(value) for value in drawn.x],
                y=[str(value) for value in drawn.y],
                z=[[None if np.isnan(value) else value for value in row] for row in drawn.grid_ms.tolist()],
                colorbar={"title": "ms"},
            )
        ]
        # Sizes are steps of a grid, not distances.
        axes["xaxis"]["type"] = axes["yaxis"]["type"] = "category"
    page: str = go.Figure(traces, {"title": drawn.title, **axes}).to_html(include_plotlyjs=True)
    return page.encode()
