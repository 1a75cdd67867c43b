"""Rules of Dynamo request events (engine-and-replay.md section 5.2)."""

import json

import pytest

from fpmsdk.errors import TraceError
from fpmsdk.replay.trace import Trace


def event(name="r1", at=1000, hashes=(11, 12, 13), length=10, size=4, **other):
    replay = {"trace_block_size": size, "input_length": length, "input_sequence_hashes": list(hashes)}
    request = {"request_id": name, "request_received_ms": at, "output_tokens": 5, "replay": replay}
    return {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": request} | other


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


OTHER = event("r2", 1100, (11, 12, 14))


@pytest.mark.parametrize("rows", [(event(), OTHER), ({"timestamp": 1, "event": event()}, {"event": OTHER})])
def test_the_end_of_a_request_plain_or_wrapped_is_a_request(tmp_path, rows):
    trace = Trace.read(write(tmp_path / "t.jsonl", *rows))
    assert trace.request_ids.tolist() == ["r1", "r2"]
    assert trace.arrival_ms.tolist() == [0.0, 100.0]
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([10, 10], [5, 5])
    assert (trace.block_tokens, trace.hash_ids.tolist()) == (4, [0, 1, 2, 0, 1, 3])


def test_other_events_are_left_out(tmp_path):
    path = write(tmp_path / "t.jsonl", event(event_type="tool_start", request="any"), OTHER)
    assert Trace.read(path).request_ids.tolist() == ["r2"]


def test_several_files_are_one_trace(tmp_path):
    one, two = write(tmp_path / "a.jsonl", OTHER), write(tmp_path / "b.jsonl", event())
    assert Trace.read(one, "dynamo", more_paths=[two]).request_ids.tolist() == ["r1", "r2"]


def test_a_request_id_of_another_file_is_refused(tmp_path):
    one, two = write(tmp_path / "a.jsonl", event()), write(tmp_path / "b.jsonl", event())
    with pytest.raises(TraceError, match='repeats request_id "r1" of request 1'):
        Trace.read(one, "dynamo", more_paths=[two])


def test_a_fault_in_a_further_file_names_that_file_and_its_line(tmp_path):
    one, two = write(tmp_path / "a.jsonl", event()), write(tmp_path / "b.jsonl", OTHER | {"schema": "v2"})
    with pytest.raises(TraceError, match=r"b\.jsonl: trace line 1 schema: .*found \"v2\""):
        Trace.read(one, "dynamo", more_paths=[two])


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (OTHER | {"schema": "dynamo.request.trace.v2"}, "schema"),
        (OTHER | {"event_type": "foo"}, "event_type"),
        (OTHER | {"agent_context": {"session_id": "s"}}, "agent_context"),
        (OTHER | {"request": None}, "request"),
        (event("r2", length=0), "request.replay.input_length"),
        (event("r2", hashes=(1, 2)), "request.replay.input_length"),
        (event("r2", hashes=(1, 2, 2**64)), "request.replay.input_sequence_hashes"),
        (event("r2", size=8), "request.replay.trace_block_size"),
        (event("r2", at="now"), "request.request_received_ms"),
        ({"event": event("r2", length=0)}, "event.request.replay.input_length"),
    ],
)
def test_a_bad_row_is_told_with_line_and_field(tmp_path, row, field):
    with pytest.raises(TraceError) as refused:
        Trace.read(write(tmp_path / "t.jsonl", event(), row))
    assert (refused.value.line, refused.value.field) == (2, field)


def test_a_block_size_that_is_not_the_one_of_the_events_is_refused(tmp_path):
    with pytest.raises(TraceError, match="trace_block_size is 4, but block_tokens asks for 8"):
        Trace.read(write(tmp_path / "t.jsonl", event()), block_tokens=8)
