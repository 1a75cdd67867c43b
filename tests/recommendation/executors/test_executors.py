"""Executors of one machine: what every kind promises, and what only processes can."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError, wait

import pytest

from fpmsdk.errors import OnboardError, StartTimeoutError
from fpmsdk.recommendation.executors import CandidateTimeoutError, WorkerLostError, open_workers
from fpmsdk.recommendation.executors.processes import ProcessWorkers

LOCAL = ["threads", "processes"]


@pytest.mark.parametrize("kind", LOCAL)
def test_results_belong_to_their_tasks(kind):
    with open_workers(kind, 2, timeout_seconds=60.0) as workers:
        futures = [workers.executor.submit(pow, 2, power) for power in range(20)]
        assert [future.result() for future in futures] == [2**power for power in range(20)]


@pytest.mark.parametrize("kind", LOCAL)
def test_what_a_task_raises_comes_back_and_the_worker_goes_on(kind):
    with open_workers(kind, 1) as workers:
        with pytest.raises(ZeroDivisionError, match="by zero"):
            workers.executor.submit(divmod, 1, 0).result()
        assert workers.executor.submit(abs, -4).result() == 4


@pytest.mark.parametrize("kind", LOCAL)
def test_a_late_task_times_out_and_the_next_one_runs(kind):
    with open_workers(kind, 1, timeout_seconds=0.5) as workers:
        late = workers.executor.submit(time.sleep, 30)
        with pytest.raises(CandidateTimeoutError, match=r"did not end within 0.5 s \(optimizer.candidate_timeout"):
            late.result()
        assert workers.executor.submit(abs, -4).result() == 4


@pytest.mark.parametrize("kind", LOCAL)
def test_an_exception_in_the_block_drops_what_waits(kind):
    with pytest.raises(KeyboardInterrupt), open_workers(kind, 1) as workers:
        running = workers.executor.submit(time.sleep, 30)
        waiting = [workers.executor.submit(abs, -4) for _ in range(5)]
        while not running.running():
            time.sleep(0.01)
        raise KeyboardInterrupt
    wait(waiting, timeout=10)
    with pytest.raises(CancelledError):
        waiting[-1].result(timeout=0)


@pytest.mark.parametrize("kind", LOCAL)
def test_nothing_is_taken_after_the_end(kind):
    with open_workers(kind, 1) as workers:
        pass
    with pytest.raises(RuntimeError, match="after shutdown"):
        workers.executor.submit(abs, -4)


def test_a_late_process_is_killed():
    with ProcessWorkers(1, timeout_seconds=1.0) as executor:
        pid = executor.submit(os.getpid).result()
        with pytest.raises(CandidateTimeoutError):
            executor.submit(time.sleep, 30).result()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_processes_are_kept_between_tasks():
    with ProcessWorkers(1) as executor:
        assert len({executor.submit(os.getpid).result() for _ in range(3)}) == 1


def test_the_task_of_a_killed_process_is_given_to_a_new_one():
    with ProcessWorkers(1) as executor:
        first = executor.submit(os.getpid).result()
        future = executor.submit(time.sleep, 1.0)
        while not future.running():
            time.sleep(0.01)
        os.kill(first, signal.SIGKILL)
        assert future.result() is None
        assert executor.submit(os.getpid).result() != first


def test_a_task_that_kills_every_worker_is_lost_and_says_how():
    with ProcessWorkers(1) as executor:
        with pytest.raises(WorkerLostError, match=r"died 3 times \(exit code 7, exit code 7, exit code 7\)"):
            executor.submit(os._exit, 7).result()
        assert executor.submit(abs, -4).result() == 4


def test_a_process_cannot_have_more_memory_than_its_limit():
    with ProcessWorkers(1, memory_limit_bytes=2 * 2**30) as executor:
        with pytest.raises(MemoryError):
            executor.submit(bytearray, 3 * 2**30).result()
        assert executor.submit(abs, -4).result() == 4


def test_a_process_that_does_not_come_up_in_time_is_an_error():
    with ProcessWorkers(1, start_seconds=0.0) as executor, pytest.raises(StartTimeoutError, match="within 0 s"):
        executor.submit(abs, -4).result()


def test_processes_need_no_guard_in_the_calling_script(tmp_path):
    script = tmp_path / "sweep.py"
    script.write_text(
        "import os\nfrom fpmsdk.recommendation.executors import open_workers\n"
        "with open_workers('processes', 1) as workers:\n"
        "    print(workers.executor.submit(os.getpid).result() != os.getpid())\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_what_a_worker_prints_is_not_on_standard_output(capfd):
    with open_workers("processes", 1) as workers:
        workers.executor.submit(print, "noise").result()
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "noise\n")


REFUSED = [
    (("fork", 1), {}, "--executor: found 'fork', accepted are threads, processes, dask"),
    (("dask", 1), {}, "--executor dask and --scheduler ADDRESS belong together"),
    (("threads", 1), {"scheduler": "tcp://host:1"}, "--executor dask and --scheduler ADDRESS belong together"),
]


@pytest.mark.parametrize(("arguments", "options", "message"), REFUSED)
def test_executors_that_do_not_exist_are_refused(arguments, options, message):
    with pytest.raises(OnboardError, match=message), open_workers(*arguments, **options):
        pass
