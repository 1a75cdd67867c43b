"""Rules of AIPerf request records: what was asked and when, conversations, and records that do not count."""

import json

import pytest

from fpmsdk.errors import TraceError
from fpmsdk.replay.trace import Trace

EPOCH_NS = 1_759_813_207_532_900_363


def record(start_ms=0.0, end_ms=100.0, prompt=550, output=9, error=None, **metadata):
    return {
        "metadata": {
            "session_num": 45,
            "conversation_id": None,
            "turn_index": 0,
            "request_start_ns": EPOCH_NS + int(start_ms * 1e6),
            "request_ack_ns": None,
            "request_end_ns": EPOCH_NS + int(end_ms * 1e6),
            "worker_id": "worker_359d423a",
            "record_processor_id": "record_processor_1fa47cd7",
            "benchmark_phase": "profiling",
            "was_cancelled": False,
            "cancellation_time_ns": None,
            **metadata,
        },
        "metrics": {
            "input_sequence_length": {"value": prompt, "unit": "tokens"},
            "output_sequence_length": {"value": output, "unit": "tokens"},
            "inter_chunk_latency": {"value": [4.9, 5.3], "unit": "ms"},
        },
        "error": error,
    }


@pytest.fixture
def read(tmp_path):
    def read_records(*records):
        path = tmp_path / "profile_export.jsonl"
        path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
        return Trace.read(path)

    return read_records


def test_requests_arrive_when_they_were_sent_to_the_nanosecond(read):
    trace = read(record(250.000001), record(100.0, prompt=7, output=0))
    assert trace.arrival_ms.tolist() == [0.0, 150.000001]
    assert trace.prompt_tokens.tolist() == [7, 550]
    assert trace.output_tokens.tolist() == [0, 9]


def test_a_request_id_names_the_request(read):
    assert read(record(x_request_id="7609a2e7")).request_ids.tolist() == ["7609a2e7"]


def test_turns_wait_from_the_end_of_the_turn_before_them(read):
    trace = read(
        record(0, 100, x_correlation_id="s", conversation_id="c"),
        record(150, 300, x_correlation_id="s", conversation_id="c", turn_index=1),
        record(50, 60, x_correlation_id="t", conversation_id="c"),
    )
    assert trace.session_ids.tolist() == ["s", "t"]
    assert trace.delay_ms.tolist() == [0.0, 50.0, 0.0]


@pytest.mark.parametrize(
    "left_out",
    [
        record(benchmark_phase="warmup"),
        record(was_cancelled=True),
        record(error={"code": 500}) | {"metrics": {"error_isl": {"value": 550, "unit": "tokens"}}},
    ],
)
def test_warm_up_and_failed_records_are_left_out(read, left_out):
    assert read(left_out, record()).request_ids.tolist() == ["request_2"]


def test_without_a_sequence_length_the_output_token_count_serves(read):
    counted = record()
    counted["metrics"]["output_token_count"] = {"value": 4.0}
    del counted["metrics"]["output_sequence_length"]
    assert read(counted).output_tokens.tolist() == [4]


def without_metrics():
    return record() | {"metrics": {}}


@pytest.mark.parametrize(
    ("broken", "field", "said"),
    [
        (without_metrics(), "metrics.input_sequence_length", "has no metric input_sequence_length"),
        (record(prompt=0), "metrics.input_sequence_length.value", "input_sequence_length is 0"),
        (record(output=2.5), "metrics.output_sequence_length.value", "output_sequence_length is 2.5"),
        (record(output=True), "metrics.output_sequence_length.value", "output_sequence_length is True"),
        (record(request_start_ns=-1), "metadata.request_start_ns", "found -1"),
        (record(request_start_ns=None), "metadata.request_start_ns", "found null"),
        ([1], "", "Expected `object`"),
    ],
)
def test_a_malformed_record_is_refused_with_line_and_field(read, broken, field, said):
    with pytest.raises(TraceError) as refused:
        read(record(), broken)
    assert said in str(refused.value)
    assert (refused.value.line, refused.value.field) == (2, field)


def test_a_request_id_that_comes_twice_is_refused(read):
    with pytest.raises(TraceError, match='trace line 2 repeats request_id "a" of line 1'):
        read(record(x_request_id="a"), record(x_request_id="a"))
