"""From a trace file of any form to one of ours, or from a `Trace` to a file; in memory is only what is being written.

Source: engine-and-replay.md section 5.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fpmsdk.errors import TraceError
from fpmsdk.replay.formats import open_trace, writing, written_form
from fpmsdk.replay.formats.reader import ReadOptions
from fpmsdk.replay.rows import PlacedRow
from fpmsdk.replay.spool import Spool
from fpmsdk.replay.trace import Trace

_ROWS_PER_STEP = 1000


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion did: forms, prompt tokens per hash id, rows written, and why records were left out."""

    source_format: str
    target_format: str
    block_tokens: int
    num_requests: int
    left_out: dict[str, int]


def convert_trace(
    source: str | Path,
    target: str | Path,
    *,
    source_format: str | None = None,
    target_format: str | None = None,
    options: ReadOptions | None = None,
    advance: Callable[[int], None] = lambda rows: None,
) -> Conversion:
    """Write a trace file in another form; its earliest arrival becomes 0.

    Memory does not grow with the number of requests: between reading and writing they are on disk. A form that is one
    document (`recorded`) and a single Weka play are decoded whole.

    Parameters
    ----------
    source, target: the files; the target is replaced when all is written.
    source_format, target_format: forms; None looks at the files (`Trace.read`) and the ending of the target.
    options: how to read the source.
    advance: called with the number of rows read since its last call.

    Raises
    ------
    TraceError: the source breaks a rule, or says what the target form cannot; nothing is written.
    OSError: the target cannot be written.

    Example
    -------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "t.csv").write_text("Timestamp,Request tokens,Response tokens\\n5,472,18\\n45.5,1087,230\\n")
    >>> convert_trace(folder / "t.csv", folder / "t.parquet").num_requests
    2
    >>> Trace.read(folder / "t.parquet").arrival_ms.tolist()
    [0.0, 40500.0]
    """
    form = written_form(target, target_format)
    reader = open_trace(source, source_format, options)
    if reader.describes_output:
        raise _untellable(source)
    with closing(Spool(reader, advance)) as spool, writing(target, form, spool.block_tokens) as writer:
        writer.write(spool.rows())
    return Conversion(reader.form, form, spool.block_tokens, spool.num_requests, dict(spool.left_out))


def write_trace(trace: Trace, path: str | Path, format: str | None = None) -> None:
    """Write a `Trace`; see `Trace.write`."""
    form = written_form(path, format)
    # Readers would cut off the blocks past a prompt.
    if np.any(np.diff(trace.hash_offsets) > -(-trace.prompt_tokens // trace.block_tokens)):
        raise _untellable("the trace")
    with writing(path, form, trace.block_tokens) as writer:
        writer.write(_rows_of(trace))


def _untellable(source: str | Path) -> TraceError:
    text = "has hash ids of answers too, which no form to write can say; keep the trace as it is"
    return TraceError(f"{source}: {text}", path=str(source), field="hash_ids")


def _rows_of(trace: Trace) -> Iterator[PlacedRow]:
    turns = np.bincount(trace.session_index)
    for start in range(0, len(trace), _ROWS_PER_STEP):
        some = slice(start, start + _ROWS_PER_STEP)
        sessions = trace.session_index[some]
        names = trace.session_ids[sessions]
        # The session of one turn need not be named when it has the name of its request.
        names[(turns[sessions] == 1) & (names == trace.request_ids[some])] = None
        arrivals = trace.arrival_ms[some].astype(object)
        arrivals[trace.turn_index[some] > 0] = None
        columns = (
            trace.request_ids[some],
            names,
            arrivals,
            *(
                getattr(trace, name)[some]
                for name in ("delay_ms", "prompt_tokens", "output_tokens", "priority", "dp_rank", "prefill_dp_rank")
            ),
        )
        for row, values in enumerate(zip(*(column.tolist() for column in columns), strict=True), start):
            blocks = trace.hash_ids[trace.hash_offsets[row] : trace.hash_offsets[row + 1]]
            awaits = trace.awaits[trace.awaits_offsets[row] : trace.awaits_offsets[row + 1]]
            yield PlacedRow._make((*values, blocks.tolist(), awaits.tolist()))
