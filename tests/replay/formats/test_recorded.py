"""The request record of a measured run: arrivals as a trace, token times as ground truth."""

import json

import numpy as np
import pytest

from fpmsdk.errors import TraceError
from fpmsdk.replay.formats.recorded import read_run
from fpmsdk.replay.trace import Trace

FIRST = {"id": "a", "arrival": 0.268141, "added": 0.27, "prompt": 12, "output": 2, "token_times": [0.5, 0.75]}
SECOND = {"id": "b", "arrival": 0.1, "prompt": 7, "output": 0}


@pytest.fixture
def write(tmp_path):
    def write_run(*requests, **more):
        path = tmp_path / "requests.json"
        path.write_text(json.dumps({"requests": requests} | more))
        return path

    return write_run


def test_planned_arrivals_in_seconds_keep_their_clock(write):
    trace = Trace.read(write(FIRST, SECOND))
    assert trace.arrival_ms.tolist() == [100.0, 268.141]
    assert trace.request_ids.tolist() == ["b", "a"]
    assert trace.prompt_tokens.tolist() == [7, 12]
    assert trace.output_tokens.tolist() == [0, 2]


def test_measured_token_times_follow_the_order_of_the_trace(write):
    run = read_run(write(FIRST, SECOND, engine={"max_num_seqs": 16}, seed=3))
    assert run.engine == {"max_num_seqs": 16}
    assert run.token_offsets.tolist() == [0, 0, 2]
    assert run.token_ms.tolist() == [500.0, 750.0]


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"prompt": 0}, "requests[0].prompt", "Expected `int` >= 1"),
        ({"prompt": 2.5}, "requests[0].prompt", "Expected `int`, got `float`"),
        ({"output": True}, "requests[0].output", "got `bool`"),
        ({"arrival": -1}, "requests[0].arrival", "Expected `float` >= 0"),
        ({"token_times": [0.5]}, "token_times", 'request "a" has 1 token_times for output 2'),
        ({"token_times": [0.5, 0.4]}, "token_times", "go back in time"),
        ({"id": "b"}, "request_id", 'request "b" repeats request_id "b" of request 1'),
    ],
)
def test_a_malformed_request_is_refused(write, change, field, said):
    with pytest.raises(TraceError) as refused:
        Trace.read(write(FIRST | change, SECOND))
    assert said in str(refused.value)
    assert refused.value.field == field
    assert str(refused.value).startswith(refused.value.path)


def test_a_cut_file_is_refused(write):
    path = write(FIRST)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match="truncated"):
        Trace.read(path)


def test_a_record_without_requests_is_refused(write):
    with pytest.raises(TraceError, match="did not contain any requests"):
        Trace.read(write())


def test_latencies_of_a_measured_run_count_from_the_planned_arrival(write):
    third = {"id": "c", "arrival": 0.3, "prompt": 1, "output": 1, "token_times": [0.4]}
    run = read_run(write(FIRST | {"arrival": 0.25}, SECOND, third))
    latencies = run.latencies()
    np.testing.assert_allclose(latencies.ttft_ms, [np.nan, 250.0, 100.0])
    np.testing.assert_allclose(latencies.ttst_ms, [np.nan, 250.0, np.nan])
    np.testing.assert_allclose(latencies.itl_ms, [np.nan, 250.0, np.nan])
    np.testing.assert_allclose(latencies.e2e_ms, [np.nan, 500.0, 100.0])
    assert run.gaps_ms().tolist() == [250.0]
