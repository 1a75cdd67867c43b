"""Field rules of Mooncake JSON lines, one test per rule (engine-and-replay.md section 5.2)."""

import gzip
import json

import numpy as np
import pytest

from fpmsdk.errors import TraceError
from fpmsdk.replay.trace import Trace

ROW = {"timestamp": 0, "input_length": 8, "output_length": 3, "hash_ids": [1, 2]}


def without(*names):
    return {name: value for name, value in ROW.items() if name not in names}


@pytest.fixture
def read(tmp_path):
    def read_rows(*rows, block_tokens=4):
        path = tmp_path / "trace.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n")
        return Trace.read(path, block_tokens=block_tokens)

    return read_rows


def test_the_earliest_timestamp_becomes_zero_and_rows_may_be_unsorted(read):
    trace = read(ROW | {"timestamp": 150}, ROW | {"timestamp": 100.25})
    assert trace.arrival_ms.tolist() == [0.0, 49.75]
    assert trace.request_ids.tolist() == ["request_2", "request_1"]


def test_a_negative_timestamp_is_a_time_like_any_other(read):
    assert read(ROW | {"timestamp": -5}, ROW | {"timestamp": 100}).arrival_ms.tolist() == [0.0, 105.0]


@pytest.mark.parametrize("row", [without("timestamp"), ROW | {"timestamp": None}])
def test_a_missing_timestamp_is_zero(read, row):
    trace = read(ROW | {"timestamp": 100}, row)
    assert trace.arrival_ms.tolist() == [0.0, 100.0]
    assert trace.request_ids.tolist() == ["request_2", "request_1"]


def test_blank_lines_are_skipped_and_counted(read):
    assert read("", "  ", ROW).request_ids.tolist() == ["request_3"]


def test_unknown_keys_are_ignored(read):
    assert len(read(ROW | {"model": "m", "strict_priority": 1, "policy_class": "batch"})) == 1


def test_input_length_defaults_to_what_the_hash_ids_cover(read):
    assert read(without("input_length")).prompt_tokens.tolist() == [8]


def test_aliases_mean_the_same(read):
    trace = read(
        ROW,
        {"created_time": 10, "input_tokens": 5, "output_tokens": 4, "hash_ids": [1, 2], "request_id": "a"},
    )
    assert trace.arrival_ms.tolist() == [0.0, 10.0]
    assert trace.prompt_tokens.tolist() == [8, 5]
    assert trace.output_tokens.tolist() == [3, 4]
    assert trace.request_ids.tolist() == ["request_1", "a"]


def test_zero_output_is_legal(read):
    assert read(ROW | {"output_length": 0}).output_tokens.tolist() == [0]


def test_equal_hash_ids_are_equal_blocks_and_large_ones_are_kept_apart(read):
    trace = read(ROW | {"hash_ids": [2**64 - 1, 3]}, ROW | {"hash_ids": [2**64 - 1, 2**64 - 2]})
    assert trace.hash_ids.tolist() == [0, 1, 0, 2]


def test_priority_is_kept(read):
    assert read(ROW | {"priority": 3}, ROW | {"priority": -1}).priority.tolist() == [3, -1]


def test_a_later_turn_waits_for_its_delay(read):
    trace = read(ROW | {"session_id": "s"}, ROW | {"session_id": "s", "timestamp": 50, "delay": 7})
    assert trace.session_ids.tolist() == ["s"]
    assert trace.turn_index.tolist() == [0, 1]
    assert trace.delay_ms.tolist() == [0.0, 7.0]
    assert np.isnan(trace.arrival_ms[1])


@pytest.mark.parametrize(
    ("second", "third", "delays"),
    [
        ({"timestamp": 25}, {"timestamp": 40}, [0.0, 15.0, 15.0]),
        ({"timestamp": 25, "delay": None}, {"timestamp": 40}, [0.0, 15.0, 15.0]),
        ({"timestamp": None}, {"timestamp": 40}, [0.0, 0.0, 30.0]),
        ({"timestamp": None, "delay": 5}, {"timestamp": None}, [0.0, 5.0, 0.0]),
        ({"timestamp": 25, "delay": 3}, {"timestamp": 40}, [0.0, 3.0, 15.0]),
    ],
)
def test_an_absent_delay_is_the_difference_to_the_last_known_timestamp(read, second, third, delays):
    session = {"session_id": "s"}
    trace = read(ROW | session | {"timestamp": 10}, ROW | session | second, ROW | session | third)
    assert trace.delay_ms.tolist() == delays


def test_later_turns_do_not_set_the_start_of_the_trace(read):
    session = {"session_id": "s"}
    trace = read(
        ROW | session | {"timestamp": 10},
        ROW | session | {"timestamp": 2, "delay": 3},
        ROW | {"timestamp": 12},
    )
    assert trace.arrival_ms[[0, 2]].tolist() == [0.0, 2.0]


def test_a_zero_delay_on_a_first_turn_is_no_delay(read):
    assert read(ROW | {"delay": 0}).delay_ms.tolist() == [0.0]


@pytest.mark.parametrize(
    ("row", "field", "said"),
    [
        (without("hash_ids"), "hash_ids", "trace line 2 is missing hash_ids"),
        (ROW | {"hash_ids": None}, "hash_ids", "trace line 2 is missing hash_ids"),
        (without("output_length"), "output_length", "trace line 2 is missing output_length"),
        (ROW | {"input_length": 9}, "input_length", "input_length 9 exceeds hash_ids capacity 8"),
        (ROW | {"input_length": 0}, "input_length", "input_length is 0"),
        ({"output_length": 3, "hash_ids": []}, "input_length", "input_length is 0"),
        (ROW | {"input_length": -8}, "input_length", "found -8"),
        (ROW | {"input_length": 8.0}, "input_length", "found 8.0"),
        (ROW | {"output_length": True}, "output_length", "found true"),
        (ROW | {"output_length": -3}, "output_length", "found -3"),
        (ROW | {"output_length": 2**31}, "output_length", "found 2147483648"),
        (ROW | {"output_length": "3"}, "output_length", 'found "3"'),
        (ROW | {"output_tokens": 3}, "output_length", "both output_length and its alias output_tokens"),
        (ROW | {"output_token_ids": [1, 2]}, "output_token_ids", "does not match output_token_ids length 2"),
        (ROW | {"timestamp": "5"}, "timestamp", 'found "5"'),
        (ROW | {"timestamp": True}, "timestamp", "found true"),
        (json.dumps(ROW).replace('"timestamp": 0', '"timestamp": NaN'), "", "not a JSON object"),
        (json.dumps(ROW).replace('"timestamp": 0', '"timestamp": 1e400'), "timestamp", "out of range"),
        (ROW | {"hash_ids": [1, -2]}, "hash_ids[1]", "found -2"),
        (ROW | {"hash_ids": [1, 2.0]}, "hash_ids[1]", "found 2.0"),
        (ROW | {"hash_ids": [1, 2**64]}, "hash_ids", "18446744073709551616"),
        (ROW | {"priority": 2**31}, "priority", "found 2147483648"),
        (ROW | {"strict_priority": -1}, "strict_priority", "found -1"),
        (ROW | {"policy_class": 1}, "policy_class", "found 1"),
        (ROW | {"request_id": 7}, "request_id", "found 7"),
        (ROW | {"request_id": "first"}, "request_id", 'repeats request_id "first" of line 1'),
        (ROW | {"session_id": 4}, "session_id", "found 4"),
        (ROW | {"session_id": "s", "delay": 7}, "delay", "sets delay on the first turn of session s"),
        (ROW | {"delay": 7}, "delay", "sets delay on the first turn of session request_2"),
        (ROW | {"session_id": "t", "delay": -7}, "delay", "has invalid delay -7"),
        (ROW | {"session_id": "t", "timestamp": -30}, "delay", "has invalid delay -30"),
        (ROW | {"session_id": "u", "timestamp": 9}, "delay", "cannot infer delay without a previous"),
        ('{"timestamp": 0, "input_length": 8, "outp', "", "not a JSON object"),
        ("[1, 2]", "", "Expected `object`"),
        (json.dumps(ROW) + " trailing", "", "not a JSON object"),
    ],
)
def test_a_malformed_row_is_refused_with_file_line_and_field(read, row, field, said):
    first = ROW | {"request_id": "first", "session_id": "u" if '"u"' in json.dumps(row) else "t"}
    if '"u"' in json.dumps(row):
        first.pop("timestamp")
    with pytest.raises(TraceError) as refused:
        read(first, row)
    assert said in str(refused.value)
    assert (refused.value.line, refused.value.field) == (2, field)
    assert refused.value.path.endswith("trace.jsonl")
    assert str(refused.value).startswith(refused.value.path)


def test_hash_ids_that_stand_for_too_many_tokens_are_refused(read):
    with pytest.raises(TraceError, match="hash_ids stand for 4294967294 tokens"):
        read(without("input_length"), block_tokens=2**31 - 1)


def test_a_given_name_that_a_row_without_name_has_is_refused(read):
    with pytest.raises(TraceError, match='trace line 2 repeats request_id "request_1"'):
        read(ROW, ROW | {"request_id": "request_1"})
    with pytest.raises(TraceError, match='trace line 2 repeats request_id "request_2" of line 1'):
        read(ROW | {"request_id": "request_2"}, ROW)


def test_times_in_seconds_become_the_same_decimal_milliseconds(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [ROW | {"timestamp": 100.25}, ROW | {"timestamp": 100.268141, "session_id": "s"}]
    rows.append({**ROW, "session_id": "s", "delay": 0.3})
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = Trace.read(path, block_tokens=4, time_unit="s")
    assert trace.arrival_ms[:2].tolist() == [0.0, 18.141]
    assert trace.delay_ms.tolist() == [0.0, 0.0, 300.0]


@pytest.mark.parametrize("times", [(0, 4e11), (-1e308, 1e308), (1.7e9, 1.7e12)])
def test_times_that_span_more_than_ten_years_are_refused_with_both_lines(read, times):
    with pytest.raises(TraceError, match="from line 1 to line 2; two units or two clocks are mixed") as refused:
        read(*(ROW | {"timestamp": time} for time in times))
    assert refused.value.line == 2


def test_a_delay_beyond_all_times_is_refused(tmp_path):
    rows = [ROW | {"session_id": "s"}, {**ROW, "session_id": "s", "delay": 1e308}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(TraceError, match="has invalid delay 1e"):
        Trace.read(tmp_path / "t.jsonl", block_tokens=4, time_unit="s")


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_a_file_without_requests_is_refused(read, content):
    with pytest.raises(TraceError, match=r"trace\.jsonl did not contain any requests"):
        read(content)


def test_bytes_that_are_not_text_are_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"session_id": "\xff\xfe"}\n')
    with pytest.raises(TraceError, match="trace line 1 is not a JSON object"):
        Trace.read(path)


def test_gzip_is_read_whatever_the_ending(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress(json.dumps(ROW).encode()))
    assert len(Trace.read(path)) == 1
