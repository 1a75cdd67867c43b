"""Mooncake JSON lines: one request a line, with prefix-block hashes and optional sessions.

Source: engine-and-replay.md section 5.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Annotated

import msgspec

from fpmsdk.errors import TraceError
from fpmsdk.replay.formats.fields import found_in, refused_field
from fpmsdk.replay.formats.reader import Reader, ReadOptions
from fpmsdk.replay.formats.source import lines, row_error
from fpmsdk.replay.rows import Clock, LeftOut, PlacedRow, Row
from fpmsdk.replay.trace import MAX_PRIORITY, MAX_TOKENS

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_HashId = Annotated[int, msgspec.Meta(ge=0)]
# Blocks that no other request has need ids of their own; those of a source start at 0 as a rule.
_FIRST_FRESH_ID = 2**63
EMPTY_PROMPT = "input_length is 0; a prompt has at least one token"


class _Row(msgspec.Struct):
    hash_ids: list[_HashId] | None = None
    input_length: _Tokens | None = None
    input_tokens: _Tokens | None = None
    output_length: _Tokens | None = None
    output_tokens: _Tokens | None = None
    output_token_ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]] | None = None
    timestamp: float | None = None
    created_time: float | None = None
    delay: float | None = None
    session_id: str | None = None
    request_id: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY - 1, le=MAX_PRIORITY)] | None = None
    # Settings of a router; read to check them, without effect on one engine.
    strict_priority: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] | None = None
    policy_class: str | None = None


_DECODER = msgspec.json.Decoder(_Row)
_ALIASES = (
    ("input_length", "input_tokens"),
    ("output_length", "output_tokens"),
    ("timestamp", "created_time"),
)


class MooncakeReader(Reader):
    """Rows in any order; a missing timestamp of a first turn is 0."""

    form = "mooncake"
    options = frozenset({"block_tokens", "time_unit"})

    def __init__(self, path: str | Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self.clock = Clock(options.time_unit or "ms")
        self.block_tokens = options.block_tokens or 512

    def records(self) -> Iterator[tuple[int, bytes]]:
        """The lines."""
        return lines(self.path)

    def parse(self, line: int, record: bytes) -> Iterator[Row | LeftOut]:
        """One request."""
        row = decoded(self.path, line, record)
        hashes, prompt, output = lengths(self.path, line, row, self.block_tokens)
        if prompt == 0:
            raise row_error(self.path, line, EMPTY_PROMPT, "input_length")
        yield Row(
            line,
            prompt,
            output,
            at=row.timestamp,
            delay=row.delay,
            request_id=row.request_id,
            session_id=row.session_id,
            priority=row.priority or 0,
            hash_ids=hashes,
        )

    def check_blocks(self, row: Row) -> None:
        """Check that the hash ids of a row cover its prompt; raises TraceError."""
        self.check_capacity(row.line, row.prompt_tokens, len(row.hash_ids), self.block_tokens)

    def check_capacity(self, line: int, input_tokens: int, num_hashes: int, block_tokens: int) -> None:
        """Check that so many hash ids cover so many tokens; raises TraceError."""
        capacity = num_hashes * block_tokens
        if input_tokens > capacity:
            raise row_error(
                self.path,
                line,
                f"input_length {input_tokens} exceeds hash_ids capacity {capacity}; give a hash id for every "
                f"{block_tokens} tokens, or the block_tokens that the trace was made with",
                "input_length",
            )


def decoded(path: str | Path, line: int, text: bytes) -> _Row:
    """The fields of a line under their own names; raises TraceError."""
    try:
        row = _DECODER.decode(text)
    except msgspec.ValidationError as fault:
        field = refused_field(fault)
        raise row_error(path, line, f"{field}: {fault}{found_in(text, field)}", field) from fault
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise row_error(path, line, f"is not a JSON object: {fault}; write one request per line") from fault
    for name, alias in _ALIASES:
        value = getattr(row, alias)
        if value is None:
            continue
        if getattr(row, name) is not None:
            raise row_error(path, line, f"gives both {name} and its alias {alias}; keep one", name)
        setattr(row, name, value)
    return row


def lengths(path: str | Path, line: int, row: _Row, block_tokens: int) -> tuple[list[int], int, int]:
    """The hash ids, the input and the output tokens of a line; raises TraceError."""
    fault = partial(row_error, path, line)
    if row.hash_ids is None:
        raise fault(
            f"is missing hash_ids; give one id per {block_tokens} prompt tokens, equal where prompts are", "hash_ids"
        )
    if row.output_length is None:
        raise fault("is missing output_length; give the number of output tokens", "output_length")
    if max(row.hash_ids, default=0) >= 2**64:
        raise fault(f"hash_ids holds {max(row.hash_ids)}; give 64-bit integers", "hash_ids")
    prompt = len(row.hash_ids) * block_tokens if row.input_length is None else row.input_length
    if prompt > MAX_TOKENS:
        raise fault(f"hash_ids stand for {prompt} tokens, at most {MAX_TOKENS} fit", "hash_ids")
    if row.output_token_ids is not None and len(row.output_token_ids) != row.output_length:
        raise fault(
            f"output_length {row.output_length} does not match output_token_ids length "
            f"{len(row.output_token_ids)}; make them equal or leave output_token_ids out",
            "output_token_ids",
        )
    return row.hash_ids, prompt, row.output_length


class MooncakeWriter:
    """Writes rows as Mooncake JSON lines in ms; whoever reads them needs `block_tokens`, which the form cannot hold.

    A row without blocks gets ids that no other row has.
    """

    form = "mooncake"

    def __init__(self, file: IO[bytes], block_tokens: int) -> None:
        self._file = file
        self._block_tokens = block_tokens
        self._num_fresh = 0
        self._encode = msgspec.json.Encoder().encode

    def write(self, rows: Iterable[PlacedRow]) -> None:
        """Append rows.

        Raises
        ------
        TraceError: a row says what the form cannot.
        """
        for row in rows:
            if row.dp_rank >= 0 or row.prefill_dp_rank >= 0:
                raise TraceError(
                    f'request "{row.request_id}" asks for an attention-DP rank, which a Mooncake trace cannot say; '
                    "write Parquet",
                    field="dp_rank",
                )
            if row.awaits:
                raise TraceError(
                    f'request "{row.request_id}" waits for other turns than the one before it, which a Mooncake trace '
                    "cannot say; write Parquet",
                    field="awaits",
                )
            if max(row.hash_ids, default=0) >= _FIRST_FRESH_ID:
                raise TraceError(
                    f'request "{row.request_id}" has a hash id of {_FIRST_FRESH_ID} or more, which rows without '
                    "blocks may use; write Parquet",
                    field="hash_ids",
                )
            self._file.write(self._encode(self._line(row)) + b"\n")

    def close(self) -> None:
        """End the file; there is nothing to add."""

    def _line(self, row: PlacedRow) -> dict[str, object]:
        hash_ids = list(row.hash_ids)
        if not hash_ids:
            first = _FIRST_FRESH_ID + self._num_fresh
            self._num_fresh += -(-row.prompt_tokens // self._block_tokens)
            hash_ids = list(range(first, _FIRST_FRESH_ID + self._num_fresh))
        line: dict[str, object] = {
            "timestamp": row.arrival_ms,
            "input_length": row.prompt_tokens,
            "output_length": row.output_tokens,
            "hash_ids": hash_ids,
            "request_id": row.request_id,
            "session_id": row.session_id or row.request_id,
        }
        if row.arrival_ms is None:
            del line["timestamp"]
            line["delay"] = row.delay_ms
        if row.priority:
            line["priority"] = row.priority
        return line
