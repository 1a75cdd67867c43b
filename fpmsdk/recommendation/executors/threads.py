"""Tasks in threads of this process, which end with it whatever a task still does.

Source: predict-recommend.md section 11 (in-process by default).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from fpmsdk.recommendation.executors.deadline import within

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_Task = tuple["Future[Any]", Callable[[], Any]]


class ThreadWorkers(Executor):
    """An executor of daemon threads: those of the standard library keep an interpreter alive until the last task ends.

    Parameters
    ----------
    workers: how many threads, at least 1.
    timeout_seconds: the longest time of a task in s; the thread of a late one is left to itself.

    >>> with ThreadWorkers(2, timeout_seconds=10.0) as executor:
    ...     executor.submit(pow, 2, 5).result()
    32
    """

    def __init__(self, workers: int, *, timeout_seconds: float | None = None) -> None:
        self._timeout_seconds = timeout_seconds
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"fpmsdk-worker-{index}", daemon=True) for index in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        """Have a function called by the next free thread."""
        if self._closed:
            raise RuntimeError("no task can be submitted after shutdown")
        future: Future[Result] = Future()
        self._tasks.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks; with `cancel_futures` those that no thread has begun are cancelled."""
        self._closed = True
        if cancel_futures:
            cancel_waiting(self._tasks)
        for _ in self._threads:
            self._tasks.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(within(self._timeout_seconds, call))
            except BaseException as fault:
                future.set_exception(fault)


def cancel_waiting(tasks: queue.SimpleQueue[Any]) -> None:
    """Cancel the futures of the tasks (future first) that still wait in a queue."""
    while True:
        try:
            task = tasks.get_nowait()
        except queue.Empty:
            return
        if task is not None:
            task[0].cancel()
            task[0].set_running_or_notify_cancel()  # tells whoever waits for it
