"""What the compiled parts of a replay refuse to be put together from."""

import numpy as np
import pytest

from fpmsdk._ext.placement import KvAwarePlacement, Placement
from fpmsdk._ext.pricing import FixedTiming, PassPricer
from fpmsdk._ext.recorder import Recorder
from fpmsdk._ext.replay import Replay
from fpmsdk._ext.scheduler import Requests, Role, Scheduler
from fpmsdk._ext.speculation import DraftAcceptance
from fpmsdk._ext.workers import WorkerPool

N = 2


def requests_of(count=N):
    return Requests(np.full(count, 8), np.full(count, 2))


def scheduler(requests, role=Role.AGGREGATED):
    return Scheduler(requests, "vllm", num_gpu_blocks=65, block_size=4, role=role)


def pool(requests, recorder, *, num_workers=1, dp_size=1, schedulers=None):
    ranks = schedulers or [scheduler(requests) for _ in range(num_workers * dp_size)]
    pricer = PassPricer(FixedTiming(10.0, 1.0), True, 1.0, 1.0)
    return WorkerPool(ranks, pricer, Placement(num_workers, dp_size), recorder)


@pytest.mark.parametrize(("num_workers", "dp_size"), [(0, 1), (1, 0), (-1, 1)])
@pytest.mark.parametrize("kind", [Placement, lambda *sizes: KvAwarePlacement(*sizes, requests_of(), keys_of())])
def test_a_placement_has_workers_with_ranks(kind, num_workers, dp_size):
    with pytest.raises(ValueError, match=f"at least one rank, found {num_workers} of {dp_size}"):
        kind(num_workers, dp_size)


def keys_of():
    from fpmsdk._ext.pages import PrefixKeys

    return PrefixKeys(np.full(N, 8), np.full(N, 2), np.zeros(N + 1, np.int64), np.empty(0, np.int64), 4, 4)


@pytest.mark.parametrize(("num_workers", "dp_size", "found"), [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_a_pool_has_a_scheduler_per_rank(num_workers, dp_size, found):
    requests = requests_of()
    with pytest.raises(ValueError, match=f"{num_workers} workers of {dp_size} ranks, found {found}"):
        WorkerPool(
            [scheduler(requests) for _ in range(found)],
            PassPricer(FixedTiming(10.0, 1.0), True, 1.0, 1.0),
            Placement(num_workers, dp_size),
            Recorder(N, True),
        )


def test_the_schedulers_of_a_pool_serve_the_same_requests_in_one_role():
    requests, recorder = requests_of(), Recorder(N, True)
    with pytest.raises(ValueError, match="over the same requests"):
        pool(requests, recorder, num_workers=2, schedulers=[scheduler(requests), scheduler(requests_of())])
    with pytest.raises(ValueError, match="of one role"):
        pool(requests, recorder, num_workers=2, schedulers=[scheduler(requests), scheduler(requests, Role.DECODE)])
    with pytest.raises(TypeError):
        pool(requests, recorder, num_workers=2, schedulers=[scheduler(requests), None])


def test_a_recorder_has_room_for_all_requests():
    with pytest.raises(ValueError, match="a recorder of 2 requests, found 1"):
        pool(requests_of(), Recorder(1, True))


def replay(**changes):
    requests, recorder = requests_of(), Recorder(N, True)
    arguments = {
        "requests": requests,
        "recorder": recorder,
        "workers": pool(requests, recorder, dp_size=2),
        "arrival_ms": np.zeros(N),
        "next_turn": [-1, -1],
        "delay_ms": [0.0, 0.0],
    } | changes
    return Replay(**arguments)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recorder": Recorder(N, True)}, "workers that write to the recorder"),
        ({"requests": requests_of()}, "workers over the same requests"),
        ({"arrival_ms": np.zeros(1)}, "columns of 2 requests"),
        ({"next_turn": [-1]}, "columns of 2 requests"),
        ({"delay_ms": [0.0] * 3}, "columns of 2 requests"),
        ({"next_turn": [2, -1]}, "next turns among the requests"),
        ({"followers": ([0, 1], [1], [0, 1], [0, 0])}, "followers of 2 requests"),
        ({"followers": ([0, 1, 2], [1], [0, 1], [0, 0])}, "followers of 2 requests"),
        ({"followers": ([0, 1, 1], [1], [1, 0], [0, 0])}, "every request to wait for those that it follows"),
        ({"dp_rank": [0, 2]}, "2 attention-DP ranks below 2"),
        ({"dp_rank": [0]}, "2 attention-DP ranks below 2"),
    ],
)
def test_a_replay_is_put_together_from_parts_that_fit(changes, said):
    with pytest.raises(ValueError, match=said):
        replay(**changes)


def test_prefill_workers_fit_too():
    requests, recorder = requests_of(), Recorder(N, True)
    common = {"requests": requests, "recorder": recorder, "workers": pool(requests, recorder)}
    with pytest.raises(ValueError, match="workers that write to the recorder"):
        replay(**common, prefill=pool(requests, Recorder(N, True)))
    with pytest.raises(ValueError, match="workers over the same requests"):
        replay(**common, prefill=pool(requests_of(), recorder))
    with pytest.raises(ValueError, match="2 attention-DP ranks below 1"):
        replay(**common, prefill=pool(requests, recorder), prefill_dp_rank=[0, 1])


def test_parts_that_fit_serve_their_requests():
    ready = replay(dp_rank=[1, 1])
    ready.run()
    assert ready.recorder.column("worker").tolist() == [1, 1]
    assert ready.now_ms == 11.0


def test_at_most_five_draft_rates_are_taken():
    assert DraftAcceptance([0.5] * 5, 1).draft_tokens == 5
    with pytest.raises(ValueError, match="at most 5 acceptance rates, found 6"):
        DraftAcceptance([0.5] * 6, 1)
