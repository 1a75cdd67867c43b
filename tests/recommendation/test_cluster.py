"""Sweeps on a real Dask cluster: the same result as in this process, also when workers are killed. `make test-dask`."""

import os
import signal
import threading
import time

import pytest

from fpmsdk.errors import CollectionError, EvidenceError, OnboardError, StartTimeoutError
from fpmsdk.recommendation import Options, planned, recommend
from fpmsdk.recommendation.executors import CandidateTimeoutError, open_workers
from fpmsdk.recommendation.inputs import inputs_of
from fpmsdk.recommendation.run import search
from fpmsdk.sample.quickstart import write_quickstart
from tests.recommendation import made_up

pytestmark = [pytest.mark.dask, pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def cluster():
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as made:
        yield made


@pytest.fixture(scope="module")
def options(cluster):
    return Options(executor="dask", scheduler=cluster.scheduler_address)


def workers(cluster):
    """Process ids of the workers that live now."""
    return [nanny.pid for nanny in cluster.workers.values() if nanny.pid is not None]


def test_a_made_up_sweep_is_the_same_as_in_threads(options, tmp_path):
    found, expected = made_up.run(tmp_path / "dask", options=options), made_up.run(tmp_path / "threads")
    assert made_up.ledger(found) == made_up.ledger(expected)
    assert made_up.written(tmp_path / "dask") == made_up.written(tmp_path / "threads")


def test_a_sweep_of_real_replays_is_the_same_as_in_threads_and_processes(options, tmp_path):
    config = write_quickstart(tmp_path)
    goal = "optimization={target: pareto, constraints: {max_candidate_gpus: 4}}"
    loads = "traffic.load.concurrency={choices: [1, 2, 4]}"
    ledgers = []
    for name, how in (("dask", options), ("threads", Options()), ("processes", Options("processes", 2))):
        found = recommend(config, tmp_path / name, options=how, overrides=[goal, loads])
        assert found.exit_code == 0
        ledgers.append((made_up.ledger(found), made_up.written(tmp_path / name)))
    assert ledgers[0] == ledgers[1] == ledgers[2]


@pytest.mark.parametrize("killed", [1, 2])
def test_workers_that_are_killed_in_the_middle_change_nothing(cluster, options, tmp_path, killed):
    journal = tmp_path / "dask/candidates.jsonl"
    victims = []

    def kill():
        while not journal.exists() or len(journal.read_bytes().splitlines()) < 6:
            time.sleep(0.01)
        for pid in workers(cluster)[:killed]:
            os.kill(pid, signal.SIGKILL)
            victims.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    found = made_up.run(tmp_path / "dask", options=options, happens={"seconds": 0.1})
    killer.join()
    assert len(victims) == killed
    expected = made_up.run(None)
    assert [(each.candidate_id, each.outcome) for each in found.result.candidates] == [
        (each.candidate_id, each.outcome) for each in expected.result.candidates
    ]


def test_a_cluster_that_loses_its_last_worker_ends_the_sweep_which_goes_on_elsewhere(tmp_path):
    from distributed import LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as made:
        options = Options(executor="dask", scheduler=made.scheduler_address)
        limits = {"config": {"execution": {"resources": {"initialization_timeout_seconds": 2.0}}}}
        journal = tmp_path / "output/candidates.jsonl"

        def stop():
            while not journal.exists() or len(journal.read_bytes().splitlines()) < 4:
                time.sleep(0.01)
            made.scale(0)

        stopper = threading.Thread(target=stop)
        stopper.start()
        with pytest.raises(CollectionError, match="no worker has been left for 2 s; start some, then --resume"):
            made_up.run(tmp_path / "output", options=options, happens={"seconds": 0.2}, **limits)
        stopper.join()
    found = made_up.run(tmp_path / "output", options=Options(resume=True), **limits)
    assert len(found.result.candidates) == 30


def test_a_late_candidate_is_timed_out(cluster):
    with open_workers("dask", 1, scheduler=cluster.scheduler_address, timeout_seconds=0.5) as opened:
        assert opened.capacity == 2
        with pytest.raises(CandidateTimeoutError, match="did not end within 0.5 s"):
            opened.executor.submit(time.sleep, 5).result()
        assert opened.executor.submit(abs, -4).result() == 4


def test_an_input_that_differs_on_a_worker_ends_the_sweep(options, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}")
    inputs = inputs_of([{"traffic": {"source": {"paths": [str(trace)]}}}])
    trace.write_text("{ }")
    config = write_quickstart(tmp_path)
    goal = "optimization={target: throughput, constraints: {max_candidate_gpus: 1}}"
    plan = planned(config, overrides=[goal])
    plan.inputs.update(inputs)
    with pytest.raises(EvidenceError, match=r"trace.jsonl: differs from what the sweep began with"):
        search(plan, tmp_path / "output", options)


def test_nobody_at_the_address_is_an_error_of_the_input(tmp_path):
    with (
        pytest.raises(OnboardError, match=r"--scheduler tcp://127.0.0.1:9: no Dask scheduler answers"),
        open_workers("dask", 1, scheduler="tcp://127.0.0.1:9", start_seconds=1.0),
    ):
        pass


def test_a_cluster_without_workers_is_an_error():
    from distributed import LocalCluster

    with (
        LocalCluster(n_workers=0, dashboard_address=None) as empty,
        pytest.raises(StartTimeoutError, match="no worker joined within 1 s; start one"),
        open_workers("dask", 1, scheduler=empty.scheduler_address, start_seconds=1.0),
    ):
        pass
