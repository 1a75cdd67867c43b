"""Cells of a whole-forward table: the measured curves of one model in one deployment, ready to be looked up.

Selection is exact; how a query is answered from the curves is compiled code.
Source: fpm-interpolation.md sections 1.6 and 2.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpmsdk.errors import FpmNoCellError
from fpmsdk.perfdb.forward_pair import PairRows, groups_of, identity_names, knees_of, read_pair
from fpmsdk.perfdb.forward_schema import EXECUTION_COLUMNS, FAKE_KV, LEGACY_EXECUTION, REAL_KV, sidecar_path

RAW_FALLBACK_VARIABLE = "AIC_FPM_FAKE_FALLBACK_RAW"
_LISTED_CELLS = 8


class Points(NamedTuple):
    """Measured points of one phase, read-only. `tokens` is zero in decode.

    `latency_ms` is what stands for the point, `genuine` whether it was measured with KV of its own.
    """

    batch: NDArray[np.int64]
    tokens: NDArray[np.int64]
    kv: NDArray[np.int64]
    latency_ms: NDArray[np.float64]
    genuine: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.batch)

    def only_genuine(self) -> Points:
        """The points that were measured with KV of their own."""
        keep = self.genuine
        if keep.all():
            return self
        columns = (self.batch[keep], self.tokens[keep], self.kv[keep], self.latency_ms[keep], keep[keep])
        return Points(*columns).frozen()

    def frozen(self) -> Points:
        """The same points; their arrays can no longer be changed."""
        for column in (self.batch, self.tokens, self.kv, self.latency_ms, self.genuine):
            column.setflags(write=False)
        return self


class ForwardCell(NamedTuple):
    """One model in one deployment. `cell_ids` are the collector's names of its parts, as first seen.

    `replaced_fake_rows` decode points got a latency extrapolated from real ones, `kept_fake_rows` stayed as recorded.
    """

    model_path: str
    identity: Mapping[str, str]
    cell_ids: tuple[str, ...]
    prefill: Points
    decode: Points
    replaced_fake_rows: int
    kept_fake_rows: int


class ForwardTable:
    """The cells of one pair, ordered by model and identity.

    `knees` are those that the sidecar declares, by axis. `compiled` is for what others derive from the cells once and
    share; it lives as long as the table.
    """

    def __init__(
        self,
        path: str,
        cells: tuple[ForwardCell, ...],
        fingerprint: str,
        knees: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.path, self.cells, self.fingerprint, self.knees = path, cells, fingerprint, knees or {}
        self.compiled: dict[Any, Any] = {}
        self._by_key = {(cell.model_path, *_normal(cell.identity)): cell for cell in cells}

    def select(self, model_path: str, identity: Mapping[str, str]) -> ForwardCell:
        """The cell of a model with exactly this identity.

        Raises: `FpmNoCellError` naming up to eight collected identities.
        """
        cell = self._by_key.get((model_path, *_normal(identity)))
        if cell is not None:
            return cell
        collected = sorted({(known.model_path, _spell(known.identity)) for known in self.cells})
        listed = "; ".join(f"{model} [{spelled}]" for model, spelled in collected[:_LISTED_CELLS])
        raise FpmNoCellError(
            f"perf database error: {self.path}: No FPM cell matches model_path={model_path!r} [{_spell(identity)}]; "
            f"collected: {listed}; collect this deployment or ask for a collected one"
        )


# What an identity leaves out stands for the defaults of schema 6; a recorded dcp of 1 differs from none.
_LEFT_OUT = dict(zip(EXECUTION_COLUMNS, LEGACY_EXECUTION, strict=True)) | {"dcp": ""}


def _normal(identity: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((_LEFT_OUT | dict(identity)).items()))


def _spell(identity: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in identity.items())


_tables: dict[tuple[str, ...], ForwardTable] = {}
_tables_lock = threading.Lock()


def open_forward_table(path: str, system: str, backend: str, backend_version: str) -> ForwardTable:
    """The table of a pair: one object per process as long as its files do not change.

    Raises: as `read_pair`.

    >>> import fpmsdk.sample
    >>> pair = fpmsdk.sample.forward_pair()
    >>> table = open_forward_table(pair, "cpu-2-cores", "vllm", "0.31.0")
    >>> table is open_forward_table(pair, "cpu-2-cores", "vllm", "0.31.0")
    True
    >>> table.cells[0].model_path, len(table.cells[0].prefill)
    ('qwen3-small-random', 162)
    """
    key = (path, system, backend, backend_version, _state_of(path), _state_of(sidecar_path(path)))
    with _tables_lock:
        known = _tables.get(key)
    if known is not None:
        return known
    table = build_table(read_pair(path, system, backend, backend_version), heal=heals_fake_rows())
    with _tables_lock:
        return _tables.setdefault(key, table)


def _state_of(path: str) -> str:
    try:
        state = os.stat(path)
    except OSError:
        return ""
    return f"{state.st_ino}.{state.st_size}.{state.st_mtime_ns}"


def heals_fake_rows() -> bool:
    """Whether decode points without real KV are replaced; the environment can forbid it."""
    return os.environ.get(RAW_FALLBACK_VARIABLE) != "1"


def build_table(rows: PairRows, *, heal: bool) -> ForwardTable:
    """Group checked rows into cells.

    Parameters: `heal`, whether decode points without real KV are replaced where real ones allow it.

    >>> import fpmsdk.sample
    >>> from fpmsdk.perfdb.forward_pair import read_pair
    >>> table = build_table(read_pair(fpmsdk.sample.forward_pair(), "cpu-2-cores", "vllm", "0.31.0"), heal=True)
    >>> [cell.kept_fake_rows for cell in table.cells]
    [0]
    """
    names = ("model_path", *identity_names(rows))
    first, group = groups_of([rows.texts[name].codes for name in names])
    order = np.argsort(group, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(group))])
    cells = [
        _cell(
            rows, {name: rows.texts[name].of(int(first[i])) for name in names}, order[bounds[i] : bounds[i + 1]], heal
        )
        for i in range(len(first))
    ]
    cells.sort(key=lambda cell: (cell.model_path, tuple(cell.identity.values())))
    state = f"{rows.sha256} {sorted(rows.sidecar.items())} {heal}"
    knees = knees_of(rows.path, rows.sidecar)
    return ForwardTable(rows.path, tuple(cells), hashlib.sha256(state.encode()).hexdigest(), knees)


def _cell(rows: PairRows, key: dict[str, str], members: NDArray[np.intp], heal: bool) -> ForwardCell:
    ids, first_seen = np.unique(rows.texts["cell_id"].codes[members], return_index=True)
    is_decode = rows.texts["workload_kind"].equals("decode")[members]
    decode, replaced, kept = _healed(rows, members[is_decode], heal)
    model_path = key.pop("model_path")
    return ForwardCell(
        model_path,
        key,
        tuple(rows.texts["cell_id"].values[code] for code in ids[np.argsort(first_seen)]),
        _points(rows, members[~is_decode], rows.latency_ms[members[~is_decode]]),
        _points(rows, members[is_decode], decode),
        replaced,
        kept,
    )


def _points(rows: PairRows, members: NDArray[np.intp], latency_ms: NDArray[np.float64]) -> Points:
    batch, tokens, kv = rows.coordinates
    return Points(batch[members], tokens[members], kv[members], latency_ms, ~_is_fake(rows, members)).frozen()


def _is_fake(rows: PairRows, members: NDArray[np.intp]) -> NDArray[np.bool_]:
    if "kv_seed_regime" not in rows.texts:
        return np.zeros(len(members), np.bool_)
    return rows.texts["kv_seed_regime"].equals(FAKE_KV)[members]


def _healed(rows: PairRows, members: NDArray[np.intp], heal: bool) -> tuple[NDArray[np.float64], int, int]:
    """Decode latencies in which points without real KV lie on the line through the two longest real ones below."""
    latency = rows.latency_ms[members].copy()
    fake = np.flatnonzero(_is_fake(rows, members))
    if not len(fake) or not heal:
        return latency, 0, len(fake)
    batch, _, kv = rows.coordinates[:, members]
    real = rows.texts["kv_seed_regime"].equals(REAL_KV)[members]
    recorded = rows.latency_ms[members]
    replaced = 0
    for row in fake:
        below = np.flatnonzero(real & (batch == batch[row]) & (kv < kv[row]))
        if len(below) < 2:
            continue
        one, two = below[np.argsort(kv[below])[-2:]]
        slope = (recorded[two] - recorded[one]) / float(kv[two] - kv[one])
        value = recorded[two] + float(kv[row] - kv[two]) * slope
        if np.isfinite(value) and value > 0:
            latency[row] = value
            replaced += 1
    return latency, replaced, len(fake) - replaced
