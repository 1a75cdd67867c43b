"""A CSV file with a header: its rows, and the cells of named columns in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fpmsdk.replay.formats.source import csv_rows, no_requests, row_error


class Table:
    """Columns are found by name; others are ignored.

    Parameters
    ----------
    path: the file.
    columns: those that the header must have.
    what: what the file should be, for errors.
    optional: further columns; their cells are empty where the header lacks them.
    """

    def __init__(self, path: str | Path, columns: Sequence[str], what: str, optional: Sequence[str] = ()) -> None:
        self._path = path
        self._columns = columns
        self._optional = optional
        self._what = what
        self._width = 0
        self._places: list[int | None] = []

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """The rows below the header, each with its line.

        Raises
        ------
        TraceError: there is no header, or it lacks a column.
        """
        rows = csv_rows(self._path)
        line, header = next(rows, (0, []))
        if not header:
            raise no_requests(self._path)
        header = [name.strip() for name in header]
        for name in self._columns:
            if name not in header:
                text = f"lacks the column {name}; {self._what} has {', '.join(self._columns)}"
                raise row_error(self._path, line, text, name)
        self._width = len(header)
        self._places = [header.index(name) for name in self._columns]
        self._places += [header.index(name) if name in header else None for name in self._optional]
        yield from rows

    def cells(self, line: int, row: list[str]) -> list[str]:
        """The cells of the named columns, then those of the optional ones.

        Raises
        ------
        TraceError: the row has more or fewer cells than the header.
        """
        if len(row) != self._width:
            raise row_error(self._path, line, f"has {len(row)} cells, the header {self._width}; is the file cut short?")
        return ["" if place is None else row[place] for place in self._places]
