"""How long a simulation may take to begin.

Source: predict-recommend.md sections 1.3 and 11.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fpmsdk.errors import StartTimeoutError


@contextmanager
def start_deadline(seconds: float) -> Iterator[None]:
    """Give up what has not begun in time: models that load, traces that are read.

    Only the main thread can be interrupted so; in another one, and where a timer of the process is in use already,
    nothing is watched.

    Parameters
    ----------
    seconds: the longest time, `execution.resources.initialization_timeout_seconds`.

    Raises
    ------
    StartTimeoutError: the time is over.

    >>> with start_deadline(60.0):
    ...     pass
    """
    watches = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    if not watches or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def over(_number: int, _frame: FrameType | None) -> None:
        raise StartTimeoutError(
            f"the simulation had not begun after {seconds:g} s; raise "
            "execution.resources.initialization_timeout_seconds, or look at what is slow to read"
        )

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
