"""AIPerf request records (`profile_export.jsonl`): one measured request a line, with epoch times in nanoseconds.

As a trace they are what was asked, when it was sent. Records of warm-up, failed and cancelled requests are left out.
Source: ai-dynamo/aiperf, `MetricRecordInfo`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fpmsdk.config.schema import shown
from fpmsdk.replay.formats.fields import Fault, found_in, refused_field
from fpmsdk.replay.formats.reader import Reader, ReadOptions
from fpmsdk.replay.formats.source import lines, row_error
from fpmsdk.replay.rows import Clock, LeftOut, Row
from fpmsdk.replay.trace import MAX_TOKENS

_Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Metadata(msgspec.Struct):
    request_start_ns: _Nanoseconds
    request_end_ns: _Nanoseconds | None = None
    x_request_id: str | None = None
    x_correlation_id: str | None = None
    conversation_id: str | None = None
    turn_index: int | None = None
    benchmark_phase: str = "profiling"
    was_cancelled: bool = False


class _Metric(msgspec.Struct):
    value: Any = None


class _Record(msgspec.Struct):
    metadata: _Metadata
    metrics: dict[str, _Metric] = {}
    error: Any = None


_DECODER = msgspec.json.Decoder(_Record)


class AiperfReader(Reader):
    """Records come as requests end; the turns of a conversation follow one another."""

    form = "aiperf"

    def __init__(self, path: str | Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self.clock = Clock.NANOSECONDS

    def records(self) -> Iterator[tuple[int, bytes]]:
        """The lines."""
        return lines(self.path)

    def parse(self, line: int, record: bytes) -> Iterator[Row | LeftOut]:
        """One request, or one that does not count."""
        fault = partial(row_error, self.path, line)
        try:
            decoded = _DECODER.decode(record)
        except msgspec.ValidationError as refused:
            field = refused_field(refused)
            raise fault(f"{field}: {refused}{found_in(record, field)}", field) from refused
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as broken:
            raise fault(f"is not a JSON object: {broken}; write one record per line", "") from broken
        metadata = decoded.metadata
        if reason := _reason_to_leave_out(decoded):
            yield LeftOut(line, reason)
            return
        # One conversation of a data set may be held several times: the correlation id tells them apart.
        session = metadata.x_correlation_id or metadata.conversation_id
        yield Row(
            line,
            _tokens(fault, decoded, ("input_sequence_length",), 1),
            _tokens(fault, decoded, ("output_sequence_length", "output_token_count"), 0),
            at=metadata.request_start_ns,
            end=metadata.request_end_ns,
            request_id=metadata.x_request_id,
            session_id=session,
        )


def _reason_to_leave_out(record: _Record) -> str:
    if record.metadata.benchmark_phase != "profiling":
        return f"phase {record.metadata.benchmark_phase}"
    if record.metadata.was_cancelled:
        return "cancelled"
    return "failed" if record.error is not None else ""


def _tokens(fault: Fault, record: _Record, names: tuple[str, ...], low: int) -> int:
    name = next((name for name in names if name in record.metrics), None)
    if name is None:
        text = f"has no metric {' or '.join(names)}; export records with token counts"
        raise fault(text, f"metrics.{names[0]}")
    value = record.metrics[name].value
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
    if not is_whole or not low <= value <= MAX_TOKENS:
        text = f"{name} is {shown(value)}; give an integer from {low} to {MAX_TOKENS}"
        raise fault(text, f"metrics.{name}.value")
    return int(value)
