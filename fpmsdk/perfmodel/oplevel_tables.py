"""Slices of a performance database as compiled tables, made once per database and shared by all models.

Which slice serves an operator is decided here; what it answers is compiled code. Source: op-level.md sections 1.5, 3.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from fpmsdk._ext.grid import GridTable
from fpmsdk._ext.operators import ScaleTable, generation_attention_floor
from fpmsdk._ext.sites import GemmTable
from fpmsdk.errors import PerfDataNotAvailableError
from fpmsdk.perfdb import PerfDatabase, Slice, first_seen

T = TypeVar("T")

# Axis along which prefill attention grows with the square: interpolated in the root of its latency.
_SQRT_AXIS = {"context_attention_perf": 1, "context_mla_perf": 1, "mla_context_module_perf": 1}

_lock = threading.Lock()


def tables_of(database: PerfDatabase) -> "OpTables":
    """The compiled tables of a database; the same object for every model that uses it."""
    with _lock:
        if database.derived is None:
            database.derived = OpTables(database)
        assert isinstance(database.derived, OpTables)
        return database.derived


class OpTables:
    """Compiled slices of one database. A slice that does not exist is None: its operator fails when it is asked."""

    def __init__(self, database: PerfDatabase) -> None:
        self._database = database
        self._mem_bw_bytes_per_s = database.spec.mem_bw_bytes_per_s
        self._made: dict[Any, Any] = {}
        self._lock = threading.RLock()

    def _once(self, key: Any, make: Callable[[], T]) -> T:
        with self._lock:
            if key not in self._made:
                self._made[key] = make()
            made: T = self._made[key]
        return made

    def require(self, table: str) -> None:
        """Raise `PerfDataNotAvailableError` when no source has rows of a table."""
        self._database.table(table)

    def slices(self, table: str) -> Mapping[tuple[Any, ...], Slice]:
        """Slices of a table by key; empty when no source has rows of it."""
        try:
            return self._database.table(table).slices
        except PerfDataNotAvailableError:
            return {}

    def grid(self, table: str, key: tuple[Any, ...]) -> GridTable | None:
        """The slice of a key as it was measured."""
        return self._once((table, key), lambda: self._grid(table, key, None))

    def _grid(self, table: str, key: tuple[Any, ...], floor_ms: Any) -> GridTable | None:
        found = self.slices(table).get(key)
        if found is None:
            return None
        latency_ms = found.latency_ms if floor_ms is None else np.maximum(found.latency_ms, floor_ms(found))
        return GridTable(found.axes, latency_ms, _power(found), _SQRT_AXIS.get(table, -1))

    def lane(self, table: str, lane_order: Iterable[str], key: tuple[Any, ...]) -> str | None:
        """The first lane that holds the whole key: those asked for in order, then any other as first seen."""
        slices = self.slices(table)
        others: dict[str, None] = dict.fromkeys(lane for lane, *_ in slices)
        return next((lane for lane in (*lane_order, *others) if (lane, *key) in slices), None)

    def generation_attention(
        self, lane: str | None, key: tuple[Any, ...], shape: tuple[float, ...]
    ) -> GridTable | None:
        """A decode attention slice in which no row is faster than the roofline allows."""
        if lane is None:
            return None
        return self._once(
            ("generation_attention", lane, key, shape),
            lambda: self._grid(
                "generation_attention_perf",
                (lane, *key),
                lambda found: generation_attention_floor(found.axes, shape, self._mem_bw_bytes_per_s),
            ),
        )

    def gemm(self, dtype: str, flops_per_s: float, bytes_per_element: float) -> GemmTable | None:
        """Curves over m of every (n, k) of a dtype, none faster than the roofline allows."""
        return self._once(("gemm", dtype), lambda: self._gemm(dtype, flops_per_s, bytes_per_element))

    def _gemm(self, dtype: str, flops_per_s: float, bytes_per_element: float) -> GemmTable | None:
        found = self.slices("gemm_perf").get((dtype,))
        if found is None:
            return None
        m, n, k = found.axes
        # Sites in the order of a nested first-seen walk m, n, k; inside a site ascending in m.
        walk = _nested_walk(found)
        site_of, first_at = first_seen(n[walk], k[walk])
        rows = walk[np.lexsort((m[walk], site_of))]
        first = np.concatenate([[0], np.cumsum(np.bincount(site_of))])
        shapes = walk[first_at]
        power = _power(found)
        return GemmTable(
            n[shapes],
            k[shapes],
            first,
            m[rows],
            found.latency_ms[rows],
            None if power is None else power[rows],
            flops_per_s,
            bytes_per_element,
            self._mem_bw_bytes_per_s,
        )

    def scale(self, table: str, dtype: str, factor: float, *, scale_beyond: bool) -> ScaleTable | None:
        """A quantisation kernel's table over (m, k), with the rectangle that its rows span."""
        return self._once((table, dtype), lambda: self._scale(table, dtype, factor, scale_beyond))

    def _scale(self, table: str, dtype: str, factor: float, scale_beyond: bool) -> ScaleTable | None:
        grid = self.grid(table, (dtype,))
        found = self.slices(table).get((dtype,))
        if grid is None or found is None:
            return None
        m, k = found.axes
        bounds = (float(m.min()), float(m.max()), float(k.min()), float(k.max()))
        return ScaleTable(grid, bounds, factor, self._mem_bw_bytes_per_s, scale_beyond)


def _power(found: Slice) -> Any:
    return None if np.isnan(found.power_w).any() else found.power_w


def _nested_walk(found: Slice) -> Any:
    # Rows as a walk over first-seen m, then first-seen n of it, then first-seen k of those would meet them.
    m, n, _ = found.axes
    seen = np.argsort(found.order)
    rank_of_m, rank_of_n = np.empty_like(m), np.empty_like(m)
    rank_of_m[seen], _ = first_seen(m[seen])
    rank_of_n[seen], _ = first_seen(m[seen], n[seen])
    return np.lexsort((found.order, rank_of_n, rank_of_m))
