"""What every form of trace file has: records in a stream, each parsed to rows; options that a form may take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from fpmsdk.config.schema import shown
from fpmsdk.errors import TraceError
from fpmsdk.replay.formats.source import row_error
from fpmsdk.replay.rows import Clock, LeftOut, Row
from fpmsdk.replay.timeline import Timeline
from fpmsdk.replay.trace import check_block_tokens

_ACCEPTED = {"time_unit": ("ms", "s"), "nested_timestamps": ("auto", "absolute", "relative")}


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of `Trace.read`; None where not given. Raises TraceError for a value that none can have."""

    block_tokens: int | None = None
    time_unit: str | None = None
    benchmark: int | None = None
    nested_timestamps: str | None = None
    more_paths: tuple[str | Path, ...] | None = None
    kv_block_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        if self.block_tokens is not None:
            check_block_tokens(self.block_tokens)
        if self.kv_block_tokens is not None:
            check_block_tokens(self.kv_block_tokens)
        for name, accepted in _ACCEPTED.items():
            value = getattr(self, name)
            if value is not None and value not in accepted:
                raise TraceError(f"{name} is {shown(value)}; give {' or '.join(accepted)}", field=name)


class Reader(ABC):
    """One source file.

    Attributes
    ----------
    form: the name of the form.
    options: names of the `ReadOptions` that the form takes.
    clock: unit of its times.
    keeps_clock: times count from the 0 of the source, not from the earliest arrival.
    describes_output: hash ids of its rows identify answers too.
    has_lines: whether numbers of rows are lines of the file.
    block_tokens: prompt tokens per hash id; final once the first record was read.
    """

    form: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()
    keeps_clock: ClassVar[bool] = False
    describes_output: ClassVar[bool] = False
    has_lines: bool = True

    def __init__(self, path: str | Path, options: ReadOptions) -> None:
        self.path = path
        self.clock = Clock.MILLISECONDS
        self.block_tokens = 512
        self._check_options(options)

    @abstractmethod
    def records(self) -> Iterator[tuple[int, Any]]:
        """The records of the file in order, each with its line, or its ordinal where the form has no lines.

        Raises
        ------
        TraceError: the file cannot be read on.
        """

    @abstractmethod
    def parse(self, line: int, record: Any) -> Iterator[Row | LeftOut]:
        """What a record stands for.

        Raises
        ------
        TraceError: the record breaks a rule of the form; names file, line and field.
        """

    def check_blocks(self, row: Row) -> None:
        """Check that the hash ids of a row cover its prompt; raises TraceError."""
        capacity = len(row.hash_ids) * self.block_tokens
        if row.hash_ids and row.prompt_tokens > capacity:
            raise self.fault(
                row,
                f"has a prompt of {row.prompt_tokens} tokens, but {len(row.hash_ids)} hash_ids of {self.block_tokens} "
                f"tokens cover {capacity}; give a hash id for every block or none at all",
                "hash_ids",
            )

    def rows(self, on_fault: Callable[[TraceError], None] | None = None) -> Iterator[Row | LeftOut]:
        """Every row in order; a fault of one record goes to `on_fault`, or ends the reading.

        Raises
        ------
        TraceError: see `records` and `parse`.
        """
        for line, record in self.records():
            try:
                for row in self.parse(line, record):
                    if isinstance(row, Row):
                        self.check_blocks(row)
                    yield row
            except TraceError as fault:
                if on_fault is None:
                    raise
                on_fault(fault)

    def timeline(self) -> Timeline:
        """What places the rows of this source."""
        return Timeline(self.clock, self.fault, "line" if self.has_lines else "request")

    def fault(self, row: Row, text: str, field: str = "") -> TraceError:
        """The error of a row."""
        if self.has_lines:
            return row_error(self.path, row.line, text, field)
        return TraceError(f'{self.path}: request "{row.name}" {text}', path=str(self.path), field=field)

    def repeated_name(self, row: Row, earlier: int) -> TraceError:
        """The error of a row with the name of an earlier one, which stands on that line."""
        counted = "line" if self.has_lines else "request"
        text = f'repeats request_id "{row.name}" of {counted} {earlier}; request ids are unique'
        return self.fault(row, text, "request_id")

    def _check_options(self, options: ReadOptions) -> None:
        for option in fields(options):
            if getattr(options, option.name) is not None and option.name not in self.options:
                raise TraceError(
                    f"{self.path}: {option.name} has no effect on a trace of form {self.form}; leave it out",
                    path=str(self.path),
                    field=option.name,
                )
