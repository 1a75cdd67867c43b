"""Rules of Mooncake rows that tell what a turn adds (engine-and-replay.md section 5.2)."""

import json

import pytest

from fpmsdk.errors import TraceError
from fpmsdk.replay.convert import convert_trace
from fpmsdk.replay.formats import ReadOptions
from fpmsdk.replay.stats import trace_stats
from fpmsdk.replay.trace import Trace

FIRST = {"session_id": "s", "input_length": 10, "output_length": 5, "hash_ids": [1, 2, 3]}
LATER = {"session_id": "s", "input_length": 8, "output_length": 3, "hash_ids": [5, 6], "delay": 10}


@pytest.fixture
def read(tmp_path):
    def read_rows(*rows, **options):
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Trace.read(path, "mooncake-delta", block_tokens=4, **options)

    return read_rows


def test_a_prompt_is_the_one_before_its_answer_and_what_the_row_adds(read):
    trace = read(FIRST, LATER, LATER | {"input_length": 6})
    assert trace.prompt_tokens.tolist() == [10, 23, 32]


def test_a_later_turn_may_add_nothing(read):
    assert read(FIRST, LATER | {"input_length": 0, "hash_ids": []}).prompt_tokens.tolist() == [10, 15]


def test_input_length_defaults_to_what_the_hash_ids_cover(read):
    row = {name: value for name, value in LATER.items() if name != "input_length"}
    assert read(FIRST, row).prompt_tokens.tolist() == [10, 23]


def blocks(trace, row):
    return trace.hash_ids[trace.hash_offsets[row] : trace.hash_offsets[row + 1]].tolist()


@pytest.mark.parametrize(("told", "shared"), [({}, 10), ({"output_token_ids": [9, 9, 9, 8, 8]}, 23)])
def test_sessions_share_an_answer_only_when_its_tokens_are_told(read, told, shared):
    second = {"session_id": "z"}
    trace = read(FIRST | told, LATER, FIRST | told | second, LATER | second)
    one, other = blocks(trace, 1), blocks(trace, 3)
    assert one[:shared] == other[:shared]
    assert one[shared] != other[shared]


def test_one_block_more_than_prompt_and_answer_fill_marks_the_answer_as_told(read):
    trace = read(FIRST, LATER, kv_block_tokens=4)
    assert (trace.block_tokens, len(blocks(trace, 0)), len(blocks(trace, 1))) == (4, 5, 8)
    assert blocks(trace, 1)[:3] == blocks(trace, 0)[:3]


@pytest.mark.parametrize(
    ("rows", "line", "field", "text"),
    [
        ([FIRST, LATER | {"input_length": 9}], 2, "input_length", "input_length 9 exceeds hash_ids capacity 8"),
        ([FIRST, {**LATER, "hash_ids": None}], 2, "hash_ids", "is missing hash_ids"),
        ([FIRST | {"input_length": 0}], 1, "input_length", "a prompt has at least one token"),
    ],
)
def test_a_bad_row_is_told_with_line_and_field(read, rows, line, field, text):
    with pytest.raises(TraceError, match=text) as refused:
        read(*rows)
    assert (refused.value.line, refused.value.field) == (line, field)


def test_a_told_answer_is_not_lost_by_writing_another_form(read, tmp_path):
    trace, target = read(FIRST, LATER), tmp_path / "trace.parquet"
    with pytest.raises(TraceError, match="hash ids of answers too"):
        trace.write(target)
    with pytest.raises(TraceError, match=r"trace\.jsonl: has hash ids of answers too"):
        convert_trace(tmp_path / "trace.jsonl", target, source_format="mooncake-delta")
    assert not target.exists()


def test_statistics_count_the_blocks_of_prompts_only(read, tmp_path):
    read(FIRST, LATER)
    options = ReadOptions(block_tokens=4, kv_block_tokens=4)
    assert trace_stats(tmp_path / "trace.jsonl", "mooncake-delta", options=options)["num_prompt_blocks"] == 3 + 6
