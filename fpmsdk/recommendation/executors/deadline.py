"""How a task ends that takes too long or loses its worker, and a bound on the time of a call in this process.

Source: predict-recommend.md section 6.5 (runtime_timeout) and section 17 (a lost worker).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from fpmsdk.errors import CollectionError

Result = TypeVar("Result")

# How often a task is given to a worker before its loss is the answer.
ATTEMPTS = 3


class CandidateTimeoutError(CollectionError):
    """A task did not end within the time that one candidate may take."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"did not end within {seconds:g} s (optimizer.candidate_timeout_seconds)")
        self.seconds = seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.seconds,)


class WorkerLostError(CollectionError):
    """The worker of a task died every time the task was tried."""


def within(seconds: float | None, call: Callable[..., Result], *arguments: Any) -> Result:
    """The result of a call, if it comes in time; a call that is late goes on in a thread nobody waits for.

    Parameters
    ----------
    seconds: the longest wait in s; None for no bound.

    Raises
    ------
    CandidateTimeoutError: it did not come.
    Whatever the call raises.

    >>> within(5.0, sum, (1, 2))
    3
    """
    if seconds is None:
        return call(*arguments)
    answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((True, call(*arguments)))
        except BaseException as fault:
            answers.put((False, fault))

    threading.Thread(target=run, name="fpmsdk-candidate", daemon=True).start()
    try:
        succeeded, answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise CandidateTimeoutError(seconds) from None
    if not succeeded:
        raise answer
    result: Result = answer
    return result
