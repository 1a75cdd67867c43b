"""`fpmsdk table`: look at a whole-forward pair, let it predict its own points, draw it, merge pairs, take medians."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fpmsdk.cli.console import JsonOption, number, reports_errors, show
from fpmsdk.errors import ConfigError, FpmDataError
from fpmsdk.perfdb.forward_cells import ForwardCell, ForwardTable, open_forward_table
from fpmsdk.perfdb.forward_writer import Published, merge_pairs, read_origin

PairArgument = Annotated[Path, typer.Argument(metavar="PAIR", help="The table, a *.parquet file.")]

table = typer.Typer(
    name="table", help="Whole-forward tables: check, leave-one-out report, plot, merge, medians.", no_args_is_help=True
)


def check(pair: PairArgument, json: JsonOption = False) -> None:
    """Check every rule of the format and list the cells."""
    found = _open(pair)
    cells = [_described(cell) for cell in found.cells]
    show({"path": found.path, "fingerprint": found.fingerprint, "cells": cells}, json, *map(_line, cells))


def _line(cell: dict[str, Any]) -> str:
    sizes = " ".join(f"{name} {cell['identity'][name]}" for name in ("tp", "dp", "moe_ep"))
    low, high = cell["domain"]["batch_size"]
    return (
        f"{cell['model_path']} ({sizes}): {cell['prefill_points']} prefill and {cell['decode_points']} decode points, "
        f"batches {low} to {high}; {cell['replaced_fake_rows']} points without real KV replaced, "
        f"{cell['kept_fake_rows']} kept as recorded"
    )


def loo(pair: PairArgument, json: JsonOption = False) -> None:
    """Predict every point from the others, and report the relative errors."""
    from fpmsdk.perfmodel.leave_one_out import leave_one_out

    shown = Table(title="leave-one-out, relative error in per cent")
    for column in ("model", "phase", "points", "predicted", "median", "p90", "largest"):
        shown.add_column(column)
    reports = []
    found = _open(pair)
    for cell in found.cells:
        summary = leave_one_out(cell, found.knees).summary()
        reports.append({"model_path": cell.model_path, "identity": dict(cell.identity), **summary})
        for phase, figures in summary.items():
            errors = (figures[name] for name in ("median_error", "p90_error", "max_error"))
            shown.add_row(
                cell.model_path,
                phase,
                str(figures["points"]),
                str(figures["predicted"]),
                *(number(None if error is None else 100 * error) for error in errors),
            )
    show({"path": str(pair), "cells": reports}, json, shown)


class Phase(StrEnum):
    """Phases of a table."""

    PREFILL = "prefill"
    DECODE = "decode"


class PictureKind(StrEnum):
    """What a picture shows."""

    CURVES = "curves"
    HEATMAP = "heatmap"


def plot(
    pair: PairArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture, a *.png or *.html file.")],
    phase: Annotated[Phase, typer.Option(help="Points to draw.")] = Phase.PREFILL,
    kind: Annotated[
        PictureKind, typer.Option(help="Latency curves, or a heat map over two axes.")
    ] = PictureKind.CURVES,
    cell: Annotated[int, typer.Option(min=0, help="Number of the cell, in the order of `table check`.")] = 0,
    batch: Annotated[int | None, typer.Option(min=1, help="Draw only this batch.")] = None,
    json: JsonOption = False,
) -> None:
    """Draw a cell's measured latencies; needs the extra `plot`."""
    from fpmsdk.cli.table_plot import draw, picture

    cells = _open(pair).cells
    if cell >= len(cells):
        raise ConfigError(f"--cell must be below {len(cells)}, the number of cells of {pair}, found {cell}", "cell")
    drawn = picture(cells[cell], phase.value, kind.value, batch)
    draw(drawn, output)
    show({"path": str(output), "title": drawn.title}, json, f"{output}: {drawn.title}")


def merge(
    target: Annotated[Path, typer.Argument(help="The table to add to; created when it does not exist.")],
    sources: Annotated[list[Path], typer.Argument(help="Tables to take rows from, in order.")],
    json: JsonOption = False,
) -> None:
    """Publish the rows of several pairs into one."""
    _show_published(merge_pairs(str(target), [str(source) for source in sources]), json)


def median(
    target: Annotated[Path, typer.Argument(help="The table to publish into; created when it does not exist.")],
    launches: Annotated[list[Path], typer.Argument(help="Tables of three launches of one measurement.")],
    json: JsonOption = False,
) -> None:
    """Publish the per-point median of three launches."""
    from fpmsdk.perfdb.forward_median import median_pair

    _show_published(median_pair(str(target), [str(launch) for launch in launches]), json)


def _show_published(published: Published, json: bool) -> None:
    line = f"{published.path}: {published.num_rows} rows, {published.added_rows} of them new"
    if published.dropped_cells:
        line += f"; already published by another run: {', '.join(published.dropped_cells)}"
    show(published._asdict(), json, line)


def _open(pair: Path) -> ForwardTable:
    if pair.suffix != ".parquet":
        raise FpmDataError(f"{pair}: name the table of the pair, a *.parquet file")
    return open_forward_table(str(pair), *read_origin(str(pair)))


def _described(cell: ForwardCell) -> dict[str, Any]:
    domain = {}
    for name, column in (("batch_size", "batch"), ("total_prefill_tokens", "tokens"), ("total_kv_read_tokens", "kv")):
        values = [value for points in (cell.prefill, cell.decode) for value in getattr(points, column).tolist()]
        domain[name] = [min(values), max(values)]
    return {
        "model_path": cell.model_path,
        "identity": dict(cell.identity),
        "cell_ids": list(cell.cell_ids),
        "prefill_points": len(cell.prefill),
        "decode_points": len(cell.decode),
        "domain": domain,
        "replaced_fake_rows": cell.replaced_fake_rows,
        "kept_fake_rows": cell.kept_fake_rows,
    }


for command in (check, loo, plot, merge, median):
    table.command()(reports_errors(command))
