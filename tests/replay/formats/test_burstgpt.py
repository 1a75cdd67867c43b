"""Rules of the BurstGPT CSV form: seconds, failed requests, conversations, and what is refused."""

import pytest

from fpmsdk.errors import TraceError
from fpmsdk.replay.trace import Trace

HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
NEWER = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
FIRST = "5,ChatGPT,472,18,490,Conversation log"


@pytest.fixture
def read(tmp_path):
    def read_lines(*lines):
        path = tmp_path / "trace.csv"
        path.write_text("\n".join(lines) + "\n")
        return Trace.read(path)

    return read_lines


def test_times_are_decimal_seconds_and_rows_are_named_by_line(read):
    trace = read(HEADER, FIRST, "45.25,GPT-4,1087,230,1317,API log", "5.1,GPT-4,1,1,2,API log")
    assert trace.arrival_ms.tolist() == [0.0, 100.0, 40250.0]
    assert trace.prompt_tokens.tolist() == [472, 1, 1087]
    assert trace.output_tokens.tolist() == [18, 1, 230]
    assert trace.request_ids.tolist() == ["request_2", "request_4", "request_3"]


@pytest.mark.parametrize("failed", ["6,GPT-4,0,0,0,API log", "6,GPT-4,300,0,300,API log"])
def test_a_request_without_response_tokens_failed_and_is_left_out(read, failed):
    assert read(HEADER, FIRST, failed).request_ids.tolist() == ["request_2"]


def test_a_file_of_failed_requests_has_none(read):
    with pytest.raises(TraceError, match="did not contain any requests"):
        read(HEADER, "6,GPT-4,0,0,0,API log")


def test_a_later_turn_waits_from_the_answer_of_the_turn_before_it(read):
    trace = read(
        NEWER,
        "10,7,2.5,ChatGPT,10,5,15,Conversation log",
        "20,7,3,ChatGPT,20,5,25,Conversation log",
        "22,7,1,ChatGPT,30,5,35,Conversation log",  # asked before the answer of the one before it
        "11,,1,ChatGPT,40,5,45,API log",
    )
    assert trace.session_ids.tolist() == ["7", "request_5"]
    assert trace.delay_ms.tolist() == [0.0, 7500.0, 0.0, 0.0]
    assert trace.arrival_ms[[0, 3]].tolist() == [0.0, 1000.0]


def test_without_elapsed_time_a_later_turn_waits_from_the_question_before_it(read):
    trace = read("Timestamp,Session ID,Request tokens,Response tokens", "10,7,10,5", "20,7,20,5", "14,8,1,1")
    assert trace.delay_ms.tolist() == [0.0, 10000.0, 0.0]


@pytest.mark.parametrize(
    ("row", "field", "said"),
    [
        ("6,GPT-4,0,4,4,API log", "Request tokens", "Request tokens is '0'"),
        ("6,GPT-4,-3,4,1,API log", "Request tokens", "Request tokens is '-3'"),
        ("6,GPT-4,3,4.5,1,API log", "Response tokens", "Response tokens is '4.5'"),
        ("6,GPT-4,3,,3,API log", "Response tokens", "Response tokens is ''"),
        ("-6,GPT-4,3,4,7,API log", "Timestamp", "Timestamp is '-6'"),
        ("9999999999,GPT-4,3,4,7,API log", "Timestamp", "Timestamp is '9999999999'"),
        ("1e3,GPT-4,3,4,7,API log", "Timestamp", "Timestamp is '1e3'"),
        ("6,GPT-4,3,4,7", "", "has 5 cells, the header 6"),
    ],
)
def test_a_malformed_row_is_refused_with_line_and_column(read, row, field, said):
    with pytest.raises(TraceError) as refused:
        read(HEADER, FIRST, row)
    assert said in str(refused.value)
    assert (refused.value.line, refused.value.field) == (3, field)


def test_a_turn_before_the_one_before_it_is_refused(read):
    with pytest.raises(TraceError, match="trace line 3 has invalid delay -5e"):
        read("Timestamp,Session ID,Request tokens,Response tokens", "10,7,10,5", "5,7,20,5")


def test_a_missing_column_is_named(read):
    with pytest.raises(TraceError, match="lacks the column Response tokens; a BurstGPT trace has Timestamp"):
        read("Timestamp,Request tokens", "1,2")
