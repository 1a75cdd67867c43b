"""Which sample of a coordinate is published when a sweep measured it more than once.

It is never an average and never the fastest.

Source: collector.md section 6.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fpmsdk.errors import CollectionError

if TYPE_CHECKING:
    from fpmsdk.collect.artifact import NativeCollection

_CLAMPED = "context_clamped"
_SEEDED = "prefill_real_seed"


def selected_rows(collection: NativeCollection, where: str = "") -> tuple[int, ...]:
    """Rows of a collection that stand for their coordinates, in the order in which coordinates first occur.

    Steady decode lifts short contexts to the shortest that can be measured, so that several requested points can end
    at one coordinate (reason `context_clamped`): the one that was asked for stands for all, or the first of the lifted.
    Real seeding repeats prefill without KV: the ordinary sample stands for these.

    Parameters
    ----------
    collection: a validated collection.
    where: the cell, for the message.

    Raises
    ------
    CollectionError: two unclamped samples share a coordinate and differ in more than their seeding.

    Source: collector.md section 6.1.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, coordinate in enumerate(map(tuple, collection.coordinates.T.tolist())):
        groups.setdefault(coordinate, []).append(row)
    return tuple(
        rows[0] if len(rows) == 1 else _chosen(collection, rows, coordinate, where)
        for coordinate, rows in groups.items()
    )


def _chosen(collection: NativeCollection, rows: Sequence[int], coordinate: tuple[int, ...], where: str) -> int:
    natives = [row for row in rows if _CLAMPED not in _reasons(collection.points[row])]
    if len(natives) == 1:
        return natives[0]
    if not natives:
        return rows[0]  # rows are in the order of benchmark ids
    ordinary = [row for row in rows if collection.regimes[row] == "not_applicable"]
    if len(ordinary) == 1 and _differ_in_seeding_only(collection, ordinary[0], rows):
        return ordinary[0]
    batch, tokens, kv = coordinate
    raise CollectionError(
        f"{where or 'collection'}: {len(natives)} unclamped samples share one key, which is published once: "
        f"{collection.phase} of batch {batch}, {tokens} new tokens and {kv} KV tokens; run the attempt again"
    )


def _differ_in_seeding_only(collection: NativeCollection, ordinary: int, rows: Sequence[int]) -> bool:
    point = collection.points[ordinary]
    if point["point_type"] != "prefill" or point["total_kv_read_tokens"] != 0:
        return False
    expected = _compared(point, _reasons(point))
    for row in rows:
        if row == ordinary:
            continue
        other = collection.points[row]
        reasons = [reason for reason in _reasons(other) if reason != _SEEDED]
        if collection.regimes[row] != "real_prefix" or _compared(other, reasons) != expected:
            return False
    return True


def _reasons(point: Mapping[str, Any]) -> list[Any]:
    return list(point.get("sample_reasons") or ())


def _compared(point: Mapping[str, Any], reasons: list[Any]) -> dict[str, Any]:
    return {name: value for name, value in point.items() if name != "benchmark_id"} | {"sample_reasons": reasons}
