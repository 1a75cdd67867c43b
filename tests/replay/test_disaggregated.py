"""Prefill and decode workers: options, transfers, and what can go wrong."""

import json

import pytest

from fpmsdk import Trace, replay_trace
from fpmsdk.errors import ConfigError, EmptyResultError

FIXED = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
RANK = {"block_size": 4, "num_gpu_blocks": 64, "max_num_batched_tokens": 16, "timing_model": FIXED}
LINK = {"kv_transfer_bandwidth": 1.0, "kv_transfer_bytes_per_token": 1_000_000}


def served(*shapes, prefill=None, decode=None, **options):
    prompts, outputs = zip(*shapes, strict=True)
    return replay_trace(
        Trace.from_arrays([0.0] * len(shapes), prompts, outputs),
        launch={"engine": RANK | {"worker_type": "decode"} | (decode or {})},
        prefill_launch={"engine": RANK | {"worker_type": "prefill"} | (prefill or {})},
        **options,
    )


@pytest.mark.parametrize("rules", ["vllm", "simulator"])
@pytest.mark.parametrize(
    ("link", "handoff_ms", "activated_ms"),
    [({}, 0.0, 10.0), ({}, 2.5, 12.5), (LINK, 0.0, 18.0), (LINK | {"kv_transfer_bandwidth": 0.0}, 2.5, 12.5)],
)
def test_the_first_token_comes_after_prefill_transfer_and_one_decode_step(rules, link, handoff_ms, activated_ms):
    report = served((8, 3), prefill=link, handoff_latency_ms=handoff_ms, scheduler_rules=rules)
    row = report.requests.to_pylist()[0]
    assert (row["source_held_ms"], row["destination_activated_ms"]) == (10.0, activated_ms)
    assert (row["first_token_ms"], row["end_ms"]) == (activated_ms + 1, activated_ms + 3)
    assert report.summary["prefill_gpus_per_worker"] == report.summary["decode_gpus_per_worker"] == 1
    assert set(report.passes["pool"].to_pylist()) == {"prefill", "decode"}


def test_a_decode_worker_transfers_only_what_it_has_not_cached():
    mode = LINK | {"kv_transfer_timing_mode": "destination_missing"}
    trace = Trace.from_arrays([0.0, 100.0], [10, 10], [3, 3], hash_ids=[[1, 2, 3]] * 2, block_tokens=4)
    report = replay_trace(
        trace,
        launch={"engine": RANK | {"worker_type": "decode"}},
        prefill_launch={"engine": RANK | {"worker_type": "prefill"} | mode},
    )
    rows = report.requests.to_pylist()
    assert [row["destination_activated_ms"] - row["destination_reserved_ms"] for row in rows] == [12.0, 4.0]


def test_admissions_name_their_pool_and_the_first_one_of_each_is_no_readmission():
    # The decode pool holds four blocks: the younger request is preempted there and admitted again.
    report = served((8, 9), (8, 9), decode={"num_gpu_blocks": 7, "enable_prefix_caching": False})
    histories = [record["admission_history"] for record in json.loads(report.to_json())["per_request"]]
    told = [[(entry["pool"], entry["is_readmission"]) for entry in history] for history in histories]
    assert told[0] == [("prefill", False), ("decode", False)]
    assert told[1] == [("prefill", False), ("decode", False), ("decode", True)]
    assert report.admissions["pool"].to_pylist().count("decode") == 3


def test_a_prompt_that_the_prefill_pool_rejects_ends_there():
    rows = served((400, 2), (8, 2)).requests.to_pylist()
    assert (rows[0]["status"], rows[0]["worker"], rows[0]["output_tokens"]) == ("rejected", None, 0)
    assert rows[1]["status"] == "completed"


def test_when_every_prompt_fails_the_error_names_the_first():
    with pytest.raises(EmptyResultError, match="1 of 1 were rejected, the first, request_1, because its prompt needs"):
        served((100, 2), decode={"num_gpu_blocks": 8})


def test_every_request_gets_its_tokens_with_drafts_too():
    drafts = {"aic_nextn": 3, "aic_nextn_accept_rates": "0.9,0.8,0.7"}
    report = served(*[(20, 30)] * 6, prefill=drafts, decode=drafts | {"num_gpu_blocks": 40})
    assert report.requests["output_tokens"].to_pylist() == [30] * 6
    assert report.summary["min_itl_ms"] == 0.0


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"num_prefill_workers": 2}, "num_prefill_workers"),
        ({"handoff_latency_ms": 1.0}, "handoff_latency_ms"),
        ({"prefill_timing": FIXED}, "prefill_timing"),
        ({"launch": {"engine": {"worker_type": "decode"}}}, "launch.engine.worker_type"),
        ({"prefill_launch": {"engine": {"worker_type": "prefill"}}}, "launch.engine.worker_type"),
        (
            {"launch": {"engine": {"worker_type": "decode"}}, "prefill_launch": {"engine": {}}},
            "prefill_launch.engine.worker_type",
        ),
        ({"placement": "random"}, "placement"),
        ({"launch": {"engine": {"backend": "trtllm"}}}, "engine.backend"),
    ],
)
def test_options_that_do_not_go_together_are_named(options, path):
    with pytest.raises(ConfigError) as failure:
        replay_trace(Trace.from_arrays([0.0], [8], [2]), **options)
    assert failure.value.path == path


def test_a_handoff_latency_beside_a_link_that_gives_it_is_refused():
    with pytest.raises(ConfigError, match="handoff_latency_ms has no effect when the prefill launch sets"):
        served((8, 3), prefill=LINK, handoff_latency_ms=2.5)


def test_a_rank_that_does_not_exist_cannot_be_asked_for():
    with pytest.raises(ConfigError, match="dp_rank 2 is out of range for dp_size 2"):
        replay_trace(Trace.from_arrays([0.0], [8], [2], dp_rank=[2]), launch={"engine": {}, "dp_size": 2})


FEW_BLOCKS = {"block_size": 4, "num_gpu_blocks": 5, "enable_prefix_caching": False, "worker_type": "decode"}
MANY_BLOCKS = {"block_size": 4, "num_gpu_blocks": 12, "enable_prefix_caching": False, "worker_type": "prefill"}


@pytest.mark.parametrize(
    ("requests", "options", "expected"),
    [
        # Recorded from the peer: (arrival, first admission, end, held, decode worker) of each request.
        (
            [(0.0, 40, 2), (3.0, 8, 3), (100.0, 8, 3), (200.0, 8, 3)],
            {"num_workers": 2},
            [
                ("failed", 0.0, 0.0, 10.0, 10.0, None),
                ("completed", 3.0, 10.0, 23.0, 20.0, 1),
                ("completed", 100.0, 100.0, 113.0, 110.0, 0),
                ("completed", 200.0, 200.0, 213.0, 210.0, 1),
            ],
        ),
        # Their prompts fill the prefill worker one after the other: what a failed one held is free.
        (
            [(0.0, 40, 2), (3.0, 44, 3), (100.0, 48, 3), (200.0, 8, 3)],
            {},
            [
                ("failed", 0.0, 0.0, 10.0, 10.0, None),
                ("failed", 3.0, 10.0, 20.0, 20.0, None),
                ("failed", 100.0, 100.0, 110.0, 110.0, None),
                ("completed", 200.0, 200.0, 213.0, 210.0, 0),
            ],
        ),
        (
            [(0.0, 40, 2), (0.0, 8, 3), (0.0, 8, 3)],
            {"concurrency": 1},
            [
                ("failed", 0.0, 0.0, 10.0, 10.0, None),
                ("completed", 10.0, 10.0, 23.0, 20.0, 0),
                ("completed", 23.0, 23.0, 36.0, 33.0, 0),
            ],
        ),
    ],
)
def test_a_prompt_that_no_decode_worker_can_take_fails_and_the_others_go_on(requests, options, expected):
    arrivals, prompts, outputs = zip(*requests, strict=True)
    report = replay_trace(
        Trace.from_arrays(arrivals, prompts, outputs),
        launch={"engine": FEW_BLOCKS | {"timing_model": FIXED}},
        prefill_launch={"engine": MANY_BLOCKS | {"timing_model": FIXED}},
        scheduler_rules="simulator",
        **options,
    )
    columns = ("status", "arrival_ms", "first_admit_ms", "end_ms", "source_held_ms", "worker")
    assert [tuple(row[name] for name in columns) for row in report.requests.to_pylist()] == expected
    failed = report.requests.to_pylist()[0]
    assert (failed["first_token_ms"], failed["source_released_ms"], failed["output_tokens"]) == (None, None, 0)
    assert (
        failed["rejection_reason"] == "its prompt needs more than the 5 usable KV blocks of 4 tokens of a decode worker"
    )


SHARED, ALONE = [1, 2, 3, 4], [5]
TOO_LONG = [7] * 40
ROOMY = {"block_size": 4, "num_gpu_blocks": 4000, "max_num_batched_tokens": 256, "max_model_len": 33}
FAST = {"kv_transfer_bandwidth": 100.0, "kv_transfer_bytes_per_token": 100_000}


@pytest.mark.parametrize(
    ("requests", "prefill", "decode", "options", "expected"),
    [
        # Recorded from the peer: (arrival, first admission, held, reserved, released, end) of each request.
        pytest.param(
            [(SHARED, 0), (SHARED, 0), (ALONE, 0)],
            {"max_num_seqs": 1},
            {},
            {},
            [
                (0.0, 0.0, 10.0, 10.0, 10.0, 10.0),
                (0.0, 10.0, 10.0, 10.0, 20.0, 10.0),
                (0.0, 10.0, 20.0, 20.0, 20.0, 20.0),
            ],
            id="the next prompt does not wait for what a cached one has brought",
        ),
        pytest.param(
            [(SHARED, 0), (TOO_LONG, 0), (SHARED, 0), (ALONE, 0)],
            {"max_num_seqs": 1},
            {},
            {},
            [
                (0.0, 0.0, 10.0, 10.0, 10.0, 10.0),
                (0.0, None, None, None, None, 10.0),
                (0.0, 10.0, 10.0, 10.0, 20.0, 10.0),
                (0.0, 10.0, 20.0, 20.0, 20.0, 20.0),
            ],
            id="nor after a rejection",
        ),
        pytest.param(
            [(SHARED, 1), (ALONE, 1), ([6], 1), (SHARED, 0)],
            {"max_num_seqs": 1},
            {},
            {},
            [
                (0.0, 0.0, 10.0, 10.0, 10.0, 11.0),
                (0.0, 10.0, 20.0, 20.0, 20.0, 21.0),
                (0.0, 20.0, 30.0, 30.0, 30.0, 31.0),
                (0.0, 30.0, 30.0, 31.0, 31.0, 31.0),
            ],
            id="where none waits, a cached prompt is there after the decode worker has started",
        ),
        pytest.param(
            [(SHARED, 1), (TOO_LONG, 0), ([8] * 40, 0), (ALONE, 0), ([6], 0)],
            {},
            {},
            {"concurrency": 2},
            [
                (0.0, 0.0, 10.0, 10.0, 10.0, 11.0),
                (0.0, None, None, None, None, 10.0),
                (10.0, None, None, None, None, 10.0),
                (10.0, 10.0, 20.0, 20.0, 20.0, 20.0),
                (11.0, 20.0, 30.0, 30.0, 30.0, 30.0),
            ],
            id="the place of a rejected prompt is taken after passes have started",
        ),
        pytest.param(
            [(ALONE, 0), ([6], 0), ([7, 8], 0), ([9], 0), ([10], 0)],
            FAST,
            {"max_num_seqs": 1},
            {"concurrency": 3},
            [
                (0.0, 0.0, 10.0, 10.0, 10.001, 10.001),
                (0.0, 0.0, 10.0, 10.0, 10.001, 10.001),
                (0.0, 0.0, 10.0, 10.0, 20.000999999999998, 10.002),
                (10.001, 10.001, 20.000999999999998, 20.000999999999998, 20.002, 20.002),
                (10.001, 10.001, 20.000999999999998, 20.000999999999998, 20.002, 20.002),
            ],
            id="requests without output end together",
        ),
        pytest.param(
            [([20 + k for k in range(13)], 0), ([40 + k for k in range(9)], 1), ([60 + k for k in range(5)], 0)],
            {},
            {"max_num_seqs": 1},
            {"num_prefill_workers": 3},
            [
                (0.0, 0.0, 10.0, 10.0, 10.0, 10.0),
                (0.0, 0.0, 10.0, 10.0, 10.0, 11.0),
                (0.0, 0.0, 10.0, 10.0, 10.0, 11.0),
            ],
            id="a decode pass without duration lets the next prompt in",
        ),
    ],
)
def test_passes_without_duration_follow_one_another_as_at_the_peer(requests, prefill, decode, options, expected):
    ids, outputs = zip(*requests, strict=True)
    report = replay_trace(
        Trace.from_arrays([0.0] * len(ids), [len(row) for row in ids], outputs, hash_ids=ids, block_tokens=1),
        launch={"engine": ROOMY | {"worker_type": "decode", "timing_model": FIXED} | decode},
        prefill_launch={"engine": ROOMY | {"worker_type": "prefill", "timing_model": FIXED} | prefill},
        scheduler_rules="simulator",
        mixed_pass_pricing="separate",
        **options,
    )
    columns = (
        "arrival_ms",
        "first_admit_ms",
        "source_held_ms",
        "destination_reserved_ms",
        "source_released_ms",
        "end_ms",
    )
    assert [tuple(row[name] for name in columns) for row in report.requests.to_pylist()] == expected
