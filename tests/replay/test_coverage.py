import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from fpmsdk import Trace, replay_trace
from fpmsdk._ext.pricing import PassPricer, price_pass
from fpmsdk.errors import FpmUncoveredError
from fpmsdk.replay.coverage import coverage_on_failure, replay_coverage, write_coverage
from tests.perfdb.pairs import decode, prefill
from tests.perfdb.synthetic import Systems
from tests.perfmodel.deployments import IN_MEMORY, checkpoint, profile
from tests.perfmodel.test_wholeforward import model_of

ROWS = [
    *(prefill(1, tokens, 0, tokens / 10) for tokens in (1, 64)),
    *(decode(1, kv, 3.0 + kv / 100) for kv in (1, 128)),
]
LAUNCH = {"engine": {"num_gpu_blocks": 64, "block_size": 16, "timing_model": {"type": "polynomial"}}}


@pytest.fixture
def place(tmp_path):
    Systems(tmp_path / "systems").hardware()
    checkpoint(tmp_path / "model")
    return tmp_path


def priced(place, **changes):
    return model_of(place, ROWS, fpm_profile=profile(place / "model", IN_MEMORY), **changes)


def collecting(place, **changes):
    return priced(place, interpolation={"collect_coverage": True}, **changes)


def test_a_covered_replay_tells_how_its_passes_were_priced(place):
    report = replay_trace(Trace.from_arrays([0.0], [32], [4]), launch=LAUNCH, timing=collecting(place))
    coverage = report.fpm_query_coverage
    assert (coverage["status"], coverage["replay_completed"]) == ("covered", True)
    assert coverage["queries"]["unsupported"] == 0
    assert coverage["roles"][0]["worker_type"] == "aggregated"
    assert coverage["roles"][0]["coverage"]["prefill"]["interpolated"] == 1
    assert json.loads(report.to_json())["fpm_query_coverage"] == coverage


def test_prefill_and_decode_workers_with_timings_of_their_own_are_roles_of_their_own(place):
    decoder = collecting(place, worker_type="decode")
    prefiller = collecting(place, worker_type="prefill")
    report = replay_trace(
        Trace.from_arrays([0.0], [32], [4]),
        launch={"engine": LAUNCH["engine"] | {"worker_type": "decode"}},
        prefill_launch={"engine": LAUNCH["engine"] | {"worker_type": "prefill"}},
        timing=decoder,
        prefill_timing=prefiller,
    )
    coverage = report.fpm_query_coverage
    assert [role["worker_type"] for role in coverage["roles"]] == ["prefill", "decode"]
    prefill_role, decode_role = (role["coverage"] for role in coverage["roles"])
    assert sum(prefill_role["prefill"].values()) == 1 and sum(prefill_role["decode"].values()) == 0
    assert sum(decode_role["prefill"].values()) == 0 and sum(decode_role["decode"].values()) == 4
    assert sum(coverage["queries"].values()) == 5


def test_replays_in_several_threads_lose_no_count(place):
    model = collecting(place)
    trace = Trace.from_arrays([0.0] * 40, [32] * 40, [16] * 40)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: replay_trace(trace, launch=LAUNCH, timing=model, concurrency=1), range(8)))
    counts = model.fpm_query_coverage()
    # A prefill pass and 15 decode passes a request.
    assert sum(counts["prefill"].values()) == 8 * 40
    assert sum(counts["decode"].values()) == 8 * 40 * 15
    assert counts["queries"]["unsupported"] == 0


def test_a_replay_without_collection_says_nothing(place):
    report = replay_trace(Trace.from_arrays([0.0], [32], [4]), launch=LAUNCH, timing=priced(place))
    assert report.fpm_query_coverage is None
    assert "fpm_query_coverage" not in json.loads(report.to_json())


def test_a_missing_timing_stops_the_replay_with_the_coverage_attached(place):
    with pytest.raises(FpmUncoveredError) as caught:
        replay_trace(Trace.from_arrays([0.0], [100], [4]), launch=LAUNCH, timing=collecting(place))
    coverage = json.loads(caught.value.fpm_query_coverage)
    assert (coverage["status"], coverage["replay_completed"]) == ("incomplete", False)
    assert coverage["error"] == str(caught.value)
    assert coverage["queries"]["unsupported"] == 1
    assert write_coverage(place, caught.value.fpm_query_coverage).name == "fpm-coverage.json"
    assert json.loads((place / "fpm-coverage.json").read_text()) == coverage


def test_a_refused_mixed_pass_counts_once(place):
    model = collecting(place)
    pricer = PassPricer(model.timing_model(), True, 1.0, 1.0)
    with pytest.raises(FpmUncoveredError):
        price_pass(
            pricer,
            num_prefill=1,
            sum_prefill_end_tokens=100,
            num_decode=1,
            sum_decode_tokens=9,
            kv_capacity_tokens=1024,
        )
    coverage = model.fpm_query_coverage()
    assert coverage["queries"] == {"measured": 0, "interpolated": 0, "unsupported": 1}
    assert [gap["occurrences"] for gap in coverage["gaps"]] == [1]


COUNTERS = {"queries": {"measured": 2, "interpolated": 1, "unsupported": 0}}


@pytest.mark.parametrize(
    ("changes", "completed", "error", "status"),
    [
        ({}, True, None, "covered"),
        ({}, False, None, "incomplete"),
        ({}, True, "stopped", "incomplete"),
        ({"unsupported": 1}, True, None, "incomplete"),
        ({"measured": 0, "interpolated": 0}, True, None, "incomplete"),
    ],
)
def test_covered_means_completed_with_every_lookup_answered(changes, completed, error, status):
    counters = {"queries": COUNTERS["queries"] | changes}
    assert replay_coverage([("decode", counters)], completed=completed, error=error)["status"] == status


def test_roles_are_added_up():
    document = replay_coverage([("prefill", COUNTERS), ("decode", COUNTERS)], completed=True)
    assert document["queries"] == {"measured": 4, "interpolated": 2, "unsupported": 0}
    assert [role["worker_type"] for role in document["roles"]] == ["prefill", "decode"]


def test_the_file_of_an_earlier_run_is_removed(tmp_path):
    write_coverage(tmp_path, replay_coverage([("decode", COUNTERS)], completed=True))
    assert write_coverage(tmp_path, None) is None
    assert list(tmp_path.iterdir()) == []


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def test_finding_1_an_uncovered_query_is_told_once_and_its_cause_is_the_next_in_the_chain(place):
    with pytest.raises(FpmUncoveredError) as caught:
        replay_trace(Trace.from_arrays([0.0], [100], [4]), launch=LAUNCH, timing=collecting(place))
    errors = list(chain(caught.value))
    assert len({id(error) for error in errors}) == len(errors)
    assert len({str(error) for error in errors}) == len(errors)
    assert str(caught.value).count("is unsupported") <= 1


class Failing:
    """A timing whose replay fails; its counters can be read, are absent, or fail too."""

    def __init__(self, counters):
        self.counters = counters

    def fpm_query_coverage(self):
        if isinstance(self.counters, Exception):
            raise self.counters
        return self.counters

    def deployment_topology(self):
        return {"worker_type": "aggregated"}


@pytest.mark.parametrize(
    ("counters", "is_attached"), [(COUNTERS, True), (None, False), (OSError("coverage cannot be read"), False)]
)
def test_finding_2_the_error_of_a_replay_stays_primary_whatever_becomes_of_its_coverage(counters, is_attached):
    original = RuntimeError("the replay failed")
    with pytest.raises(RuntimeError) as caught, coverage_on_failure(Failing(counters)):
        raise original
    assert caught.value is original and original.args == ("the replay failed",)
    assert hasattr(original, "fpm_query_coverage") is is_attached
    if is_attached:
        assert json.loads(original.fpm_query_coverage)["error"] == "the replay failed"
