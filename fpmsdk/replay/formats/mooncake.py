"""Mooncake JSON lines: one request a line, with prefix-block hashes and optional sessions.

Source: engine-and-replay.md section 5.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fpmsdk.replay.formats.source import no_requests, read_bytes, row_error
from fpmsdk.replay.trace import MAX_PRIORITY, MAX_TOKENS, Trace

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_HashId = Annotated[int, msgspec.Meta(ge=0)]


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


@dataclass(slots=True)
class _Session:
    turns: int = 0
    timestamp: float | None = None  # the latest one known


def read(path: str | Path, block_tokens: int) -> Trace:
    """Read a Mooncake trace; the earliest arrival becomes 0 and rows may be in any order.

    Raises
    ------
    TraceError: names the file, the line and the field.
    """
    arrivals: list[float] = []
    delays: list[float] = []
    prompts: list[int] = []
    outputs: list[int] = []
    priorities: list[int] = []
    request_ids: list[str] = []
    session_ids: list[str] = []
    hash_ids: list[list[int]] = []
    sessions: dict[str, _Session] = {}
    id_lines: dict[str, int] = {}

    for line, text in enumerate(read_bytes(path).split(b"\n"), 1):
        if not text.strip():
            continue
        row = _decoded(path, line, text)
        hashes, prompt, output = _lengths(path, line, row, block_tokens)
        request_id = row.request_id or f"request_{line}"
        if (earlier := id_lines.setdefault(request_id, line)) != line:
            raise row_error(
                path,
                line,
                f'repeats request_id "{request_id}" of line {earlier}; request ids are unique',
                "request_id",
            )
        session_id = f"request_{line}" if row.session_id is None else row.session_id
        session = sessions.setdefault(session_id, _Session())
        delays.append(_delay(path, line, row, session_id, session))
        arrivals.append(math.nan if session.turns else row.timestamp or 0.0)
        session.turns += 1
        if row.timestamp is not None:
            session.timestamp = row.timestamp
        prompts.append(prompt)
        outputs.append(output)
        priorities.append(row.priority or 0)
        request_ids.append(request_id)
        session_ids.append(session_id)
        hash_ids.append(hashes)

    if not prompts:
        raise no_requests(path)
    origin = min(at for at in arrivals if not math.isnan(at))
    return Trace.from_arrays(
        [at - origin for at in arrivals],
        prompts,
        outputs,
        request_ids=request_ids,
        priority=priorities,
        session_ids=session_ids,
        delay_ms=delays,
        hash_ids=hash_ids,
        block_tokens=block_tokens,
    )


def _decoded(path: str | Path, line: int, text: bytes) -> _Row:
    try:
        row = _DECODER.decode(text)
    except msgspec.ValidationError as fault:
        field = str(fault).rpartition("$.")[2].rstrip("`") if "$." in str(fault) else ""
        raise row_error(path, line, f"{field}: {fault}{_found(text, field)}", field) from fault
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


def _found(text: bytes, field: str) -> str:
    name, _, index = field.rstrip("]").partition("[")
    try:
        value: Any = msgspec.json.decode(text)[name]
        return f", found {msgspec.json.encode(value[int(index)] if index else value).decode()}"
    except (msgspec.DecodeError, KeyError, TypeError, IndexError, ValueError, RecursionError):
        return ""


def _lengths(path: str | Path, line: int, row: _Row, block_tokens: int) -> tuple[list[int], int, int]:
    if row.hash_ids is None:
        raise row_error(
            path,
            line,
            f"is missing hash_ids; give one id per {block_tokens} prompt tokens, equal where prompts are",
            "hash_ids",
        )
    if row.output_length is None:
        raise row_error(path, line, "is missing output_length; give the number of output tokens", "output_length")
    if max(row.hash_ids, default=0) >= 2**64:
        raise row_error(path, line, f"hash_ids holds {max(row.hash_ids)}; give 64-bit integers", "hash_ids")
    capacity = len(row.hash_ids) * block_tokens
    prompt = capacity if row.input_length is None else row.input_length
    if prompt > capacity:
        raise row_error(
            path,
            line,
            f"input_length {prompt} exceeds hash_ids capacity {capacity}; give a hash id for every "
            f"{block_tokens} tokens, or the block_tokens that the trace was made with",
            "input_length",
        )
    if prompt == 0:
        raise row_error(path, line, "input_length is 0; a prompt has at least one token", "input_length")
    if prompt > MAX_TOKENS:
        raise row_error(path, line, f"hash_ids stand for {prompt} tokens, at most {MAX_TOKENS} fit", "hash_ids")
    if row.output_token_ids is not None and len(row.output_token_ids) != row.output_length:
        raise row_error(
            path,
            line,
            f"output_length {row.output_length} does not match output_token_ids length "
            f"{len(row.output_token_ids)}; make them equal or leave output_token_ids out",
            "output_token_ids",
        )
    return row.hash_ids, prompt, row.output_length


def _delay(path: str | Path, line: int, row: _Row, session_id: str, session: _Session) -> float:
    if session.turns == 0:
        if row.delay:
            raise row_error(
                path,
                line,
                f"sets delay on the first turn of session {session_id}; only a later turn waits",
                "delay",
            )
        return 0.0
    if row.delay is not None:
        delay = row.delay
    elif row.timestamp is None:
        delay = 0.0
    elif session.timestamp is None:
        raise row_error(
            path,
            line,
            f"for session {session_id} cannot infer delay without a previous timestamp; "
            "give delay, or a timestamp on every turn",
            "delay",
        )
    else:
        delay = row.timestamp - session.timestamp
    if delay < 0:
        raise row_error(path, line, f"has invalid delay {delay:g}; give at least 0 ms between two turns", "delay")
    return delay
