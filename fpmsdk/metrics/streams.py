"""Recorded telemetry: frame files, the recorder's JSON lines, and ranks grouped into iterations.

A frame file holds messages as published, each after its length as a little-endian u32; a name that ends in `.gz`
is compressed.
"""

import gzip
import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike, fspath
from typing import BinaryIO, cast

import msgspec

from fpmsdk.errors import FrameDecodeError, MetricsError
from fpmsdk.files import whole_file
from fpmsdk.metrics.wire import ForwardPassMetrics, decode_frame

_LENGTH = struct.Struct("<I")

# A message is about 400 bytes; a length beyond this is a file of another kind.
MAX_FRAME_BYTES = 16 * 1024 * 1024
_BLOCK_BYTES = 1 << 20


def _is_gzip(path: str | PathLike[str]) -> bool:
    return fspath(path).endswith(".gz")


@contextmanager
def _reading(path: str | PathLike[str]) -> Iterator[BinaryIO]:
    with cast(BinaryIO, gzip.open(path) if _is_gzip(path) else open(path, "rb")) as file:
        try:
            yield file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise FrameDecodeError(
                f"{fspath(path)}: not a complete gzip file: {error}; record or copy it again"
            ) from None


def read_frames(path: str | PathLike[str]) -> list[bytes]:
    """Read every frame of a frame file, not yet decoded.

    Parameters
    ----------
    path: a frame file, compressed if its name ends in `.gz`.

    Raises
    ------
    FrameDecodeError: the file is truncated or its lengths are not those of a frame file; names file, frame and byte.
    OSError: the file cannot be read.

    Example
    -------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_frames(f"{folder}/run.bin.gz", [b"one frame", b"another"])
    ...     read_frames(f"{folder}/run.bin.gz")
    2
    [b'one frame', b'another']
    """
    return list(iterate_frames(path))


def iterate_frames(path: str | PathLike[str]) -> Iterator[bytes]:
    """The frames of `read_frames` one by one, in memory that does not grow with the file.

    Example
    -------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = write_frames(f"{folder}/run.bin.gz", [b"one frame", b"another"])
    ...     next(iterate_frames(f"{folder}/run.bin.gz"))
    b'one frame'
    """
    count = begin = 0  # frames before, and the byte in the file at which `data` begins
    data = b""
    with _reading(path) as file:
        while block := file.read(_BLOCK_BYTES):
            data += block
            at = 0
            while at + _LENGTH.size <= len(data):
                (length,) = _LENGTH.unpack_from(data, at)
                if length > MAX_FRAME_BYTES:
                    raise FrameDecodeError(
                        f"{fspath(path)}: frame {count} at byte {begin + at} claims {length} bytes, more than "
                        f"{MAX_FRAME_BYTES}; this is not a frame file"
                    )
                end = at + _LENGTH.size + length
                if end > len(data):
                    break
                yield data[at + _LENGTH.size : end]
                at = end
                count += 1
            data = data[at:]
            begin += at
    if len(data) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(data)
        raise _truncated(path, count, begin + _LENGTH.size, f"{length} bytes", len(data) - _LENGTH.size)
    if data:
        raise _truncated(path, count, begin, f"{_LENGTH.size} bytes of length", len(data))


def _truncated(path: str | PathLike[str], count: int, at: int, expected: str, found: int) -> FrameDecodeError:
    return FrameDecodeError(
        f"{fspath(path)}: truncated in frame {count} at byte {at}: expected {expected}, found {found}; "
        f"the {count} frames before it are complete"
    )


def write_frames(path: str | PathLike[str], frames: Iterable[bytes]) -> int:
    """Write a frame file, whole or not at all, and return the number of frames; the reverse of `read_frames`.

    Parameters
    ----------
    path: the file to make or replace, compressed if its name ends in `.gz`.
    frames: encoded messages.

    Raises
    ------
    OSError: the file cannot be written; what was there before stays.

    Example
    -------
    >>> import pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp(), "run.bin")
    >>> write_frames(file, [b"abc"]), file.read_bytes()
    (1, b'\\x03\\x00\\x00\\x00abc')
    """
    count = 0
    with whole_file(path) as raw:
        # The name in the header of a gzip file would be that of a draft.
        file = gzip.GzipFile(filename="", mode="wb", fileobj=raw) if _is_gzip(path) else raw
        for frame in frames:
            file.write(_LENGTH.pack(len(frame)))
            file.write(frame)
            count += 1
        if file is not raw:
            file.close()
    return count


class FpmStream:
    """Messages of a recorder file: JSON lines ``{"received_at_ns": int, "metrics": {...}}``.

    Iterating yields (received_at_ns, metrics as a dict) and raises `FrameDecodeError` naming file and line.

    Parameters
    ----------
    path: a recorder file, compressed if its name ends in `.gz`.

    Source: clients.md section 4.

    Example
    -------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "recorded.jsonl")
    ...     _ = file.write_text('{"received_at_ns": 5, "metrics": {"wall_time": 0.01}}')
    ...     list(FpmStream(file))
    [(5, {'wall_time': 0.01})]
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = path

    def __iter__(self) -> Iterator[tuple[int, dict[str, object]]]:
        for _, received_at_ns, metrics in self._rows():
            yield received_at_ns, metrics

    def frames(self) -> Iterator[bytes]:
        """The messages as they were on the wire.

        Raises
        ------
        FrameDecodeError: also for a value that the wire cannot carry, as an integer beyond 64 bits.

        Example
        -------
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "recorded.jsonl")
        >>> _ = file.write_text('{"received_at_ns": 5, "metrics": {"wall_time": 0.01}}')
        >>> from fpmsdk.metrics import decode_frame
        >>> [decode_frame(frame).wall_time for frame in FpmStream(file).frames()]
        [0.01]
        """
        for number, _, metrics in self._rows():
            try:
                yield msgspec.msgpack.encode(metrics)
            except (OverflowError, RecursionError, UnicodeEncodeError) as error:
                raise self._error(number, f"not a forward-pass metrics message: {error}") from None

    def _rows(self) -> Iterator[tuple[int, int, dict[str, object]]]:
        with _reading(self.path) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except RecursionError:
                    raise self._error(number, "nested too deeply") from None
                except ValueError as error:
                    raise self._error(number, f"not JSON: {error}") from None
                if not isinstance(row, dict) or not isinstance(row.get("metrics"), dict):
                    raise self._error(number, 'expected an object with the object "metrics"')
                received_at_ns = row.get("received_at_ns")
                if not isinstance(received_at_ns, int) or isinstance(received_at_ns, bool):
                    raise self._error(number, f"received_at_ns: expected an integer, found {received_at_ns!r}")
                yield number, received_at_ns, row["metrics"]

    def _error(self, number: int, reason: str) -> FrameDecodeError:
        return FrameDecodeError(f"{fspath(self.path)}: line {number}: {reason}")


def group_ranks(frames: Iterable[bytes], attention_dp: int) -> list[list[ForwardPassMetrics]]:
    """Group the frames of all attention-DP ranks into iterations, by worker and counter.

    Heartbeats (counter 0, or no wall time and no scheduled work) belong to no iteration and are left out. A trailing
    iteration that some rank has not reported yet is left out too.

    Parameters
    ----------
    frames: encoded messages in the order received, ranks interleaved in any way.
    attention_dp: number of ranks that report each iteration.

    Returns
    -------
    Iterations in the order in which their first frame came, each with its ranks sorted by `dp_rank`.

    Raises
    ------
    MetricsError: a rank outside 0..attention_dp-1, a rank that reports one iteration twice, or an iteration that
        stays incomplete while later ones are reported.

    Source: clients.md section 4.

    Example
    -------
    >>> from fpmsdk.metrics import encode_frame
    >>> ranks = [ForwardPassMetrics(dp_rank=rank, counter_id=1, wall_time=0.01) for rank in (1, 0)]
    >>> [[rank.dp_rank for rank in iteration] for iteration in group_ranks(map(encode_frame, ranks), attention_dp=2)]
    [[0, 1]]
    """
    iterations: dict[tuple[str, int], dict[int, ForwardPassMetrics]] = {}
    for position, frame in enumerate(frames):
        metrics = decode_frame(frame)
        if metrics.counter_id == 0 or (
            metrics.wall_time == 0.0 and metrics.scheduled_requests == type(metrics.scheduled_requests)()
        ):
            continue
        where = f"frame {position} (worker {metrics.worker_id!r}, counter {metrics.counter_id})"
        if not 0 <= metrics.dp_rank < attention_dp:
            raise MetricsError(
                f"{where}: dp_rank {metrics.dp_rank} is outside 0..{attention_dp - 1}; check attention_dp"
            )
        ranks = iterations.setdefault((metrics.worker_id, metrics.counter_id), {})
        if metrics.dp_rank in ranks:
            raise MetricsError(f"{where}: dp_rank {metrics.dp_rank} reports this iteration twice")
        ranks[metrics.dp_rank] = metrics
    newest: dict[str, int] = {}
    for worker, counter in iterations:
        newest[worker] = max(counter, newest.get(worker, 0))
    complete = []
    for (worker, counter), ranks in iterations.items():
        if len(ranks) == attention_dp:
            complete.append([ranks[rank] for rank in range(attention_dp)])
        elif counter != newest[worker]:
            missing = sorted(set(range(attention_dp)) - set(ranks))
            raise MetricsError(
                f"worker {worker!r}, counter {counter}: ranks {missing} are missing; every iteration needs the "
                f"frames of {attention_dp} ranks"
            )
    return complete
