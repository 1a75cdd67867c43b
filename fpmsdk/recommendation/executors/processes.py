"""Tasks in processes of their own, which are kept between tasks, killed when a task is late and replaced when they die.

A process is a new interpreter that imports the package and nothing of the calling program: no script needs a guard, no
fork copies a lock. Source: predict-recommend.md sections 6.5 and 11.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import fpmsdk
from fpmsdk.errors import StartTimeoutError
from fpmsdk.recommendation.executors.deadline import ATTEMPTS, CandidateTimeoutError, WorkerLostError
from fpmsdk.recommendation.executors.threads import cancel_waiting

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_Task = tuple["Future[Any]", bytes]

# The child imports the package that its parent runs, from the same folder.
_START = (
    "import sys; root = sys.argv[1]; sys.path.count(root) or sys.path.insert(0, root); "
    "from fpmsdk.recommendation.executors.child import main; main(sys.argv[2:])"
)
# A worker prices one candidate at a time; libraries of its own threads would only compete with its neighbours.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


class ProcessWorkers(Executor):
    """An executor of spawned processes.

    Parameters
    ----------
    workers: how many processes, at least 1; each starts with its first task.
    timeout_seconds: the longest time of a task in s; the process of a late one is killed.
    memory_limit_bytes: the address space a process may have; None for no limit.
    start_seconds: the longest time in s until a process is ready.

    Functions and arguments are pickled: functions by name, so that they must be importable; results likewise.

    >>> import os
    >>> with ProcessWorkers(1, timeout_seconds=60.0) as executor:
    ...     executor.submit(os.getpid).result() != os.getpid()
    True
    """

    def __init__(
        self,
        workers: int,
        *,
        timeout_seconds: float | None = None,
        memory_limit_bytes: int | None = None,
        start_seconds: float = 60.0,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._memory_limit_bytes = memory_limit_bytes
        self._start_seconds = start_seconds
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = False
        self._abandoned = False
        self._lock = threading.Lock()
        self._children: set[_Child] = set()
        self._threads = [
            threading.Thread(target=self._serve, name="fpmsdk-process", daemon=True) for _ in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        """Have a function called by the next free process."""
        if self._closed:
            raise RuntimeError("no task can be submitted after shutdown")
        future: Future[Result] = Future()
        self._tasks.put((future, pickle.dumps((fn, args, kwargs))))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks; with `cancel_futures` waiting ones are cancelled and running ones killed."""
        self._closed = True
        self._abandoned = cancel_futures
        if cancel_futures:
            cancel_waiting(self._tasks)
        for _ in self._threads:
            self._tasks.put(None)
        if cancel_futures:
            with self._lock:
                for child in self._children:
                    child.kill()
        if wait:
            for thread in self._threads:
                thread.join()

    def pids(self) -> list[int]:
        """Process ids of the workers that live now."""
        with self._lock:
            return sorted(child.process.pid for child in self._children)

    def _serve(self) -> None:
        child: _Child | None = None
        while (task := self._tasks.get()) is not None:
            future, payload = task
            if not future.set_running_or_notify_cancel():
                continue
            child = self._run(child, future, payload)
        if child is not None:
            self._end(child)

    def _run(self, child: _Child | None, future: Future[Any], payload: bytes) -> _Child | None:
        # The child for the next task, None where this one has used it up.
        deaths = []
        for _ in range(ATTEMPTS):
            try:
                child = child or self._begin()
                succeeded, answer = child.call(payload, self._timeout_seconds)
            except _DiedError:
                assert child is not None
                deaths.append(self._end(child))
                child = None
                if self._abandoned:
                    break
                continue
            except (CandidateTimeoutError, StartTimeoutError, OSError, RuntimeError) as fault:
                if child is not None:
                    self._end(child)
                future.set_exception(fault)
                return None
            if succeeded:
                future.set_result(answer)
            else:
                future.set_exception(answer)
            return child
        future.set_exception(WorkerLostError(f"its worker died {len(deaths)} times ({', '.join(deaths)})"))
        return None

    def _begin(self) -> _Child:
        child = _Child(self._memory_limit_bytes)
        with self._lock:
            self._children.add(child)
        try:
            child.wait_until_ready(self._start_seconds)
        except BaseException:
            self._end(child)
            raise
        return child

    def _end(self, child: _Child) -> str:
        # How it ended, in words.
        with self._lock:
            self._children.discard(child)
        child.kill()
        return child.ended()


class _DiedError(Exception):
    """The process of a child is gone."""


class _Child:
    """One worker process and the connection to it."""

    def __init__(self, memory_limit_bytes: int | None) -> None:
        self._connection, theirs = Pipe()
        root = str(Path(fpmsdk.__file__).parent.parent)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, root, str(theirs.fileno()), str(memory_limit_bytes or 0)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard output belongs to the result of the sweep
            env=os.environ | _ONE_THREAD,
        )
        theirs.close()

    def wait_until_ready(self, seconds: float) -> None:
        """Wait for the first word of the process."""
        if not self._connection.poll(seconds):
            raise StartTimeoutError(f"a worker process was not ready within {seconds:g} s")
        try:
            found = self._connection.recv_bytes().decode()
        except (EOFError, OSError):
            raise RuntimeError(f"a worker process did not start ({self.ended()}); see its message above") from None
        if found != fpmsdk.__version__:
            raise RuntimeError(f"a worker process imports fpmsdk {found}, this process {fpmsdk.__version__}")

    def call(self, payload: bytes, seconds: float | None) -> tuple[bool, Any]:
        """Whether the call that a payload describes returned, and what it returned or raised."""
        try:
            self._connection.send_bytes(payload)
            self._connection.recv_bytes()  # it has begun
            if not self._connection.poll(seconds):
                assert seconds is not None
                raise CandidateTimeoutError(seconds)
            succeeded, answer = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise _DiedError from None
        return succeeded, answer

    def kill(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()

    def ended(self) -> str:
        """Wait for the end of the process, and how it came."""
        status = self.process.wait()
        self._connection.close()
        return f"exit code {status}" if status >= 0 else signal.Signals(-status).name
