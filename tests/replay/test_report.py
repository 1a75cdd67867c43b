"""The report of a replay: summary keys, tables, JSON, and no report without a completed request."""

import io
import json
import math

import numpy as np
import pytest

from fpmsdk.errors import EmptyResultError
from fpmsdk.replay.latency import Sla
from fpmsdk.replay.report import ReplayReport

NAN = math.nan


def request(name, status="completed", times=(0, 0, 10, 11, 12, 12), lengths=(8, 3, 3), **more):
    arrival, admit, first, second, last, end = times
    prompt, requested, output = lengths
    return {
        "request_id": name,
        "session_id": None,
        "turn_index": 0,
        "arrival_ms": arrival,
        "first_admit_ms": admit,
        "first_token_ms": first,
        "second_token_ms": second,
        "last_token_ms": last,
        "end_ms": end,
        "prompt_tokens": prompt,
        "requested_output_tokens": requested,
        "output_tokens": output,
        "reused_tokens": 0,
        "first_reused_tokens": 0,
        "num_admissions": 1,
        "num_preemptions": 0,
        "worker": 0,
        "status": status,
        "rejection_reason": None,
    } | more


DTYPES = dict.fromkeys(("request_id", "session_id", "status", "rejection_reason"), object) | dict.fromkeys(
    ("arrival_ms", "first_admit_ms", "first_token_ms", "second_token_ms", "last_token_ms", "end_ms"),
    np.float64,
)


def report_of(*rows, gaps=(), clock_ms=12.0, **more):
    gap_ms, gap_count = zip(*gaps, strict=True) if gaps else ((), ())
    return ReplayReport(
        requests={name: np.array([row[name] for row in rows], DTYPES.get(name, np.int64)) for name in rows[0]},
        admissions={
            "request": np.array([at for at, row in enumerate(rows) if row["num_admissions"]], np.int64),
            "at_ms": np.array([row["first_admit_ms"] for row in rows if row["num_admissions"]], np.float64),
            "reused_tokens": np.array([row["reused_tokens"] for row in rows if row["num_admissions"]], np.int64),
        },
        passes={"start_ms": np.array([0.0, 10.0]), "sum_prefill_tokens": np.array([8, 0])},
        gap_ms=np.array(gap_ms, np.float64),
        gap_count=np.array(gap_count, np.int64),
        clock_ms=clock_ms,
        wall_time_ms=0.5,
        **{"committed_prefill_tokens": 8} | more,
    )


REJECTED = request(
    "big",
    "rejected",
    (100, NAN, NAN, NAN, NAN, 100),
    (400, 3, 0),
    num_admissions=0,
    rejection_reason="it never fits",
)
ZERO_OUTPUT = request("none", times=(0, 0, NAN, NAN, NAN, 10), lengths=(8, 0, 0))


# What the reference simulator reports for these requests (fixed timing 10 / 1 ms).
PEER = [
    (
        "two requests that share a block",
        [
            request("a", times=(0, 0, 10, 21, 22, 22)),
            request("b", times=(5, 10, 21, 22, 23, 23), reused_tokens=4, first_reused_tokens=4),
        ],
        {"gaps": [(11, 1), (1, 1), (1, 1), (1, 1)], "committed_prefill_tokens": 12, "clock_ms": 23.0},
        {
            "num_requests": 2,
            "completed_requests": 2,
            "total_input_tokens": 16,
            "total_output_tokens": 6,
            "duration_ms": 23.0,
            "decode_worker_seconds": 0.023,
            "gpu_hours": 6.3888888888888885e-06,
            "processed_tokens": 22,
            "committed_prefill_tokens": 12,
            "prefix_cache_reused_ratio": 0.25,
            "first_admission_prefix_cache_reused_ratio": 0.25,
            "request_throughput_rps": 86.95652173913044,
            "mean_ttft_ms": 13.0,
            "median_ttft_ms": 16.0,
            "std_ttft_ms": 3.0,
            "mean_ttst_ms": 6.0,
            "mean_tpot_ms": 3.5,
            "p75_itl_ms": 0.9989999999999999,
            "mean_itl_ms": 3.5,
            "mean_e2e_latency_ms": 20.0,
            "mean_output_token_throughput_per_user": 772.7272727272727,
            "median_output_token_throughput_per_user": 999.2468071445758,
        },
    ),
    (
        "a rejected request counts as arrived and keeps the workers busy until it came",
        [request("a"), REJECTED],
        {"gaps": [(1, 1), (1, 1)], "clock_ms": 100.0},
        {
            "num_requests": 2,
            "completed_requests": 1,
            "total_input_tokens": 8,
            "duration_ms": 12.0,
            "decode_worker_seconds": 0.1,
            "gpu_hours": 2.7777777777777776e-05,
            "processed_tokens": 11,
            "request_throughput_rps": 83.33333333333333,
            "input_throughput_tok_s": 666.6666666666666,
            "output_throughput_tok_s": 250.0,
            "total_throughput_tok_s": 916.6666666666666,
            "num_ttft_samples": 1,
        },
    ),
    (
        "a request without output has no latencies but takes its time",
        [
            ZERO_OUTPUT,
            request("one", times=(50, 50, 60, NAN, 60, 60), lengths=(8, 1, 1), reused_tokens=4),
            request("two", times=(80, 80, 90, 91, 91, 91), lengths=(8, 2, 2), reused_tokens=4),
        ],
        {"gaps": [(1, 1)], "committed_prefill_tokens": 16, "clock_ms": 91.0, "sla": Sla(ttft_ms=100)},
        {
            "completed_requests": 3,
            "duration_ms": 91.0,
            "num_ttft_samples": 2,
            "num_tpot_samples": 1,
            "num_e2e_latency_samples": 2,
            "mean_e2e_latency_ms": 10.5,
            "median_itl_ms": 1.0,
            "prefix_cache_reused_ratio": 0.3333333333333333,
            "goodput_completed_requests": 2,
            "goodput_output_throughput_tok_s": 32.96703296703297,
            "goodput_request_throughput_rps": 21.978021978021978,
        },
    ),
    (
        "nothing but a request without output",
        [ZERO_OUTPUT],
        {"clock_ms": 10.0},
        {"duration_ms": 10.0, "request_throughput_rps": 100.0, "mean_ttft_ms": 0.0, "max_itl_ms": 0.0},
    ),
]


@pytest.mark.parametrize(("rows", "run", "figures"), [case[1:] for case in PEER], ids=[case[0] for case in PEER])
def test_summary_figures(rows, run, figures):
    summary = report_of(*rows, **run).summary
    assert {name: summary[name] for name in figures} == pytest.approx(figures, rel=1e-12)


def test_summary_has_every_key_of_an_aggregated_run():
    expected = {
        "num_requests",
        "completed_requests",
        "total_input_tokens",
        "total_output_tokens",
        "duration_ms",
        "wall_time_ms",
        "request_throughput_rps",
        "input_throughput_tok_s",
        "output_throughput_tok_s",
        "total_throughput_tok_s",
        "prefill_worker_seconds",
        "decode_worker_seconds",
        "prefill_gpus_per_worker",
        "decode_gpus_per_worker",
        "gpu_hours",
        "power_w",
        "power_coverage",
        "processed_tokens",
        "processed_tokens_per_s",
        "processed_output_tokens_per_s",
        "prefix_cache_reused_ratio",
        "first_admission_prefix_cache_reused_ratio",
        "num_ttft_samples",
        "num_tpot_samples",
        "num_e2e_latency_samples",
        "kv_eviction_policy",
        "committed_prefill_tokens",
    }
    for figure in ("mean", "min", "max", "median", "p75", "p90", "p95", "p99", "std"):
        expected.add(f"{figure}_output_token_throughput_per_user")
        expected |= {f"{figure}_{name}_ms" for name in ("ttft", "ttst", "tpot", "itl", "e2e_latency")}
    assert set(report_of(request("a")).summary) == expected


def test_gpu_hours_count_every_gpu_of_every_worker():
    summary = report_of(request("a"), clock_ms=3600e3, num_workers=3, gpus_per_worker=8).summary
    assert summary["decode_worker_seconds"] == 3 * 3600
    assert summary["decode_gpus_per_worker"] == 8
    assert summary["gpu_hours"] == 24


def test_an_unfinished_request_is_reported_but_not_measured():
    report = report_of(request("a"), request("b", "unfinished", (5, 6, 30, 31, 40, NAN), (8, 50, 11)))
    assert report.summary["completed_requests"] == 1
    assert report.summary["max_ttft_ms"] == 10
    assert report.requests["status"].to_pylist() == ["completed", "unfinished"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([REJECTED], "1 of 1 were rejected, the first, big, because it never fits; 0 were unfinished"),
        ([request("a", "unfinished")], "0 of 1 were rejected; 1 were unfinished"),
    ],
)
def test_a_run_without_a_completed_request_is_an_error(rows, said):
    with pytest.raises(EmptyResultError, match=said):
        report_of(*rows)


def test_the_request_table_has_null_where_a_time_is_absent():
    table = report_of(request("a"), REJECTED).requests
    for name in ("request_id", "arrival_ms", "first_token_ms", "second_token_ms", "end_ms", "reused_tokens"):
        assert name in table.column_names
    assert table["first_token_ms"].to_pylist() == [10.0, None]
    assert table["ttft_ms"].to_pylist() == [10.0, None]
    assert table["end_ms"].to_pylist() == [12.0, 100.0]
    assert table["rejection_reason"].to_pylist() == [None, "it never fits"]
    assert str(table["session_id"].type) == "string"


def test_the_pass_table_has_the_recorded_columns():
    assert report_of(request("a")).passes["sum_prefill_tokens"].to_pylist() == [8, 0]


def test_json_uses_the_record_keys_and_null_for_absent_times():
    report = report_of(request("a", times=(5, 6, 15, 16, 17, 17), session_id="s"), REJECTED, options={"x": 1})
    document = json.loads(report.to_json())
    assert document["options"] == {"x": 1}
    assert document["summary"]["duration_ms"] == 17
    first, second = document["per_request"]
    assert first == {
        "request_id": "a",
        "session_id": "s",
        "turn_index": 0,
        "arrival_time_ms": 5,
        "first_admit_ms": 6,
        "first_token_ms": 15,
        "last_token_ms": 17,
        "terminal_time_ms": 17,
        "ttft_ms": 10,
        "ttst_ms": 1,
        "itl_ms": 1,
        "e2e_latency_ms": 12,
        "input_length": 8,
        "requested_output_length": 3,
        "output_length": 3,
        "reused_input_tokens": 0,
        "first_admission_reused_input_tokens": 0,
        "admission_count": 1,
        "preemption_count": 0,
        "decode_worker_idx": 0,
        "terminal_status": "completed",
        "rejection_reason": None,
        "admission_history": [{"at_ms": 6, "reused_input_tokens": 0, "is_readmission": False}],
    }
    assert second["admission_history"] == []
    assert (second["first_token_ms"], second["rejection_reason"]) == (None, "it never fits")
    assert "per_request" not in json.loads(report.to_json(per_request=False))


def test_a_json_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "report.json"
    report = report_of(request("a"))
    report.write_json(target)
    assert json.loads(target.read_text())["summary"]["completed_requests"] == 1

    def fail(draft, final):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    before = target.read_text()
    with pytest.raises(OSError, match="disk full"):
        report.write_json(target, per_request=False)
    assert target.read_text() == before
    assert list(tmp_path.iterdir()) == [target]


def test_the_printed_table_shows_the_figures():
    from rich.console import Console

    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report_of(request("a"), REJECTED).table())
    text = console.export_text()
    assert "1 of 2 requests completed" in text
    assert "83.33 requests/s" in text
    assert [line for line in text.splitlines() if "TTFT" in line and "10.00" in line]
