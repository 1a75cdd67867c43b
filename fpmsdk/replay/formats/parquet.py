"""Our own form: a Parquet file that says itself what it holds, row by row as the trace serves them or in any order.

Columns: `request_id` (string), `session_id` (string, null for a session with the name of its only or first request),
`arrival_ms` (float64, null for a later turn), `delay_ms` (float64), `prompt_tokens`, `output_tokens`, `priority`,
`dp_rank`, `prefill_dp_rank` (int64, -1 for any rank), `hash_ids` (list of uint64), `awaits` (list of int64: how many
rows of its session back those lie that a turn waits for; empty for the row before it). The schema's metadata hold
`fpmsdk.trace`: a JSON object with the `version` of the form and `block_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from fpmsdk.config.schema import shown
from fpmsdk.errors import TraceError
from fpmsdk.replay.formats.reader import Reader, ReadOptions
from fpmsdk.replay.formats.source import row_error
from fpmsdk.replay.rows import LeftOut, PlacedRow, Row
from fpmsdk.replay.trace import MAX_PRIORITY, MAX_TOKENS

_KEY = b"fpmsdk.trace"
_VERSION = 1
_ROWS_PER_READ = 4096
_ROWS_PER_GROUP = 65_536
_BLOCKS_PER_GROUP = 4_000_000

_FIELDS = [
    pa.field("request_id", pa.string(), nullable=False),
    pa.field("session_id", pa.string()),
    pa.field("arrival_ms", pa.float64()),
    pa.field("delay_ms", pa.float64(), nullable=False),
    *(
        pa.field(name, pa.int64(), nullable=False)
        for name in ("prompt_tokens", "output_tokens", "priority", "dp_rank", "prefill_dp_rank")
    ),
    pa.field("hash_ids", pa.list_(pa.field("element", pa.uint64(), nullable=False)), nullable=False),
    pa.field("awaits", pa.list_(pa.field("element", pa.int64(), nullable=False)), nullable=False),
]
_RANGES = {
    "prompt_tokens": (1, MAX_TOKENS),
    "output_tokens": (0, MAX_TOKENS),
    "priority": (-MAX_PRIORITY - 1, MAX_PRIORITY),
    "dp_rank": (-1, MAX_PRIORITY),
    "prefill_dp_rank": (-1, MAX_PRIORITY),
}


class _Header(msgspec.Struct):
    version: int
    block_tokens: int


class ParquetReader(Reader):
    """Rows a few thousand at a time."""

    form = "parquet"
    keeps_clock = True

    def __init__(self, path: str | Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        # Who reads the file needs to know it at once, the writer of another form for instance.
        with self._opened() as file:
            self.block_tokens = self._header(file).block_tokens

    def records(self) -> Iterator[tuple[int, PlacedRow]]:
        """The rows, counted from 1."""
        line = 0
        with self._opened() as file:
            try:
                for batch in file.iter_batches(_ROWS_PER_READ, columns=list(PlacedRow._fields)):
                    columns = (column.to_pylist() for column in batch.columns)
                    for values in zip(*columns, strict=True):
                        line += 1
                        yield line, PlacedRow(*values)
            except (pa.ArrowException, OSError) as fault:
                raise self._damaged(fault) from fault

    def parse(self, line: int, record: PlacedRow) -> Iterator[Row | LeftOut]:
        """One request."""
        for name, (low, high) in _RANGES.items():
            if not low <= getattr(record, name) <= high:
                text = f"{name} is {shown(getattr(record, name))}; give {low} to {high}"
                raise row_error(self.path, line, text, name)
        for name in ("arrival_ms", "delay_ms"):
            value = getattr(record, name)
            if value is not None and not 0 <= value < float("inf"):
                text = f"{name} is {value!r}; give finite milliseconds of at least 0"
                raise row_error(self.path, line, text, name)
        if not record.request_id:
            raise row_error(self.path, line, "request_id is empty; give every request a name", "request_id")
        yield Row(
            line,
            record.prompt_tokens,
            record.output_tokens,
            at=record.arrival_ms,
            delay=record.delay_ms,
            request_id=record.request_id,
            session_id=record.session_id,
            priority=record.priority,
            dp_rank=record.dp_rank,
            prefill_dp_rank=record.prefill_dp_rank,
            hash_ids=record.hash_ids,
            awaits=record.awaits,
        )

    def _opened(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.path)
        except FileNotFoundError as fault:
            raise TraceError(
                f"{self.path}: cannot read the trace: No such file or directory", path=str(self.path)
            ) from fault
        except (pa.ArrowException, OSError) as fault:
            raise self._damaged(fault) from fault

    def _header(self, file: pq.ParquetFile) -> _Header:
        text = (file.schema_arrow.metadata or {}).get(_KEY)
        if text is None:
            raise self._refused("does not say that it is a trace; convert the trace it was made from again")
        try:
            header = msgspec.json.decode(text, type=_Header)
        except msgspec.DecodeError as fault:
            raise self._refused(f"says of itself what cannot be read: {fault}") from fault
        if header.version != _VERSION or not 1 <= header.block_tokens <= MAX_TOKENS:
            raise self._refused(f"is a trace of version {header.version}; this release reads version {_VERSION}")
        for field in _FIELDS:
            index = file.schema_arrow.get_field_index(field.name)
            if index < 0 or file.schema_arrow.field(index).type != field.type:
                found = "no such column" if index < 0 else str(file.schema_arrow.field(index).type)
                raise self._refused(f"has {found} for {field.name}; a trace has {field.type}", field.name)
            if not field.nullable and file.schema_arrow.field(index).nullable:
                raise self._refused(f"may have nulls in {field.name}; a trace has none", field.name)
        return header

    def _refused(self, text: str, field: str = "") -> TraceError:
        return TraceError(f"{self.path}: the Parquet file {text}", path=str(self.path), field=field)

    def _damaged(self, fault: Exception) -> TraceError:
        return TraceError(
            f"{self.path}: not a readable Parquet file: {str(fault).splitlines()[0]}", path=str(self.path)
        )


class ParquetWriter:
    """Writes rows in groups; what is in memory does not grow with their number."""

    form = "parquet"

    def __init__(self, file: IO[bytes], block_tokens: int) -> None:
        header = msgspec.json.encode(_Header(_VERSION, block_tokens))
        self._schema = pa.schema(_FIELDS, metadata={_KEY: header})
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd")
        self._rows: list[PlacedRow] = []
        self._num_blocks = 0

    def write(self, rows: Iterable[PlacedRow]) -> None:
        """Append rows."""
        for row in rows:
            self._rows.append(row)
            self._num_blocks += len(row.hash_ids)
            if len(self._rows) == _ROWS_PER_GROUP or self._num_blocks > _BLOCKS_PER_GROUP:
                self._flush()

    def close(self) -> None:
        """End the file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if not self._rows:
            return
        columns: list[Any] = [
            pa.array(column, field.type) for column, field in zip(zip(*self._rows, strict=True), _FIELDS, strict=True)
        ]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))
        self._rows.clear()
        self._num_blocks = 0
