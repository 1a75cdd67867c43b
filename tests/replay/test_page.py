"""The data behind the report page: exact where they are few, thinned in words where they are many."""

import json
import re

import numpy as np
import pytest

from fpmsdk import Trace, replay_trace, sample
from fpmsdk.errors import ConfigError, TraceError
from fpmsdk.replay.page import charts
from fpmsdk.replay.page.steps import Steps

LAUNCH = {
    "engine": {
        "block_size": 4,
        "num_gpu_blocks": 65,
        "max_num_batched_tokens": 8,
        "timing_model": {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0},
    }
}
TRACE = Trace.from_arrays([0.0, 0.0, 100.0], [8, 8, 8], [3, 1, 1])


def data_of(page):
    return json.loads(re.search(r'<script id="data" type="application/json">\n(.*?)\n</script>', page, re.DOTALL)[1])


def test_load_is_summed_over_what_runs_at_a_time():
    drawn = charts.over_time(replay_trace(TRACE, launch=LAUNCH), 64.0)
    batch = drawn["panels"]["batch"]
    # 8 prompt tokens; then one decode with 7 of the second prompt, with its last one; idle; the third prompt.
    assert batch["prefill requests"] == {"x": [0.0, 10.0, 21.0, 32.0, 100.0, 110.0], "mean": [1, 1, 1, 0, 1, 0]}
    assert batch["decode requests"] == {"x": [0.0, 10.0, 21.0, 32.0, 100.0, 110.0], "mean": [0, 1, 1, 0, 0, 0]}
    assert drawn["panels"]["queue"]["waiting requests"]["mean"] == [1, 0, 0, 0, 0, 0]
    # Blocks of 4 tokens: 8, then 9 and 7, then 10 and 8 tokens.
    expected = [share * 100 / 64 for share in (2, 5, 5, 0, 2, 0)]
    assert drawn["panels"]["kv"]["KV cache in use, %"]["mean"] == pytest.approx(expected, abs=1e-4)
    assert drawn["note"] == "Exact: a step for every change."


def test_many_changes_become_means_and_largest_values(monkeypatch):
    monkeypatch.setattr(charts, "MAX_STEPS", 3)
    monkeypatch.setattr(charts, "NUM_BINS", 11)
    drawn = charts.over_time(replay_trace(TRACE, launch=LAUNCH), 64.0)
    prefill = drawn["panels"]["batch"]["prefill requests"]
    assert prefill["x"][0] == 5.0
    assert prefill["mean"] == pytest.approx([1, 1, 1, 0.2, 0, 0, 0, 0, 0, 0, 1])
    assert prefill["max"] == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1]
    assert "means over 11 intervals of 10.00 ms" in drawn["note"]


@pytest.mark.parametrize(
    ("edges", "mean", "largest"),
    [
        ([0.0, 4.0], [1.5], [3.0]),  # 1 for 2, then 3 for 1, then 1 for 1, all of 4
        ([0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 3.0, 1.0], [1.0, 1.0, 3.0, 1.0]),
        ([1.5, 2.5], [2.0], [3.0]),
        ([-2.0, 1.0], [1.0 / 3], [1.0]),
    ],
)
def test_steps_are_averaged_over_time(edges, mean, largest):
    found = Steps(np.array([0.0, 2.0, 3.0]), np.array([1.0, 3.0, 1.0])).binned(np.array(edges))
    assert found[0] == pytest.approx(mean)
    assert found[1].tolist() == largest


def test_a_thinned_distribution_keeps_its_ends():
    curve = charts.cdf(np.arange(5000.0)[::-1])
    assert curve["count"] == 5000
    assert len(curve["x"]) == charts.MAX_CDF_POINTS
    assert (curve["x"][0], curve["x"][-1], curve["y"][-1]) == (0.0, 4999.0, 1.0)


def test_the_timeline_has_every_pass_with_its_kind():
    line = charts.timeline(replay_trace(TRACE, launch=LAUNCH))
    assert [charts.KINDS[kind] for kind in line["kind"]] == ["prefill", "mixed", "mixed", "prefill"]
    assert line["start"] == [0.0, 10.0, 21.0, 100.0]
    assert line["end"] == [10.0, 21.0, 32.0, 110.0]
    assert line["lanes"] == ["engine"]
    assert line["note"] == "All 4 passes are on the page."


def test_neighbouring_passes_of_a_rank_share_a_bar_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(charts, "MAX_PASSES", 4)
    two = replay_trace(
        Trace.from_arrays([0.0, 0.0, 0.0, 100.0], [8, 8, 8, 8], [3, 3, 1, 1]), launch=LAUNCH, num_workers=2
    )
    line = charts.timeline(two)
    assert two.passes.num_rows == 7
    assert line["lanes"] == ["rank 0", "rank 1"]
    assert line["lane"] == [0, 0, 1, 1]
    # Rank 0 passes as the engine above does, without the third request, which is rank 1's.
    assert (line["start"], line["end"]) == ([0.0, 21.0, 0.0, 11.0], [21.0, 32.0, 11.0, 110.0])
    assert [charts.KINDS[kind] for kind in line["kind"]] == ["several", "mixed", "several", "several"]
    assert line["share_prefill"][0] == pytest.approx(10 / 21, abs=1e-4)
    assert line["share_mixed"][0] == pytest.approx(11 / 21, abs=1e-4)
    assert line["share_prefill"][3] == pytest.approx(10 / 99, abs=1e-4)  # most of that bar is idle
    assert "7 passes are too many for a page: each bar stands for up to 2" in line["note"]


def test_the_page_holds_everything_and_names_nothing_outside(tmp_path):
    run = sample.burst_run()
    report = replay_trace(
        run.trace, launch=sample.launch(run), timing={"type": "fixed", "prefill_ms": 50, "decode_ms": 6}
    )
    report.write_html(tmp_path / "report.html", measured=run)
    page = (tmp_path / "report.html").read_text()
    data = data_of(page)
    assert [panel["name"] for panel in data["cdf"]["panels"]] == ["ttft_ms", "itl_ms", "e2e_ms"]
    assert data["cdf"]["panels"][0]["curves"]["measured"]["count"] == 160
    assert len(data["measured"]["panels"][0]["replayed"]) == 160
    frame = page.replace(re.search(r"<script>\n(/\*\*\n\* plotly.*?)\n</script>", page, re.DOTALL)[1], "")
    assert re.findall(r'(?:src|href)="', frame) == []
    assert "{{" not in frame


def banners_of(page):
    return re.findall(r'<p class="banner">(.*?)</p>', page)


def test_the_page_tells_how_many_were_rejected_or_failed_and_why(tmp_path):
    path = tmp_path / "report.html"
    rank = LAUNCH["engine"] | {"enable_prefix_caching": False}
    report = replay_trace(
        Trace.from_arrays([0.0, 0.0, 100.0, 200.0, 300.0], [40, 8, 44, 8, 300], [2, 3, 3, 3, 1]),
        launch={"engine": rank | {"num_gpu_blocks": 5, "worker_type": "decode"}},
        prefill_launch={"engine": rank | {"num_gpu_blocks": 12, "worker_type": "prefill"}},
        scheduler_rules="simulator",
    )
    report.write_html(path)
    assert banners_of(path.read_text()) == [
        "1 of 5 requests were rejected: its prompt needs more than the 12 usable KV blocks of 4 tokens (1 x).",
        "2 of 5 requests failed: its prompt needs more than the 5 usable KV blocks of 4 tokens of a decode worker "
        "(2 x).",
    ]
    replay_trace(TRACE, launch=LAUNCH).write_html(path)
    assert banners_of(path.read_text()) == []


def test_text_of_a_trace_cannot_leave_its_place(tmp_path):
    trace = Trace.from_arrays([0.0], [8], [2], request_ids=["</script><script>alert(1)</script>"])
    report = replay_trace(trace, launch=LAUNCH)
    report.write_html(tmp_path / "report.html", title="<img src=x> {{data}}")
    page = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in page
    assert "<h1>&lt;img src=x&gt; {{data}}</h1>" in page
    assert page.count("<script") - page.count("<script>alert") == page.count("</script>")


def test_a_page_of_other_requests_or_without_passes_is_refused(tmp_path):
    path = tmp_path / "report.html"
    with pytest.raises(TraceError, match="different requests"):
        replay_trace(TRACE, launch=LAUNCH).write_html(path, measured=sample.burst_run())
    with pytest.raises(ConfigError, match="no passes to draw"):
        replay_trace(TRACE, launch=LAUNCH, record_passes=False).write_html(path)
    assert not path.exists()
