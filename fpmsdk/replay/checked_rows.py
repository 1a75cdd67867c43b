"""The rows of a file that is checked, on disk, and what the rules of a check ask of all of them at once.

Not the rules, which are in `fpmsdk.replay.check`.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import xxhash

from fpmsdk.replay.rows import Row
from fpmsdk.replay.scratch import scratch_database

_ROWS_PER_FETCH = 1000

_ROW = "line, prompt_tokens, output_tokens, at, end, delay, name, session_id"
_COLUMNS = f"id, {_ROW}, awaits, likeness"
_TABLE = f"create table rows ({_COLUMNS.replace('id,', 'id integer primary key,', 1)}, turn default 0)"
# Where each session begins, in the order of the file.
_FIRSTS = "create temp view firsts as select id, line, coalesce(at, 0) as at, likeness from rows where turn = 0"

_WITHOUT_OUTPUT = "select line from rows where output_tokens = 0 order by id"
_BEFORE_THE_LAST = """
    select line from (select id, line, at < lag(at) over (order by id) as is_before from firsts)
    where is_before order by id
"""
# Rows of one moment follow one another without another time between them.
_COPIES = """
    with starts as (select *, at is not lag(at) over (order by id) as starts from firsts),
    moments as (select *, sum(starts) over (order by id rows unbounded preceding) as moment from starts),
    counted as (select id, line, row_number() over (partition by moment, likeness order by id) as copy from moments)
    select line from counted where copy > 1 order by id
"""
_JUMPS = """
    with steps as (
        select id, line, at, row_number() over (order by id) as number, 1.0 * at / lag(at) over (order by id) as ratio
        from firsts
    )
    select line from steps where number > :enough and at <> 0 and (abs(ratio) > :jump or abs(ratio) < 1.0 / :jump)
    order by id
"""


class CheckedRows:
    """Rows without a fault of their own; memory does not grow with their number.

    Example
    -------
    >>> rows = CheckedRows()
    >>> rows.fill([(1, Row(1, 8, 3, at=5)), (2, Row(2, 8, 3, at=5)), (3, Row(3, 9, 0, at=4))])
    >>> rows.count(), list(rows.copies()), list(rows.before_the_last()), list(rows.without_output())
    (3, [2], [3], [3])
    >>> rows.close()
    """

    def __init__(self) -> None:
        self._rows = scratch_database()
        self._rows.execute(_TABLE)
        self._rows.execute(_FIRSTS)

    def close(self) -> None:
        """Give the disk back."""
        self._rows.close()

    def fill(self, rows: Iterable[tuple[int, Row]]) -> None:
        """Take rows in the order of the file, each with its place, an ascending number."""
        columns = (_columns(place, row) for place, row in rows)
        self._rows.executemany(f"insert into rows ({_COLUMNS}) values ({', '.join('?' * 11)})", columns)

    def drop(self, place: int) -> None:
        """Leave a row out from now on."""
        self._rows.execute("delete from rows where id = ?", (place,))

    def continues(self, place: int) -> None:
        """Say that a row is a later turn of its session."""
        self._rows.execute("update rows set turn = 1 where id = ?", (place,))

    def repeats(self) -> Iterator[tuple[int, Row, int]]:
        """Rows with the name of an earlier one: their place, and the line of that."""
        # Sorted before the first one comes, here and in `sessions`, so that rows may be changed under way.
        last, first_line = None, 0
        for name, place, line in self._rows.execute("select name, id, line from rows order by name, id"):
            if name != last:
                last, first_line = name, line
            elif line != first_line:
                yield place, self._row(place), first_line

    def sessions(self) -> Iterator[Iterator[tuple[int, Row]]]:
        """The rows of each session with their places; rows without one together, but only those that wait."""
        rows = self._rows.execute(
            f"select {_COLUMNS} from rows where session_id is not null or delay <> 0 or awaits is not null "
            "order by session_id, id"
        )
        for _, members in groupby(rows, key=itemgetter(8)):
            yield ((columns[0], _row(*columns[1:10])) for columns in members)

    def count(self) -> int:
        """The number of rows."""
        return int(self._rows.execute("select count(*) from rows").fetchone()[0])

    def count_sessions(self) -> int:
        """The number of rows that begin a session."""
        return int(self._rows.execute("select count(*) from firsts").fetchone()[0])

    def without_output(self) -> Iterator[int]:
        """Lines of requests for no output."""
        return self._lines(_WITHOUT_OUTPUT)

    def before_the_last(self) -> Iterator[int]:
        """Lines of sessions that begin before the one above."""
        return self._lines(_BEFORE_THE_LAST)

    def copies(self) -> Iterator[int]:
        """Lines of requests that are equal to another one of the same moment."""
        return self._lines(_COPIES)

    def jumps(self, enough: int, jump: float) -> Iterator[int]:
        """Lines whose time is another one than that above by a large factor; not of the first `enough` sessions."""
        return self._lines(_JUMPS, enough=enough, jump=jump)

    def first(self) -> tuple[float, int]:
        """When the first session begins, and its line."""
        return self._end("asc")

    def last(self) -> tuple[float, int]:
        """When the last session begins, and its line."""
        return self._end("desc")

    def arrivals(self) -> Iterator[list[tuple[float, int]]]:
        """When sessions begin, in order of time, each with its line, some at a time."""
        cursor = self._rows.execute("select at, line from firsts order by at, id")
        while some := cursor.fetchmany(_ROWS_PER_FETCH):
            yield some

    def _lines(self, query: str, **values: float) -> Iterator[int]:
        return (line for (line,) in self._rows.execute(query, values))

    def _end(self, way: str) -> tuple[float, int]:
        at, line = self._rows.execute(f"select at, line from firsts order by at {way}, id limit 1").fetchone()
        return at, line

    def _row(self, place: int) -> Row:
        return _row(*self._rows.execute(f"select {_ROW}, awaits from rows where id = ?", (place,)).fetchone())


def _columns(place: int, row: Row) -> tuple[object, ...]:
    likeness = xxhash.xxh3_128(struct.pack("qq", row.prompt_tokens, row.output_tokens))
    likeness.update(array("Q", row.hash_ids).tobytes())
    lengths = row.prompt_tokens, row.output_tokens
    awaits = array("q", row.awaits).tobytes() if row.awaits else None
    named = row.name, row.session_id, awaits, likeness.digest()
    return place, row.line, *lengths, row.at, row.end, row.delay, *named


def _row(*columns: Any) -> Row:
    *values, awaits = columns
    row = Row(*values)
    row.awaits = [] if awaits is None else array("q", awaits).tolist()
    return row
