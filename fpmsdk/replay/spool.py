"""Rows of a source on disk, put into the order of a trace there: what is in memory does not grow with their number.

The disk is a private SQLite database, which vanishes with the spool; its sorting is external. Checks what
`fpmsdk.replay.timeline` and `builder` check, without their table of names.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import numpy as np

from fpmsdk.replay.builder import check_span
from fpmsdk.replay.formats.reader import Reader
from fpmsdk.replay.formats.source import no_requests
from fpmsdk.replay.portions import Portion
from fpmsdk.replay.rows import PlacedRow, Row
from fpmsdk.replay.scratch import full_disk_told, scratch_database
from fpmsdk.replay.timeline import Timeline

_ROWS_PER_STEP = 1000
_ROWS_PER_PORTION = 1024

_COLUMNS = (
    *("line", "name", "session_id", "at", "end", "delay", "prompt_tokens", "output_tokens", "priority"),
    *("dp_rank", "prefill_dp_rank", "hash_ids", "awaits"),
)
# Beside what the source says: where the row stands in its session, and when and where that begins.
_TABLE = f"create table rows (id integer primary key, {', '.join(_COLUMNS)}, first_at, first_id, turn, delay_ms)"
_INSERT = f"insert into rows values (null, {', '.join('?' * len(_COLUMNS))}, ?, null, 0, 0.0)"


class Spool:
    """The rows of one source.

    Parameters
    ----------
    reader: the source.
    advance: called with the number of rows read since its last call.

    Raises
    ------
    TraceError: the source breaks a rule, or has no requests.
    """

    def __init__(self, reader: Reader, advance: Callable[[int], None] = lambda rows: None) -> None:
        self._reader = reader
        self._rows = scratch_database()
        try:
            with full_disk_told(reader.path):
                self._fill(advance)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the disk back."""
        self._rows.close()

    def rows(self) -> Iterator[PlacedRow]:
        """The requests in the order of the source."""
        wanted = (
            "name, session_id, first_at, delay_ms, prompt_tokens, output_tokens, priority, dp_rank, prefill_dp_rank, "
            "hash_ids, awaits, turn"
        )
        for name, session, at, *columns, hash_ids, awaits, turn in self._rows.execute(
            f"select {wanted} from rows order by id"
        ):
            arrival_ms = self._reader.clock.to_ms(at - self._origin) if turn == 0 else None
            steps = [] if awaits is None else array("q", awaits).tolist()
            blocks = array("Q", hash_ids or b"").tolist()
            yield PlacedRow._make((name, session, arrival_ms, *columns, blocks, steps))

    def portions(self) -> Iterator[Portion]:
        """The requests in the order of a trace, where no session branches."""
        order = "id" if self._is_in_order else "first_at, coalesce(first_id, id), turn"
        wanted = (
            "name, session_id, first_at, turn, delay_ms, prompt_tokens, output_tokens, priority, dp_rank, "
            "prefill_dp_rank, hash_ids"
        )
        cursor = self._rows.execute(f"select {wanted} from rows order by {order}")
        pending: list[tuple[Any, ...]] = []
        while fetched := cursor.fetchmany(_ROWS_PER_PORTION):
            firsts = [len(pending) + row for row, columns in enumerate(fetched) if columns[3] == 0]
            pending += fetched
            # The last session may go on.
            if firsts and firsts[-1] > 0:
                yield self._portion(pending[: firsts[-1]])
                del pending[: firsts[-1]]
        if pending:
            yield self._portion(pending)

    def _fill(self, advance: Callable[[int], None]) -> None:
        self._rows.execute(_TABLE)
        self.num_requests = 0
        self._is_in_order = True
        self.has_blocks = self.has_branches = self._has_names = self._has_sessions = False
        self.left_out: Counter[str] = Counter()
        self._last_at: float | None = None
        self._rows.executemany(_INSERT, self._checked(advance))
        self.block_tokens = self._reader.block_tokens
        if not self.num_requests:
            raise no_requests(self._reader.path)
        if self._has_names:
            self._check_names()
        if self._has_sessions:
            self._is_in_order = False
            self._place_turns()
        self.has_delays = bool(
            self._rows.execute("select exists (select 1 from rows where delay_ms > 0)").fetchone()[0]
        )
        (first, first_line), (last, last_line) = (
            self._rows.execute(
                f"select first_at, line from rows where turn = 0 order by first_at {way}, id limit 1"
            ).fetchone()
            for way in ("asc", "desc")
        )
        check_span(str(self._reader.path), self._reader.clock.to_ms(last - first), first_line, last_line)
        self._origin = 0 if self._reader.keeps_clock else first

    def _checked(self, advance: Callable[[int], None]) -> Iterator[tuple[Any, ...]]:
        """Every row as it is inserted."""
        alone = Timeline(self._reader.clock, self._reader.fault, checks_names=False)
        for number, row in enumerate(self._reader.rows(), 1):
            if number % _ROWS_PER_STEP == 0:
                advance(_ROWS_PER_STEP)
            if not isinstance(row, Row):
                self.left_out[row.reason] += 1
                continue
            self.has_branches = self.has_branches or bool(row.awaits)
            if row.session_id is None:
                alone.place(row)
            self.num_requests += 1
            self._has_names = self._has_names or row.request_id is not None
            self._has_sessions = self._has_sessions or row.session_id is not None
            at = row.at or 0
            self._is_in_order = self._is_in_order and (self._last_at is None or self._last_at <= at)
            self._last_at = at
            used = len(row.hash_ids)
            if not row.describes_output:
                used = min(used, -(-row.prompt_tokens // self._reader.block_tokens))
            self.has_blocks = self.has_blocks or used > 0
            yield (
                row.line,
                row.name,
                row.session_id,
                row.at,
                row.end,
                row.delay,
                row.prompt_tokens,
                row.output_tokens,
                row.priority,
                row.dp_rank,
                row.prefill_dp_rank,
                array("Q", row.hash_ids[:used]).tobytes() if used else None,
                array("q", row.awaits).tobytes() if row.awaits else None,
                at,
            )

    def _check_names(self) -> None:
        earlier = "select id, lag(line) over (partition by name order by id) as earlier from rows"
        found = self._rows.execute(
            f"select id, earlier from ({earlier}) where earlier is not null order by id limit 1"
        ).fetchone()
        if found is not None:
            raise self._reader.repeated_name(self._row(found[0]), found[1])

    def _row(self, id: int) -> Row:
        columns = self._rows.execute(
            "select line, prompt_tokens, output_tokens, at, end, delay, name, session_id from rows where id = ?",
            (id,),
        ).fetchone()
        return Row(*columns)

    def _place_turns(self) -> None:
        """Say of every row of a named session which turn it is and how long it waits."""
        wanted = "session_id, id, awaits, line, prompt_tokens, output_tokens, at, end, delay, name"
        rows = self._rows.execute(f"select {wanted} from rows where session_id is not null order by session_id, id")
        # Sorted before the first one comes, so that rows may be changed under way.
        writing = self._rows.cursor()
        for session_id, members in groupby(rows, key=lambda columns: columns[0]):
            timeline = Timeline(self._reader.clock, self._reader.fault, checks_names=False)
            first: tuple[float, int] | None = None
            for _, id, awaits, *columns in members:
                row = Row(*[*columns, session_id])
                row.awaits = [] if awaits is None else array("q", awaits).tolist()
                _, turn, delay_ms = timeline.place(row)
                first = first or (row.at or 0, id)
                writing.execute(
                    "update rows set first_at = ?, first_id = ?, turn = ?, delay_ms = ? where id = ?",
                    (*first, turn, delay_ms, id),
                )

    def _portion(self, rows: list[tuple[Any, ...]]) -> Portion:
        names, sessions, at, turn, delay_ms, *counts, blocks = (list(column) for column in zip(*rows, strict=True))
        turn_index = np.array(turn, np.int64)
        is_alone = (turn_index == 0) & np.append(turn_index[1:] == 0, True)
        session_ids = np.array(sessions, object)
        session_ids[is_alone] = None
        # As Python numbers, whose differences do not wrap around.
        clock, origin = self._reader.clock, self._origin
        arrival_ms = np.array([clock.to_ms(time - origin) for time in at], np.float64)
        arrival_ms[turn_index > 0] = np.nan
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([0 if block is None else len(block) // 8 for block in blocks], out=offsets[1:])
        prompts, outputs, priorities, ranks, prefill_ranks = (np.array(count, np.int64) for count in counts)
        return Portion(
            request_ids=np.array(names, object),
            session_ids=session_ids,
            arrival_ms=arrival_ms,
            turn_index=turn_index,
            prompt_tokens=prompts,
            output_tokens=outputs,
            priority=priorities,
            dp_rank=ranks,
            prefill_dp_rank=prefill_ranks,
            delay_ms=np.array(delay_ms, np.float64),
            hash_offsets=offsets,
            hash_ids=np.frombuffer(b"".join(block for block in blocks if block is not None), np.int64),
        )
