"""Columnar iterations: many forward passes as flat arrays, read once and estimated or learned without conversion."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.features import WORKLOAD_KINDS
from fpmsdk._ext.frames import COLUMNS, RANK_DTYPE, Columns, read_columns, workload_kinds
from fpmsdk.errors import MetricsError
from fpmsdk.metrics.wire import decode_frame

if TYPE_CHECKING:
    import pyarrow

# Per-request lists and the grouping of ranks, beside the per-rank columns.
_LAYOUT = ("lengths_start", "extend_lengths", "past_kv_lengths", "iteration_offsets")
_LISTS = ("extend_lengths", "past_kv_lengths")


class FpmBatch:
    """Iterations as columns; one row per attention-DP rank, iteration i is rows `iteration_offsets[i:i + 2]`.

    Columns are attributes, read-only arrays of length `num_ranks`: `wall_time_s` (seconds), `num_prefill_requests`,
    `sum_prefill_tokens`, `sum_prefill_kv_tokens`, `num_decode_requests`, `sum_decode_kv_tokens`, `num_lengths` (-1
    without per-request lists), `dp_rank`, `counter_id`, `var_prefill_length`, `var_decode_kv_tokens` and the six
    `queued_…` ones. `len(batch)` is the number of iterations; `batch[a:b]` is a batch of some of them.

    Wall times are kept as they are: tuning skips zero, negative and non-finite ones and counts them by reason.
    Source: architecture, "Public names".

    Example
    -------
    >>> batch = FpmBatch.from_dicts(
    ...     [{"wall_time": 0.004, "scheduled_requests": {"num_decode_requests": 2, "sum_decode_kv_tokens": 900}}]
    ... )
    >>> len(batch), batch.sum_decode_kv_tokens.tolist(), batch.workload_kind_names()
    (1, [900], ['pure_decode'])
    """

    wall_time_s: NDArray[np.float64]
    num_prefill_requests: NDArray[np.uint32]
    sum_prefill_tokens: NDArray[np.uint32]
    sum_prefill_kv_tokens: NDArray[np.uint32]
    num_decode_requests: NDArray[np.uint32]
    sum_decode_kv_tokens: NDArray[np.uint32]
    num_lengths: NDArray[np.int64]
    dp_rank: NDArray[np.uint32]
    counter_id: NDArray[np.uint64]
    iteration_offsets: NDArray[np.int64]

    def __init__(self, arrays: dict[str, NDArray[Any]]) -> None:
        self._arrays = arrays
        for array in arrays.values():
            array.flags.writeable = False
        self.columns = Columns(arrays)

    def __getattr__(self, name: str) -> NDArray[Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._arrays:
            raise AttributeError(f"FpmBatch has no column {name!r}; it has {', '.join(self._arrays)}")
        return self._arrays[name]

    def __len__(self) -> int:
        return self.columns.num_iterations

    def __copy__(self) -> "FpmBatch":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "FpmBatch":
        return self

    def __reduce__(self) -> tuple[type["FpmBatch"], tuple[dict[str, NDArray[Any]]]]:
        return FpmBatch, (self._arrays,)

    def __repr__(self) -> str:
        return f"FpmBatch({len(self)} iterations, {self.num_ranks} ranks)"

    @property
    def num_ranks(self) -> int:
        """Rows: ranks of all iterations together."""
        return len(self._arrays["wall_time_s"])

    @classmethod
    def from_frames(cls, frames: Iterable[bytes | Sequence[bytes]]) -> "FpmBatch":
        """Decode frames, each an iteration of one rank, or sequences of the frames of an iteration's ranks.

        Raises
        ------
        FrameDecodeError, MetricsError: names the iteration.

        Example
        -------
        >>> from fpmsdk.metrics import ForwardPassMetrics, encode_frame
        >>> frame = encode_frame(ForwardPassMetrics(wall_time=0.01))
        >>> batch = FpmBatch.from_frames([frame, [frame, frame]])
        >>> len(batch), batch.num_ranks, batch.wall_time_s.tolist()
        (2, 3, [0.01, 0.01, 0.01])
        """
        return cls(read_columns(frames, decode_frame))

    @classmethod
    def from_dicts(cls, iterations: Iterable[Any]) -> "FpmBatch":
        """Read iterations, each a rank or a list of ranks; a rank is a dict or an object with its fields.

        Raises
        ------
        MetricsError: a field of the wrong type or range; names the iteration.

        Example
        -------
        >>> ranks = [{"dp_rank": rank, "scheduled_requests": {"num_decode_requests": 1}} for rank in (0, 1)]
        >>> FpmBatch.from_dicts([ranks, {}]).iteration_offsets.tolist()
        [0, 2, 3]
        """
        return cls(read_columns(iterations, decode_frame))

    @classmethod
    def from_arrow(cls, table: "pyarrow.Table") -> "FpmBatch":
        """Read the form of `to_arrow`; missing columns are zero, unknown ones are ignored.

        Parameters
        ----------
        table: one row per rank. `iteration` (int64, ascending) groups rows; without it each row is an iteration.

        Raises
        ------
        MetricsError: a column with nulls, of the wrong type or outside its range; names column and row.

        Example
        -------
        >>> import pyarrow as pa
        >>> table = pa.table({"iteration": [0, 0, 1], "wall_time_s": [0.01, 0.01, 0.02]})
        >>> len(FpmBatch.from_arrow(table))
        2
        """
        arrays = {
            name: _column(table, name, RANK_DTYPE[name])
            if name in table.column_names
            else np.zeros(table.num_rows, RANK_DTYPE[name])
            for name in COLUMNS
            if name != "num_lengths"
        }
        arrays |= _lists(table)
        arrays["iteration_offsets"] = _offsets(table)
        return cls(arrays)

    @classmethod
    def concatenate(cls, batches: Sequence["FpmBatch"]) -> "FpmBatch":
        """The iterations of several batches, one batch after the other.

        Parameters
        ----------
        batches: any number; none give an empty batch.

        Example
        -------
        >>> one, two = FpmBatch.from_dicts([{"wall_time": 0.01}]), FpmBatch.from_dicts([{"wall_time": 0.02}])
        >>> FpmBatch.concatenate([one, two]).wall_time_s.tolist()
        [0.01, 0.02]
        """
        if not batches:
            return cls.from_dicts([])
        arrays = {
            name: np.concatenate([batch._arrays[name] for batch in batches])
            for name in batches[0]._arrays
            if name not in ("lengths_start", "iteration_offsets")
        }
        arrays["lengths_start"] = _starts(np.maximum(arrays["num_lengths"], 0))[:-1]
        sizes = np.concatenate([np.diff(batch.iteration_offsets) for batch in batches])
        arrays["iteration_offsets"] = _starts(sizes)
        return cls(arrays)

    def to_arrow(self) -> "pyarrow.Table":
        """One row per rank, with the column `iteration` and, when some rank has them, the per-request lists.

        Example
        -------
        >>> table = FpmBatch.from_dicts([{"wall_time": 0.01}, {"wall_time": 0.02}]).to_arrow()
        >>> table["iteration"].to_pylist(), table["wall_time_s"].to_pylist()
        ([0, 1], [0.01, 0.02])
        """
        import pyarrow as pa

        sizes = np.diff(self.iteration_offsets)
        columns: dict[str, Any] = {"iteration": np.repeat(np.arange(len(self)), sizes)}
        columns |= {name: self._arrays[name] for name in COLUMNS if name != "num_lengths"}
        present = self.num_lengths >= 0
        if present.any():
            offsets = pa.array(np.append(self.lengths_start, len(self.extend_lengths)), mask=np.append(~present, False))
            columns |= {name: pa.ListArray.from_arrays(offsets, pa.array(self._arrays[name])) for name in _LISTS}
        return pa.table(columns)

    def __getitem__(self, key: slice) -> "FpmBatch":
        if not isinstance(key, slice):
            raise TypeError(f"FpmBatch takes slices of iterations such as batch[10:20], found {key!r}")
        return self.take(np.arange(len(self))[key])

    def take(self, iterations: NDArray[np.integer[Any]] | Sequence[int]) -> "FpmBatch":
        """A batch of the given iterations, in the given order.

        Parameters
        ----------
        iterations: positions of iterations, int[n], each from 0 to `len(batch) - 1`.

        Example
        -------
        >>> FpmBatch.from_dicts([{"wall_time": 0.01}, {"wall_time": 0.02}]).take([1, 0, 1]).wall_time_s.tolist()
        [0.02, 0.01, 0.02]
        """
        chosen = np.asarray(iterations, np.int64)
        begin, size = self.iteration_offsets[chosen], np.diff(self.iteration_offsets)[chosen]
        rows = _ranges(begin, size)
        arrays = {name: self._arrays[name][rows] for name in COLUMNS}
        lengths = np.maximum(arrays["num_lengths"], 0)
        entries = _ranges(self.lengths_start[rows], lengths)
        arrays |= {name: self._arrays[name][entries] for name in _LISTS}
        arrays["lengths_start"] = _starts(lengths)[:-1]
        arrays["iteration_offsets"] = _starts(size)
        return FpmBatch(arrays)

    def workload_kinds(self) -> NDArray[np.int8]:
        """Workload kind of each iteration: position in `WORKLOAD_KINDS`, -1 when nothing was scheduled.

        Returns
        -------
        int8, one per iteration.

        Example
        -------
        >>> FpmBatch.from_dicts([{}, {"scheduled_requests": {"num_decode_requests": 1}}]).workload_kinds().tolist()
        [-1, 0]
        """
        return workload_kinds(self.columns)

    def workload_kind_names(self) -> list[str | None]:
        """Workload kind of each iteration by name, None when nothing was scheduled.

        Example
        -------
        >>> FpmBatch.from_dicts([{}, {"scheduled_requests": {"num_decode_requests": 1}}]).workload_kind_names()
        [None, 'pure_decode']
        """
        return [None if kind < 0 else WORKLOAD_KINDS[kind] for kind in self.workload_kinds()]


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _ranges(begin: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.int64]:
    # The concatenation of arange(b, b + s) for every pair.
    starts = _starts(size)
    return np.arange(starts[-1]) + np.repeat(begin - starts[:-1], size)


def _column(table: "pyarrow.Table", name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    column = table[name]
    if column.null_count:
        raise MetricsError(f"column {name}: expected no nulls, found {column.null_count}")
    values = column.to_numpy()
    if dtype.kind == "f":
        if values.dtype.kind not in "fiu":
            raise MetricsError(f"column {name}: expected numbers, found {column.type}")
        values = values.astype(dtype)
        bad = ~np.isfinite(values) if name != "wall_time_s" else np.zeros(len(values), bool)
        accepted = "finite numbers"
    else:
        if values.dtype.kind not in "iu":
            raise MetricsError(f"column {name}: expected integers, found {column.type}")
        bad = (values < 0) | (values > np.iinfo(dtype).max)
        accepted = f"integers from 0 to {np.iinfo(dtype).max}"
    if bad.any():
        row = int(np.argmax(bad))
        raise MetricsError(f"column {name}, row {row}: expected {accepted}, found {values[row]}")
    return np.ascontiguousarray(values, dtype).copy()


def _lists(table: "pyarrow.Table") -> dict[str, NDArray[Any]]:
    given = [name for name in _LISTS if name in table.column_names]
    rows = table.num_rows
    if not given:
        return {
            "num_lengths": np.full(rows, -1, np.int64),
            "lengths_start": np.zeros(rows, np.int64),
            "extend_lengths": np.zeros(0, np.uint64),
            "past_kv_lengths": np.zeros(0, np.uint64),
        }
    if len(given) == 1:
        raise MetricsError(f"column {given[0]} needs its partner: give {_LISTS[0]} and {_LISTS[1]} together")
    lists = {name: table[name].to_pylist() for name in _LISTS}
    sizes = {name: np.array([-1 if item is None else len(item) for item in lists[name]], np.int64) for name in _LISTS}
    bad = sizes[_LISTS[0]] != sizes[_LISTS[1]]
    if bad.any():
        row = int(np.argmax(bad))
        raise MetricsError(
            f"row {row}: {_LISTS[0]} has {sizes[_LISTS[0]][row]} entries, {_LISTS[1]} has {sizes[_LISTS[1]][row]}; "
            "give both with one entry per scheduled request"
        )
    num_lengths = sizes[_LISTS[0]]
    arrays: dict[str, NDArray[Any]] = {
        "num_lengths": num_lengths,
        "lengths_start": _starts(np.maximum(num_lengths, 0))[:-1],
    }
    for name in _LISTS:
        flat = [value for item in lists[name] if item is not None for value in item]
        if any(not isinstance(value, int) or not 0 <= value < 2**64 for value in flat):
            raise MetricsError(f"column {name}: expected lists of integers from 0 to {2**64 - 1}")
        arrays[name] = np.array(flat, np.uint64)
    return arrays


def _offsets(table: "pyarrow.Table") -> NDArray[np.int64]:
    if "iteration" not in table.column_names:
        return np.arange(table.num_rows + 1)
    iteration = _column(table, "iteration", np.dtype(np.int64))
    if (np.diff(iteration) < 0).any():
        row = int(np.argmax(np.diff(iteration) < 0)) + 1
        raise MetricsError(f"column iteration, row {row}: expected ascending numbers, found {iteration[row]}")
    first = np.flatnonzero(np.diff(iteration, prepend=-1))
    return np.append(first, table.num_rows).astype(np.int64)
