"""Dynamo request traces (`dynamo.request.trace.v1`): one event a line, of which `request_end` tells a request.

Files of several frontends are one trace. The requests of agents (`agent_context`) are plays, which this reader refuses.
Source: engine-and-replay.md section 5.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from fpmsdk.replay.formats.fields import Fault, found_in, refused_field
from fpmsdk.replay.formats.reader import Reader, ReadOptions
from fpmsdk.replay.formats.source import lines, row_error
from fpmsdk.replay.rows import LeftOut, Row
from fpmsdk.replay.trace import MAX_TOKENS

_NULL = b"null"


class _Replay(msgspec.Struct):
    trace_block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    input_sequence_hashes: list[Annotated[int, msgspec.Meta(ge=0)]]


class _Request(msgspec.Struct):
    request_id: Annotated[str, msgspec.Meta(min_length=1)]
    request_received_ms: float
    output_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    replay: _Replay


class _Event(msgspec.Struct):
    schema: Literal["dynamo.request.trace.v1"]
    event_type: Literal["request_end", "request_payload", "tool_start", "tool_end", "tool_error"]
    agent_context: Any = None
    # Decoded only where it tells a request: other events hold other things under this name.
    request: msgspec.Raw = msgspec.Raw(_NULL)


class _Wrapper(msgspec.Struct):
    event: msgspec.Raw = msgspec.Raw(_NULL)


_WRAPPER = msgspec.json.Decoder(_Wrapper)
_EVENT = msgspec.json.Decoder(_Event)
_REQUEST = msgspec.json.Decoder(_Request)


class DynamoReader(Reader):
    """Events in any order; what else than the end of a request they tell is left out."""

    form = "dynamo"
    options = frozenset({"block_tokens", "more_paths"})

    def __init__(self, path: str | Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self._paths = (path, *(options.more_paths or ()))
        # Lines are counted through several files, so they do not tell a place.
        self.has_lines = len(self._paths) == 1
        self._asked_block_tokens = options.block_tokens
        self._knows_block_tokens = False

    def records(self) -> Iterator[tuple[int, tuple[str | Path, int, bytes]]]:
        """The lines of all files, counted through, each with its file and its line there."""
        before = 0
        for path in self._paths:
            line = 0
            for line, text in lines(path):
                yield before + line, (path, line, text)
            before += line

    def parse(self, line: int, record: tuple[str | Path, int, bytes]) -> Iterator[Row | LeftOut]:
        """One request, or another event."""
        path, line_of_file, text = record
        fault: Fault = partial(row_error, path, line_of_file)
        wrapper = _decoded(_WRAPPER, text, fault, "")
        wrapped = bytes(wrapper.event)
        prefix = "" if wrapped == _NULL else "event."
        event = _decoded(_EVENT, text if wrapped == _NULL else wrapped, fault, prefix)
        if event.event_type != "request_end":
            yield LeftOut(line, f"event {event.event_type}")
            return
        if event.agent_context is not None:
            field = f"{prefix}agent_context"
            raise fault(f"has {field}, a request of an agent's play; give requests without it", field)
        if bytes(event.request) == _NULL:
            raise fault(f"is missing {prefix}request; a request_end event tells what was asked", f"{prefix}request")
        request = _decoded(_REQUEST, bytes(event.request), fault, f"{prefix}request.")
        self._check_block(request.replay, fault, f"{prefix}request.replay.")
        yield Row(
            line,
            request.replay.input_length,
            request.output_tokens,
            at=request.request_received_ms,
            request_id=request.request_id,
            hash_ids=request.replay.input_sequence_hashes,
        )

    def _check_block(self, replay: _Replay, fault: Fault, place: str) -> None:
        size, field = replay.trace_block_size, f"{place}trace_block_size"
        if not self._knows_block_tokens:
            self.block_tokens, self._knows_block_tokens = self._asked_block_tokens or size, True
        if size != self.block_tokens:
            other = "block_tokens asks for" if self._asked_block_tokens else "rows before have"
            raise fault(f"{field} is {size}, but {other} {self.block_tokens}; one trace has one block size", field)
        hashes, field = replay.input_sequence_hashes, f"{place}input_sequence_hashes"
        if max(hashes, default=0) >= 2**64:
            raise fault(f"{field} holds {max(hashes)}; give 64-bit integers", field)
        capacity = len(hashes) * size
        if replay.input_length > capacity:
            field = f"{place}input_length"
            raise fault(
                f"{field} {replay.input_length} exceeds the {capacity} tokens of {len(hashes)} input_sequence_hashes; "
                f"give one for every {size} tokens",
                field,
            )


def _decoded(decoder: msgspec.json.Decoder[Any], text: bytes, fault: Fault, prefix: str) -> Any:
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as refused:
        inner = refused_field(refused)
        field = f"{prefix}{inner}" if inner else prefix.rstrip(".")
        raise fault(f"{field}: {refused}{found_in(text, inner)}", field) from refused
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as broken:
        raise fault(f"is not a JSON object: {broken}; write one event per line", "") from broken
