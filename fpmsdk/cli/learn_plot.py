"""A page that shows how the errors of several estimators went along a stream, and by kind (Plotly)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fpmsdk.errors import ConfigError, MissingCapabilityError
from fpmsdk.files import whole_file


def require_plot(path: Path) -> None:
    """Raise before anything is computed when the page could not be written.

    Raises
    ------
    ConfigError: the name does not end in .html.
    MissingCapabilityError: Plotly is not installed.
    """
    if path.suffix != ".html":
        raise ConfigError(f"{path}: the plot is an .html file", "plot")
    if find_spec("plotly") is None:
        raise MissingCapabilityError("--plot needs plotly; pip install 'fpmsdk[report]'")


def write_plot(document: dict[str, Any], path: Path) -> None:
    """Write the page of a comparison, whole or not at all.

    Parameters
    ----------
    document: result of `fpmsdk.perfmodel.prequential.compare_estimators`.
    """
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=2, cols=1, subplot_titles=("along the stream", "by kind"), row_heights=[0.6, 0.4])
    colors = _colors(len(document["estimators"]))
    for color, (name, told) in zip(colors, document["estimators"].items(), strict=True):
        series, error = told["series"], told["error"]
        # One entry of the legend switches both.
        shared = {"name": name, "legendgroup": name}
        figure.add_scatter(
            x=series["iteration"], y=series["mape_percent"], mode="lines", line={"color": color}, row=1, col=1, **shared
        )
        figure.add_bar(
            x=list(error),
            y=[row["mape_percent"] for row in error.values()],
            marker={"color": color},
            showlegend=False,
            row=2,
            col=1,
            **shared,
        )
    figure.update_xaxes(title="iteration", row=1, col=1)
    figure.update_yaxes(title="mean absolute error, %", rangemode="tozero")
    figure.update_layout(title=f"predict, then learn: {document['iterations']:,} iterations", height=900)
    with whole_file(path) as file:
        file.write(figure.to_html(include_plotlyjs=True).encode())


def _colors(count: int) -> list[str]:
    from plotly.colors import qualitative

    known = qualitative.D3 + qualitative.Set2
    return [known[index % len(known)] for index in range(count)]
