"""Curves of a cell in compiled form, made once per cell and shared by all models over it.

Source: fpm-interpolation.md section 2.
"""

import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.wholeforward import CurveSet
from fpmsdk.perfdb.forward_cells import ForwardCell, ForwardTable, Points
from fpmsdk.perfdb.forward_curves import (
    Curves,
    capture_batches,
    decode_curves,
    flat_batch_limit,
    prefill_curves,
    prefill_curves_over_kv,
)


class GenuinePoints(NamedTuple):
    """Points of a cell that were measured with KV of their own, and the largest KV total of a decode one."""

    num_prefill: int
    num_decode: int
    decode_kv_ceiling: int | None


class StrictCurves(NamedTuple):
    """What strict lookups read: the genuine points of a cell."""

    prefill: CurveSet
    prefill_over_kv: CurveSet
    decode: CurveSet
    rungs: NDArray[np.float64]


class AssistedCurves(NamedTuple):
    """What lookups with a roofline read: all points of a cell, and its curves for messages."""

    prefill: CurveSet
    decode: CurveSet
    rungs: NDArray[np.float64]
    batch_limit: float | None
    prefill_curves: Curves
    decode_curves: Curves


def strict_curves(prefill: Points, decode: Points, knees: Mapping[str, tuple[int, ...]] | None = None) -> StrictCurves:
    """Compile genuine points for strict lookups, which never blend across a declared knee."""
    tokens, kv = _declared(knees)
    rows = decode_curves(decode)
    return StrictCurves(
        CurveSet(*prefill_curves(prefill), x_knees=tokens, second_knees=kv),
        CurveSet(*prefill_curves_over_kv(prefill), x_knees=kv, second_knees=tokens),
        CurveSet(*rows, x_knees=kv),
        capture_batches(rows),
    )


def assisted_curves(
    prefill: Points, decode: Points, knees: Mapping[str, tuple[int, ...]] | None = None
) -> AssistedCurves:
    """Compile points for lookups with a roofline, which never blend across a declared knee either."""
    tokens, kv = _declared(knees)
    curves, rows = prefill_curves(prefill), decode_curves(decode)
    return AssistedCurves(
        CurveSet(*curves, x_knees=tokens, second_knees=kv),
        CurveSet(*rows, x_knees=kv),
        capture_batches(rows),
        flat_batch_limit(curves),
        curves,
        rows,
    )


DeclaredKnees = tuple[tuple[int, ...], bool]


def _declared(knees: Mapping[str, tuple[int, ...]] | None) -> tuple[DeclaredKnees, DeclaredKnees]:
    # Knees of prefill tokens and of KV tokens per request, as the compiled curves take them.
    declared = knees or {}
    return (declared.get("total_prefill_tokens", ()), False), (declared.get("kv_tokens_per_request", ()), True)


_lock = threading.Lock()


def genuine_points_of(table: ForwardTable, cell: ForwardCell) -> GenuinePoints:
    """What strict lookups may read of a cell: counted once."""
    key = ("genuine", id(cell))
    found: GenuinePoints | None = table.compiled.get(key)
    if found is None:
        prefill, decode = cell.prefill.only_genuine(), cell.decode.only_genuine()
        ceiling = int(decode.kv.max()) if len(decode) else None
        found = table.compiled.setdefault(key, GenuinePoints(len(prefill), len(decode), ceiling))
    return found


def strict_curves_of(table: ForwardTable, cell: ForwardCell) -> StrictCurves:
    """Curves of a cell for strict lookups: the same object for every model."""
    key = ("strict", id(cell))
    with _lock:
        if key not in table.compiled:
            measured = (cell.prefill.only_genuine(), cell.decode.only_genuine())
            table.compiled[key] = strict_curves(*measured, table.knees)
        found: StrictCurves = table.compiled[key]
    return found


def assisted_curves_of(table: ForwardTable, cell: ForwardCell) -> AssistedCurves:
    """Curves of a cell for lookups with a roofline: the same object for every model."""
    key = ("assisted", id(cell))
    with _lock:
        if key not in table.compiled:
            table.compiled[key] = assisted_curves(cell.prefill, cell.decode, table.knees)
        found: AssistedCurves = table.compiled[key]
    return found
