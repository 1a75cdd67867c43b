"""BurstGPT traces: CSV with Timestamp in seconds, request and response tokens, sessions in newer releases.

A record without response tokens is a request that failed; it is left out, as in the files "without fails".
Source: HPMLL/BurstGPT, releases 1.1 and 2.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from fpmsdk.replay.formats.fields import nanoseconds, token_count
from fpmsdk.replay.formats.reader import Reader, ReadOptions
from fpmsdk.replay.formats.source import row_error
from fpmsdk.replay.formats.table import Table
from fpmsdk.replay.rows import Clock, LeftOut, Row

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


class BurstGptReader(Reader):
    """A later turn of a conversation waits from the answer of the turn before it, where `Elapsed time` tells when."""

    form = "burstgpt"

    def __init__(self, path: str | Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self.clock = Clock.NANOSECONDS
        self._table = Table(path, COLUMNS, "a BurstGPT trace", ("Session ID", "Elapsed time"))

    def records(self) -> Iterator[tuple[int, list[str]]]:
        """The rows below the header."""
        return self._table.rows()

    def parse(self, line: int, record: list[str]) -> Iterator[Row | LeftOut]:
        """One request, or one that failed."""
        fault = partial(row_error, self.path, line)
        at, prompt, output, session, elapsed = self._table.cells(line, record)
        at_ns = nanoseconds(fault, "Timestamp", at)
        output_tokens = token_count(fault, "Response tokens", output, 0)
        prompt_tokens = token_count(fault, "Request tokens", prompt, min(1, output_tokens))
        if output_tokens == 0:
            yield LeftOut(line, "failed: no response tokens")
            return
        yield Row(
            line,
            prompt_tokens,
            output_tokens,
            at=at_ns,
            end=at_ns + nanoseconds(fault, "Elapsed time", elapsed) if elapsed.strip() else None,
            session_id=session.strip() or None,
        )
