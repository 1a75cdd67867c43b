"""Columnar batches: the same numbers whatever the form of the input."""

import copy
import pickle

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from fpmsdk import FpmBatch, sample
from fpmsdk.errors import FrameDecodeError, MetricsError
from fpmsdk.metrics import ForwardPassMetrics, ScheduledRequestMetrics, decode_frame, encode_frame

DECODE = {"wall_time": 0.004, "scheduled_requests": {"num_decode_requests": 2, "sum_decode_kv_tokens": 900}}
PREFILL = {
    "wall_time": 0.05,
    "dp_rank": 1,
    "scheduled_requests": {
        "num_prefill_requests": 1,
        "sum_prefill_tokens": 100,
        "extend_lengths": [100],
        "past_kv_lengths": [7],
    },
}


def columns(batch):
    return {name: array.tolist() for name, array in batch._arrays.items()}


@pytest.fixture(scope="module")
def frames():
    return sample.eval_frames()[:500]


def test_frames_dicts_and_objects_give_equal_columns(frames):
    from_frames = columns(FpmBatch.from_frames(frames))
    assert from_frames == columns(FpmBatch.from_dicts([msgspec.msgpack.decode(frame) for frame in frames]))
    assert from_frames == columns(FpmBatch.from_dicts([[decode_frame(frame)] for frame in frames]))


def test_arrow_round_trip_keeps_ranks_lists_and_iterations():
    batch = FpmBatch.from_dicts([[DECODE, PREFILL], DECODE, [PREFILL]])
    table = batch.to_arrow()
    assert table["iteration"].to_pylist() == [0, 0, 1, 2]
    assert table["extend_lengths"].to_pylist() == [None, [100], None, [100]]
    assert columns(FpmBatch.from_arrow(table)) == columns(batch)


def test_arrow_without_iteration_column_has_one_rank_per_iteration():
    table = pa.table({"num_decode_requests": [1, 2], "sum_decode_kv_tokens": [5, 6]})
    batch = FpmBatch.from_arrow(table)
    assert (len(batch), batch.sum_decode_kv_tokens.tolist(), batch.wall_time_s.tolist()) == (
        2,
        [5, 6],
        [0.0, 0.0],
    )


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("num_decode_requests", [1, -1], "column num_decode_requests, row 1: expected integers from 0 to"),
        ("num_decode_requests", [1, 2**32], "column num_decode_requests, row 1"),
        ("num_decode_requests", [1.0, 2.0], "column num_decode_requests: expected integers, found double"),
        ("num_decode_requests", [1, None], "column num_decode_requests: expected no nulls, found 1"),
        ("var_decode_kv_tokens", [0.0, float("nan")], "column var_decode_kv_tokens, row 1: expected finite"),
        ("wall_time_s", ["a", "b"], "column wall_time_s: expected numbers, found string"),
        ("iteration", [1, 0], "column iteration, row 1: expected ascending numbers, found 0"),
        ("extend_lengths", [[1], [2]], "column extend_lengths needs its partner"),
    ],
)
def test_a_bad_arrow_column_is_named(column, values, message):
    with pytest.raises(MetricsError, match=message.replace("(", r"\(")):
        FpmBatch.from_arrow(pa.table({column: values}))


def test_arrow_lists_of_different_lengths_are_named_by_row():
    table = pa.table({"extend_lengths": [[1], [2]], "past_kv_lengths": [[1], [2, 3]]})
    with pytest.raises(MetricsError, match="row 1: extend_lengths has 1 entries, past_kv_lengths has 2"):
        FpmBatch.from_arrow(table)


def test_slices_and_selections_keep_iterations_whole():
    batch = FpmBatch.from_dicts([[DECODE, PREFILL], DECODE, [PREFILL], [DECODE, DECODE, PREFILL]])
    part = batch.take([3, 0])
    assert np.diff(part.iteration_offsets).tolist() == [3, 2]
    assert part.to_arrow()["past_kv_lengths"].to_pylist() == [None, None, [7], None, [7]]
    assert columns(batch[1:3]) == columns(FpmBatch.from_dicts([DECODE, [PREFILL]]))
    assert len(batch[2:2]) == 0


def test_indexing_by_a_number_is_refused_with_the_alternative():
    with pytest.raises(TypeError, match=r"slices of iterations such as batch\[10:20\]"):
        FpmBatch.from_dicts([DECODE])[0]


def test_columns_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        FpmBatch.from_dicts([DECODE]).sum_decode_kv_tokens[0] = 1


def test_workload_kinds_are_those_of_the_iteration():
    mixed = {"scheduled_requests": DECODE["scheduled_requests"] | PREFILL["scheduled_requests"]}
    mixed["scheduled_requests"] = {
        name: value for name, value in mixed["scheduled_requests"].items() if not name.endswith("lengths")
    }
    batch = FpmBatch.from_dicts([DECODE, PREFILL, [DECODE, PREFILL], mixed, {}, [{}, DECODE]])
    assert batch.workload_kind_names() == [
        "pure_decode",
        "pure_prefill",
        "cross_rank_aggregated",
        "contains_locally_mixed",
        None,
        "pure_decode",
    ]


@pytest.mark.parametrize(
    ("iterations", "error", "message"),
    [
        ([DECODE, {"version": 2}], MetricsError, "iteration 1: rank 0: version is not supported; expected 1"),
        ([DECODE, []], MetricsError, "iteration 1: an iteration needs at least one rank"),
        (
            [DECODE, {"scheduled_requests": {"sum_prefill_tokens": 5}}],
            MetricsError,
            "iteration 1: rank 0: .*num_pref",
        ),
        (
            [DECODE, {"wall_time": "x"}],
            MetricsError,
            "iteration 1: .*wall_time: expected a finite number, found 'x'",
        ),
        (
            [b"\x81\xa7version\x01", b"\x87"],
            FrameDecodeError,
            "iteration 1: .*1 bytes are not a forward-pass",
        ),
    ],
)
def test_a_bad_iteration_is_named(iterations, error, message):
    with pytest.raises(error, match=message):
        FpmBatch.from_dicts(iterations)


def test_wall_times_that_tuning_skips_are_kept_in_a_batch():
    values = [float("nan"), -1.0, 0.0, float("inf")]
    assert np.array_equal(
        FpmBatch.from_dicts([{"wall_time": value} for value in values]).wall_time_s, values, equal_nan=True
    )


def test_lists_travel_through_the_wire_form():
    scheduled = ScheduledRequestMetrics(num_decode_requests=1, extend_lengths=(1,), past_kv_lengths=(9,))
    batch = FpmBatch.from_frames([encode_frame(ForwardPassMetrics(scheduled_requests=scheduled))])
    assert batch.past_kv_lengths.tolist() == [9]


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))])
def test_a_batch_can_be_copied_and_sent_to_another_process(copier):
    batch = FpmBatch.from_dicts([[DECODE, PREFILL], DECODE])
    assert columns(copier(batch)) == columns(batch)
