"""Request rows of a replay in a Parquet file that grows with the run; in memory is one group of rows.

Not what the columns mean; see `fpmsdk.replay.report`.
"""

from __future__ import annotations

from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from fpmsdk.replay.fold import latencies_of
from fpmsdk.replay.report import request_table
from fpmsdk.replay.totals import Columns

_ROWS_PER_GROUP = 16_384


class RequestRows:
    """Collects request columns into groups of rows."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._writer: pq.ParquetWriter | None = None
        self._pending: list[Any] = []
        self._num_pending = 0

    def write(self, columns: Columns) -> None:
        """Append rows, with their latencies."""
        table = request_table(columns, latencies_of(columns))
        self._pending.append(table)
        self._num_pending += table.num_rows
        if self._num_pending >= _ROWS_PER_GROUP:
            self._flush()

    def close(self) -> None:
        """End the file."""
        self._flush()
        if self._writer is not None:
            self._writer.close()

    def _flush(self) -> None:
        if not self._pending:
            return
        table = pa.concat_tables(self._pending)
        self._pending.clear()
        self._num_pending = 0
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._file, table.schema, compression="zstd")
        self._writer.write_table(table)
