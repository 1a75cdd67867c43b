"""`check_trace`: every fault with its lines, what is strange, and what an engine would reject."""

import json
import sqlite3
import tracemalloc

import pytest

from fpmsdk.errors import LaunchConfigError, TraceError
from fpmsdk.replay.check import check_trace
from fpmsdk.replay.formats.reader import ReadOptions
from fpmsdk.replay.trace import Trace

ROW = {"timestamp": 0, "input_length": 8, "output_length": 3, "hash_ids": [1, 2]}
ENGINE = {"block_size": 4, "num_gpu_blocks": 11, "max_model_len": 45, "max_num_batched_tokens": 16}


@pytest.fixture
def check(tmp_path):
    def check_rows(rows, block_tokens=4, **options):
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return check_trace(path, options=ReadOptions(block_tokens=block_tokens), **options)

    check_rows.path = tmp_path / "trace.jsonl"
    return check_rows


def found(check, kind):
    return [(finding.level, finding.count, finding.lines) for finding in check.findings if finding.kind == kind]


def text_of(check, kind):
    (finding,) = (finding for finding in check.findings if finding.kind == kind)
    return finding.text


def at(*times, **more):
    return [ROW | {"timestamp": time} | more for time in times]


def test_a_sound_trace_has_no_findings(check):
    outcome = check([*at(0, 5, 9), ROW | {"timestamp": 10, "session_id": "s"}, ROW | {"session_id": "s", "delay": 1}])
    assert outcome.ok
    assert outcome.findings == []
    assert (outcome.format, outcome.num_requests, outcome.num_sessions) == ("mooncake", 5, 4)


def test_every_fault_is_found_with_its_line(check):
    rows = [ROW, "{", ROW | {"output_length": -1}, ROW, ROW | {"output_length": -2}, ROW | {"input_length": 99}]
    outcome = check(rows)
    assert not outcome.ok
    assert sorted(found(outcome, "row")) == [("fault", 1, [2]), ("fault", 1, [6]), ("fault", 2, [3, 5])]
    assert outcome.num_requests == 2


def test_contradicting_sessions_and_repeated_names_are_faults(check):
    rows = [ROW | {"delay": 3}, ROW | {"request_id": "a"}, ROW | {"request_id": "a"}]
    assert sorted(found(check(rows), "row")) == [("fault", 1, [1]), ("fault", 1, [3])]


@pytest.mark.parametrize("named_first", [False, True])
def test_a_name_that_an_unnamed_row_gets_is_a_repetition_whichever_comes_first(check, named_first):
    rows = [ROW, ROW | {"request_id": "request_1"}]
    if named_first:
        rows = [ROW | {"request_id": "request_2"}, ROW]
    outcome = check(rows)
    with pytest.raises(TraceError, match="repeats") as refused:
        Trace.read(check.path, block_tokens=4)
    assert found(outcome, "row") == [("fault", 1, [2])]
    assert text_of(outcome, "row") == str(refused.value)
    assert outcome.num_requests == 1


def test_an_empty_request_id_is_none(check):
    assert check([ROW | {"request_id": ""}, ROW | {"request_id": "", "timestamp": 1}]).findings == []
    assert Trace.read(check.path, block_tokens=4).request_ids.tolist() == ["request_1", "request_2"]


def test_of_one_kind_the_first_fault_of_the_file_is_told_whichever_rule_finds_it(check):
    waits = [ROW | {"session_id": name, "delay": 3} for name in "fedcba"]
    outcome = check([*waits, ROW | {"delay": -1, "session_id": "z"}, ROW | {"delay": "x"}])
    assert sorted(found(outcome, "row")) == [("fault", 8, [1, 2, 3, 4, 5])]
    assert "trace line 1 sets delay on the first turn of session f" in text_of(outcome, "row")


def test_a_refused_row_is_neither_a_turn_nor_an_arrival(check):
    rows = [
        ROW | {"timestamp": 5, "request_id": "a"},
        ROW | {"timestamp": 9, "request_id": "a", "session_id": "s", "output_length": 0},
        ROW | {"timestamp": 7, "request_id": "b", "session_id": "s"},
        ROW | {"timestamp": 8, "request_id": "c", "session_id": "s"},
    ]
    outcome = check(rows)
    assert [(finding.kind, finding.lines) for finding in outcome.findings] == [("row", [2])]
    assert (outcome.num_requests, outcome.num_sessions) == (3, 2)


def test_unsorted_rows_are_noted(check):
    assert found(check(at(5, 3, 9, 8)), "order") == [("note", 2, [2, 4])]


def test_requests_without_output_are_noted(check):
    assert found(check([ROW, ROW | {"output_length": 0}]), "zero_output") == [("note", 1, [2])]


def test_rows_that_repeat_another_of_the_same_time_are_noted(check):
    assert found(check([*at(1, 1, 2), ROW | {"timestamp": 2, "hash_ids": [7, 8]}]), "duplicate") == [("note", 1, [2])]


def test_equal_rows_are_those_of_one_moment(check):
    times = [1, 2, 1, 1]
    assert found(check(at(*times)), "duplicate") == [("note", 1, [4])]


def test_records_that_are_left_out_are_counted_by_reason(tmp_path):
    (tmp_path / "t.csv").write_text("Timestamp,Request tokens,Response tokens\n1,5,5\n2,0,0\n3,4,0\n")
    assert found(check_trace(tmp_path / "t.csv"), "left_out") == [("note", 2, [3, 4])]


def test_epochs_in_two_units_are_a_fault_that_names_both_lines(check, tmp_path):
    outcome = check(at(1_700_000_000, 1_700_000_000_500))
    assert found(outcome, "units") == [("fault", 1, [1, 2])]
    with pytest.raises(TraceError, match="arrivals span 53.8 years, from line 1 to line 2; two units"):
        Trace.read(tmp_path / "trace.jsonl", block_tokens=4)


def test_a_jump_by_a_large_factor_is_suspected_to_be_another_unit(check):
    seconds = [float(second) for second in range(1, 41)]
    milliseconds = [1e3 * second for second in range(41, 81)]
    assert found(check(at(*seconds, *milliseconds)), "units") == [("warning", 1, [41])]


def test_more_than_a_thousand_requests_a_second_are_suspected_to_be_seconds(check):
    outcome = check(at(*(0.5 * number for number in range(40))))
    assert "2,000 requests/s; are the times seconds?" in text_of(outcome, "units")
    assert outcome.ok


def test_a_gap_much_longer_than_all_others_is_a_hole(check):
    times = [1000.0 * number for number in range(30)]
    outcome = check(at(*times, *(time + 1_000_000 for time in times)))
    assert found(outcome, "hole") == [("warning", 1, [31])]
    assert "the widest of 971 s" in text_of(outcome, "hole")


def test_of_many_gaps_the_widest_are_shown_wherever_they_lie(check, monkeypatch):
    monkeypatch.setattr("fpmsdk.replay.checked_rows._ROWS_PER_FETCH", 7)
    times, at_ms = [], 0
    for number in range(400):
        at_ms += 1_000_000 + number if number % 50 == 49 else 10
        times.append(at_ms)
    outcome = check(at(*reversed(times)))
    # From the last row up, each after a gap one wider than that of the 50 rows before it.
    assert found(outcome, "hole") == [("warning", 8, [1, 51, 101, 151, 201])]


@pytest.mark.parametrize(
    "row_of",
    [
        lambda number: {"timestamp": number},
        lambda number: {"timestamp": number, "request_id": f"request {number}", "session_id": f"chat {number // 3}"},
        lambda number: {"input_length": 1 + number % 8, "hash_ids": [number, number + 1], "timestamp": None},
        lambda number: {"request_id": "one", "session_id": f"chat {number}", "delay": 1},
    ],
    ids=["times", "names and sessions", "no times", "faults"],
)
def test_memory_does_not_grow_with_the_trace(check, row_of, monkeypatch):
    monkeypatch.setattr("fpmsdk.replay.spool._ROWS_PER_PORTION", 100)
    monkeypatch.setattr("fpmsdk.replay.checked_rows._ROWS_PER_FETCH", 100)
    peaks = []
    for count in (100, 2000, 16000):  # the first one imports what it needs
        with (path := check.path).open("w") as file:
            file.writelines(json.dumps(ROW | row_of(number)) + "\n" for number in range(count))
        tracemalloc.start()
        try:
            outcome = check_trace(path, options=ReadOptions(block_tokens=4), launch={"engine": ENGINE})
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        rows = [finding.count for finding in outcome.findings if finding.kind == "row"]
        assert outcome.num_requests + sum(rows) == count
    assert peaks[2] < 1.2 * peaks[1]


def test_another_origin_of_the_clock_is_no_finding(check):
    assert check(at(1_700_000_000_000, 1_700_000_000_100)).findings == []


def test_hash_counts_tell_the_block_size(check):
    rows = [ROW | {"input_length": 30, "hash_ids": list(range(2))}, ROW | {"input_length": 48, "hash_ids": [1, 2, 3]}]
    assert check(rows, block_tokens=16).findings == []
    surplus = check(rows, block_tokens=32)
    assert found(surplus, "blocks") == [("warning", 2, [1, 2])]
    assert text_of(surplus, "blocks").endswith("blocks of 16 to 23 tokens fit all rows")
    assert text_of(check(rows, block_tokens=8), "row").endswith("blocks of 16 to 23 tokens fit all rows")


def test_what_an_engine_would_reject_is_told_with_the_reason(tmp_path):
    Trace.from_arrays(
        [0.0] * 6, [45, 41, 38, 38, 17, 20], [1, 1, 3, 4, 9, 40], request_ids=[f"r{number}" for number in range(6)]
    ).write(tmp_path / "t.parquet")
    outcome = check_trace(tmp_path / "t.parquet", launch={"engine": ENGINE})
    rejected = {finding.text: finding.count for finding in outcome.findings if finding.kind == "rejected"}
    assert rejected == {
        'requests would be rejected: "its prompt leaves no room below max_model_len = 45" (r0)': 1,
        'requests would be rejected: "its prompt needs more than the 10 usable KV blocks of 4 tokens" (r1)': 1,
        'requests would be rejected: "its prompt and output together need more than the 10 usable KV blocks of 4 '
        'tokens" (r3, r5)': 2,
    }
    assert found(outcome, "cut_output") == [("note", 1, [])]
    assert not outcome.ok


def test_the_first_rejected_requests_are_named_in_order_of_arrival(tmp_path, monkeypatch):
    monkeypatch.setattr("fpmsdk.replay.spool._ROWS_PER_PORTION", 2)
    lines = [ROW | {"timestamp": 9 - number, "request_id": f"r{number}"} for number in range(8)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ReadOptions(block_tokens=4)
    outcome = check_trace(tmp_path / "t.jsonl", options=options, launch={"engine": ENGINE | {"max_model_len": 8}})
    assert text_of(outcome, "rejected").endswith("(r7, r6, r5, r4, r3, …)")
    assert found(outcome, "rejected") == [("fault", 8, [])]


def test_the_simulators_rules_reject_no_output_and_count_every_block(tmp_path):
    Trace.from_arrays([0.0] * 2, [44, 38], [1, 40]).write(tmp_path / "t.parquet")
    outcome = check_trace(tmp_path / "t.parquet", launch={"engine": ENGINE}, scheduler_rules="simulator")
    assert outcome.ok


def test_without_chunked_prefill_a_prompt_beyond_the_budget_would_be_rejected(tmp_path):
    Trace.from_arrays([0.0], [17], [1]).write(tmp_path / "t.parquet")
    unchunked = ENGINE | {"enable_chunked_prefill": False}
    outcome = check_trace(tmp_path / "t.parquet", launch={"engine": unchunked})
    assert "without chunked prefill" in text_of(outcome, "rejected")


def test_a_trace_with_faults_is_not_asked_about_an_engine(check):
    assert found(check([ROW, "{"], launch={"engine": ENGINE | {"max_model_len": 4}}), "rejected") == []


def test_a_file_that_cannot_be_read_and_a_launch_that_is_none_are_errors(tmp_path, check):
    with pytest.raises(TraceError, match="cannot read the trace"):
        check_trace(tmp_path / "none.jsonl")
    with pytest.raises(LaunchConfigError):
        check([ROW], launch={"engine": {"block_size": 0}})


def test_a_file_without_requests_has_none(check):
    assert check([]).num_requests == 0


def test_a_full_disk_is_said_so(check, monkeypatch):
    class Full(sqlite3.Connection):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.execute("pragma max_page_count = 3")

    monkeypatch.setattr("fpmsdk.replay.scratch.sqlite3.connect", Full)
    with pytest.raises(TraceError, match=r"trace.jsonl: its rows cannot be kept on disk meanwhile: .*full; make room"):
        check([ROW] * 200)
