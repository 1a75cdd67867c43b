"""The candidates of a search as a table: one row each, one real column for every knob and every figure.

Source: predict-recommend.md section 10.1.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fpmsdk.recommendation.ledger import Result, config_path
from fpmsdk.recommendation.ranking import flat_config

if TYPE_CHECKING:
    import pyarrow

_FIRST = ("candidate_id", "rank", "config_path", "status", "reason_category", "reason", "used_gpus", "score")


def columns(result: Result) -> dict[str, list[Any]]:
    """The table, as a list of values by column; None where a candidate has no such value.

    Rows are in the order of suggestion. `rank` is the place in the order of the feasible ones, counted from 1, and
    `config_path` the written configuration, which several have in common when they say the same. Knobs are named by
    their path in the configuration, objectives of a Pareto search as `objective.NAME`, figures as in the report.

    Source: predict-recommend.md section 10.1.
    """
    ranks = {candidate.candidate_id: rank for rank, candidate in enumerate(result.order, start=1)}
    paths = {
        candidate.candidate_id: config_path(number)
        for number, entry in enumerate(result.recommended, start=1)
        for candidate in (entry.candidate, *entry.folded)
    }
    rows: list[dict[str, Any]] = []
    kinds: tuple[dict[str, None], ...] = (
        {},
        {},
        {},
        {},
    )  # knobs, objectives, loads, figures: in the order of appearance
    for candidate in result.candidates:
        outcome = candidate.outcome
        groups = (
            flat_config(candidate),
            {f"objective.{name}": value for name, value in (candidate.objectives or {}).items()},
            {f"kv_load.{name}": value for name, value in (outcome.kv_load or {}).items()},
            outcome.metrics,
        )
        row = {
            "candidate_id": candidate.candidate_id,
            "rank": ranks.get(candidate.candidate_id),
            "config_path": paths.get(candidate.candidate_id),
            "status": outcome.status,
            "reason_category": outcome.reason_category,
            "reason": outcome.reason,
            "used_gpus": outcome.used_gpus,
            "score": candidate.score,
        }
        for seen, group in zip(kinds, groups, strict=True):
            seen.update(dict.fromkeys(group))
            row |= group
        rows.append(row)
    names = [*_FIRST, *(name for group in kinds for name in group)]
    return {name: [row.get(name) for row in rows] for name in names}


def csv_bytes(table: dict[str, list[Any]]) -> bytes:
    r"""The table as CSV with a header; an empty cell is no value.

    >>> csv_bytes({"status": ["feasible", "failed"], "score": [1.5, None]})
    b'status,score\nfeasible,1.5\nfailed,\n'
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table)
    writer.writerows(zip(*table.values(), strict=True))
    return text.getvalue().encode()


def arrow_table(table: dict[str, list[Any]]) -> pyarrow.Table:
    """The table for Parquet. A knob of several kinds of values is text.

    >>> arrow_table({"score": [1, 2.5, None]}).column("score").to_pylist()
    [1.0, 2.5, None]
    """
    import pyarrow

    return pyarrow.table({name: _array(values) for name, values in table.items()})


def _array(values: Iterable[Any]) -> pyarrow.Array:
    import pyarrow

    values = list(values)
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return pyarrow.array([None if value is None else float(value) for value in values])
    if len(kinds) > 1:
        return pyarrow.array([None if value is None else str(value) for value in values])
    return pyarrow.array(values)
