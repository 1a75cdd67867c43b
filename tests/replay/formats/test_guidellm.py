"""Rules of GuideLLM reports: completed requests of one benchmark, old and new places of the times."""

import json
import tracemalloc

import pytest

from fpmsdk.errors import TraceError
from fpmsdk.replay.trace import Trace

EPOCH_S = 1_759_813_207.5


def request(name, start, end, prompt=100, output=10, conversation=None, **more):
    timings = {"targeted_start": start - 1, "request_start": EPOCH_S + start, "request_end": EPOCH_S + end}
    return {
        "type_": "generative_request_stats",
        "request_id": name,
        "info": {"conversation_id": conversation, "turn_index": 0, "timings": timings, "status": "completed"},
        "prompt_tokens": prompt,
        "output_tokens": output,
        **more,
    }


@pytest.fixture
def read(tmp_path):
    def read_report(*benchmarks, **options):
        path = tmp_path / "benchmarks.json"
        path.write_text(json.dumps({"metadata": {}, "benchmarks": [{"requests": requests} for requests in benchmarks]}))
        return Trace.read(path, **options)

    return read_report


def test_completed_requests_arrive_when_they_were_sent(read):
    trace = read({"successful": [request("b", 2.25, 3), request("a", 0.5, 1, 7, 0)], "errored": [{"x": 1}]})
    assert trace.request_ids.tolist() == ["a", "b"]
    assert trace.arrival_ms.tolist() == [0.0, 1750.0]
    assert trace.prompt_tokens.tolist() == [7, 100]
    assert trace.output_tokens.tolist() == [0, 10]


def test_older_reports_have_the_times_beside_the_lengths(read):
    older = [
        {"request_id": name, "prompt_tokens": 4, "output_tokens": 2, "start_time": at, "end_time": at + 1}
        for name, at in (("a", EPOCH_S), ("b", EPOCH_S + 0.125))
    ]
    assert read({"successful": older}).arrival_ms.tolist() == [0.0, 125.0]


def test_turns_of_a_conversation_wait_from_the_end_of_the_turn_before_them(read):
    trace = read({"successful": [request("b", 2, 3, conversation="c"), request("a", 0, 1.5, conversation="c")]})
    assert trace.request_ids.tolist() == ["a", "b"]
    assert trace.delay_ms.tolist() == [0.0, 500.0]


def test_a_report_of_several_benchmarks_asks_for_one(read):
    several = [{"successful": [request(name, 0, 1)]} for name in ("a", "b")]
    with pytest.raises(TraceError, match="the report holds 2 benchmarks; name one with benchmark=0 to 1"):
        read(*several)
    assert read(*several, benchmark=1).request_ids.tolist() == ["b"]
    for wrong in (2, -1, True):
        with pytest.raises(TraceError, match="benchmark is"):
            read(*several, benchmark=wrong)


@pytest.mark.parametrize(
    ("broken", "field", "said"),
    [
        (request("b", 0, 1, prompt=0), "prompt_tokens", 'request "b" has prompt_tokens 0'),
        (request("b", 0, 1, prompt=None), "prompt_tokens", 'request "b" has prompt_tokens None'),
        (request("b", 0, 1, output=-2), "output_tokens", 'request "b" has output_tokens -2'),
        (request("b", 0, 1, info={}), "info.timings", 'request "b" has no start time'),
        (request("a", 0, 1), "request_id", 'repeats request_id "a" of request'),
    ],
)
def test_a_malformed_request_is_refused_by_name(read, broken, field, said):
    with pytest.raises(TraceError) as refused:
        read({"successful": [request("a", 0, 1), broken]})
    assert said in str(refused.value)
    assert (refused.value.line, refused.value.field) == (None, field)


def test_a_sample_of_the_requests_is_no_trace(tmp_path):
    benchmark = {"requests": {"successful": [request("a", 0, 1)]}, "metrics": {"request_totals": {"successful": 3}}}
    (tmp_path / "b.json").write_text(json.dumps({"benchmarks": [benchmark]}))
    with pytest.raises(TraceError, match="a sample, 1 of 3 completed requests"):
        Trace.read(tmp_path / "b.json")


def test_another_document_is_refused(read, tmp_path):
    (tmp_path / "benchmarks.json").write_text(
        '{"benchmarks": [{"requests": {"successful": [{"prompt_tokens": "4"}]}}]}'
    )
    with pytest.raises(TraceError, match="not a GuideLLM report") as refused:
        Trace.read(tmp_path / "benchmarks.json")
    assert refused.value.field == "benchmarks[0].requests.successful[0].prompt_tokens"


def test_a_report_without_completed_requests_is_refused(read):
    with pytest.raises(TraceError, match="did not contain any requests"):
        read({"successful": []})


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("[]", "it has no benchmarks"),
        ("{}", "it has no benchmarks"),
        ('{"benchmarks": {}}', "benchmarks is not a list"),
        ('{"benchmarks": [3]}', r"benchmarks\[0\] is not an object"),
        ('{"benchmarks": [{}]}', r"benchmarks\[0\] has no requests"),
        ('{"benchmarks": [{"requests": {"successful": 3}}]}', r"benchmarks\[0\].requests.successful is not a list"),
        ('{"benchmarks": [{"requests": {"successful": [3]}}]}', r"successful\[0\] is not an object"),
        ('{"benchmarks": [{"requests": {"successful": []}}', "not a GuideLLM report"),
        ('{"benchmarks": []} x', "not a GuideLLM report"),
    ],
)
def test_a_document_of_another_shape_is_refused(tmp_path, document, said):
    (tmp_path / "b.json").write_text(document)
    with pytest.raises(TraceError, match=said):
        Trace.read(tmp_path / "b.json", "guidellm")


def test_a_report_is_told_by_its_keys_wherever_they_stand(tmp_path):
    report = {"metadata": {"x": [1, {"y": 2}]}, "benchmarks": [{"requests": {"successful": [request("a", 0, 1)]}}]}
    (tmp_path / "b.json").write_text(json.dumps(report))
    assert Trace.read(tmp_path / "b.json").request_ids.tolist() == ["a"]


def test_memory_does_not_grow_with_a_report(tmp_path):
    from fpmsdk.replay.formats import ReadOptions, open_trace

    peaks = []
    for count in (500, 5000):
        with (tmp_path / "b.json").open("w") as file:
            rows = (json.dumps(request(f"r{row}", row, row + 1)) for row in range(count))
            file.write('{"benchmarks": [{"requests": {"successful": [' + ", ".join(rows) + "]}}]}")
        tracemalloc.start()
        assert sum(1 for _ in open_trace(tmp_path / "b.json", None, ReadOptions()).rows()) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
