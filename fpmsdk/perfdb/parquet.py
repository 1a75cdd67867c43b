"""Rows of one Parquet file as numpy columns; every way a file can be bad is told apart and explained.

Knows nothing about particular tables. Decodes on the calling thread: no pool is left in the host process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fpmsdk.errors import PerfDataCorruptError, PerfDataNotAvailableError
from fpmsdk.files import is_git_lfs_pointer

# Up to here every integer is a float as well.
_LARGEST_INTEGER = 2**53


Integers = NDArray[np.int32] | NDArray[np.int64]


class Text(NamedTuple):
    """A column of strings: the distinct ones, and for each row which one it is."""

    codes: NDArray[np.int32]
    values: tuple[str, ...]


class Rows:
    """The rows taken from one file, column by column."""

    def __init__(self, path: str, columns: dict[str, NDArray[Any] | Text], count: int) -> None:
        self.path, self.count = path, count
        self._columns = columns

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def text(self, name: str) -> Text:
        """Return a column of strings."""
        column = self._columns[name]
        if not isinstance(column, Text):
            raise _foreign(self.path, f"column {name!r} must hold text, found {_type_name(column)}")
        return column

    def integers(self, name: str) -> Integers:
        """Return a column of integers, none of them negative; add such columns as int64."""
        column = self._columns[name]
        if isinstance(column, Text) or column.dtype.kind not in "iu":
            raise _foreign(self.path, f"column {name!r} must hold integers, found {_type_name(column)}")
        bad = (column < 0) | (column > _LARGEST_INTEGER)
        if bad.any():
            first = column[np.argmax(bad)]
            raise self.impossible(
                f"{np.count_nonzero(bad)} of {self.count} rows have an impossible {name}, first {first}"
            )
        return column if column.dtype == np.int32 else column.astype(np.int64, copy=False)

    def floats(self, name: str) -> NDArray[np.float64]:
        """Return a column of numbers."""
        column = self._columns[name]
        if isinstance(column, Text) or column.dtype.kind not in "iuf":
            raise _foreign(self.path, f"column {name!r} must hold numbers, found {_type_name(column)}")
        return column.astype(np.float64, copy=False)

    def keep(self, which: NDArray[np.bool_]) -> None:
        """Drop the rows where `which` does not hold, a column at a time: the file's columns are not held twice."""
        if which.all():
            return
        for name, column in self._columns.items():
            kept = Text(column.codes[which], column.values) if isinstance(column, Text) else column[which]
            self._columns[name] = kept
        self.count = int(np.count_nonzero(which))

    def flags(self, name: str) -> NDArray[np.bool_]:
        """Return a column of truth values."""
        column = self._columns[name]
        if isinstance(column, Text) or column.dtype.kind != "b":
            raise _foreign(self.path, f"column {name!r} must hold truth values, found {_type_name(column)}")
        return column

    def impossible(self, reason: str) -> PerfDataCorruptError:
        """Return the error for values that no measurement can have."""
        return PerfDataCorruptError(f"{self.path}: {reason}; reinstall or repair the data", self.path)


def read_content(path: str) -> bytes:
    """Return the bytes of a table file.

    Raises: `PerfDataNotAvailableError` when it cannot be read or is only a Git LFS pointer.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as fault:
        raise PerfDataNotAvailableError(f"perf database error: cannot read {path}: {fault.strerror}") from fault
    refuse_pointer(content, path)
    return content


def refuse_pointer(content: bytes, path: str | os.PathLike[str]) -> None:
    """Raise `PerfDataNotAvailableError` when the content of a data file is only a Git LFS pointer."""
    if is_git_lfs_pointer(content):
        raise PerfDataNotAvailableError(
            f"perf database error: {path} is a Git LFS pointer, not data; run `git lfs pull` in that checkout "
            "or install the data package"
        )


def read_rows(path: str, content: bytes, required: Sequence[str], optional: Sequence[str]) -> Rows:
    """Decode the named columns of a Parquet file.

    Parameters: `content`, its bytes; `required` columns must exist and be complete; `optional` ones are left
    out when absent.
    Raises: `PerfDataCorruptError` when the file is damaged, `PerfDataNotAvailableError` when it is not the table
    it should be.
    """
    import pyarrow as pa

    if not content:
        raise PerfDataCorruptError(f"{path}: the file is empty; reinstall or repair the data", path)
    try:
        schema = _reader(content, ()).schema_arrow
        text = [
            field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        ]
        wanted = [*required, *(name for name in optional if name in schema.names)]
        if missing := [name for name in required if name not in schema.names]:
            raise _foreign(path, f"columns {missing} are missing, found {schema.names}")
        if repeated := [name for name in wanted if schema.names.count(name) > 1]:
            raise _foreign(path, f"columns {repeated} are there more than once")
        reader = _reader(content, text)

        def column(name: str) -> NDArray[Any] | Text:
            found = reader.read_column(schema.names.index(name))
            # Decoding checks neither text nor the numbers that stand for it.
            found.validate(full=True)
            if len(found) != reader.metadata.num_rows:
                raise pa.ArrowInvalid(f"{len(found)} values of {name} in {reader.metadata.num_rows} rows")
            if found.null_count and name in required:
                raise _foreign(path, f"column {name!r} has {found.null_count} empty values")
            return _numpy(found)

        # One at a time: the decoded form of a column is several times its numpy form.
        columns = {name: column(name) for name in wanted}
        # What decoding has freed goes back to the system before the rows are sorted: the allocator would keep it.
        pa.system_memory_pool().release_unused()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as fault:
        raise PerfDataCorruptError(
            f"{path}: not a complete Parquet file: {' '.join(str(fault).split())}; reinstall or repair the data", path
        ) from fault
    return Rows(path, columns, reader.metadata.num_rows)


def _reader(content: bytes, text: Sequence[str]) -> Any:
    """A reader that takes its memory from the system's allocator, and gives it back.

    `pyarrow.parquet.ParquetFile` wraps the same reader, but takes Arrow's own pool, which keeps several times a
    table's size, and loads the clients of cloud storage: 20 MB and 60 ms of a start.
    """
    import pyarrow as pa
    from pyarrow._parquet import ParquetReader

    reader = ParquetReader(pa.system_memory_pool())
    reader.open(pa.BufferReader(content), read_dictionary=text)
    return reader


def _numpy(column: Any) -> NDArray[Any] | Text:
    import pyarrow as pa

    if not pa.types.is_dictionary(column.type):
        chunks = [narrow(_values(chunk)) for chunk in column.chunks]
        return np.concatenate(chunks) if chunks else np.empty(0, column.type.to_pandas_dtype())
    chunks = column.unify_dictionaries().chunks
    if not chunks:
        return Text(np.empty(0, np.int32), ())
    # An empty value of an optional column reads as an empty text.
    values = tuple(chunks[0].dictionary.to_pylist())
    if column.null_count and "" not in values:
        values = (*values, "")
    codes = [chunk.indices for chunk in chunks]
    filled = [index.fill_null(values.index("")) if index.null_count else index for index in codes]
    return Text(np.concatenate([_values(index).astype(np.int32) for index in filled]), values)


def _values(chunk: Any) -> NDArray[Any]:
    # Not `to_numpy`: where pandas is installed, that imports it.
    import pyarrow as pa

    if pa.types.is_boolean(chunk.type) and not chunk.null_count:
        return np.from_dlpack(chunk.cast(pa.uint8())).astype(np.bool_)
    if chunk.null_count:
        chunk = chunk.cast(pa.float64()).fill_null(np.nan)
    if not (pa.types.is_integer(chunk.type) or pa.types.is_floating(chunk.type)):
        return np.array(chunk.to_pylist(), dtype=object)
    return np.from_dlpack(chunk)


def narrow(values: NDArray[Any]) -> NDArray[Any]:
    """Return integers as int32 when every one fits, half the memory of a table; anything else as it is."""
    if values.dtype.kind not in "iu" or not len(values):
        return values
    limits = np.iinfo(np.int32)
    fits = limits.min <= int(values.min()) and int(values.max()) <= limits.max
    return values.astype(np.int32, copy=False) if fits else values


def _foreign(path: str, reason: str) -> PerfDataNotAvailableError:
    """A sound Parquet file that is not the table it should be provides no data."""
    return PerfDataNotAvailableError(f"perf database error: {path}: {reason}; reinstall or repair the data")


def _type_name(column: NDArray[Any] | Text) -> str:
    if isinstance(column, Text):
        return "text"
    return "integers" if column.dtype.kind in "iu" else str(column.dtype)
