"""The compiled form of a table: its arrays as raw memory behind a short header.

Only the byte layout; where entries live and when they are used is decided by `cache` and `database`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fpmsdk.perfdb.cache import ALIGNMENT
from fpmsdk.perfdb.slices import Key, TableArrays


class _Header(msgspec.Struct, array_like=True):
    """What precedes the arrays: byte order, keys, and dtype and length of each array in order."""

    byte_order: str
    keys: list[list[Any]]
    axes: int
    arrays: list[tuple[str, int]]


def pack(keys: Sequence[Key], arrays: TableArrays) -> Iterator[bytes | memoryview]:
    """Yield the parts of the compiled form."""
    flat = _flat(arrays)
    header = msgspec.msgpack.encode(
        _Header(_native(), [list(key) for key in keys], len(arrays.axes), [(a.dtype.str, len(a)) for a in flat])
    )
    yield len(header).to_bytes(8, "little")
    yield header
    position = 8 + len(header)
    for array in flat:
        yield bytes(-position % ALIGNMENT)
        content = array.view(np.uint8).data
        yield content
        position += -position % ALIGNMENT + len(content)


def unpack(content: memoryview) -> tuple[list[Key], TableArrays]:
    """Return keys and arrays, the arrays being views of `content`.

    Raises: `ValueError` when it was written in another form.
    """
    length = int.from_bytes(content[:8], "little")
    try:
        header = msgspec.msgpack.decode(content[8 : 8 + length], type=_Header)
    except msgspec.MsgspecError as fault:
        raise ValueError(str(fault)) from fault
    if header.byte_order != _native():
        raise ValueError("written on a machine of another byte order")
    flat: list[NDArray[Any]] = []
    position = 8 + length
    for dtype, count in header.arrays:
        position += -position % ALIGNMENT
        array = np.frombuffer(content, dtype, count, position)
        flat.append(array)
        position += array.nbytes
    offsets, latency_ms, power_w, order, primary_rows, *axes = flat
    return [tuple(key) for key in header.keys], TableArrays(
        offsets, tuple(axes), latency_ms, power_w if len(power_w) else None, order, primary_rows
    )


def _flat(arrays: TableArrays) -> list[NDArray[Any]]:
    power = np.empty(0) if arrays.power_w is None else arrays.power_w
    return [arrays.offsets, arrays.latency_ms, power, arrays.order, arrays.primary_rows, *arrays.axes]


def _native() -> str:
    return np.dtype(np.int32).newbyteorder("=").str + np.dtype(np.int64).str
