"""Ctrl-C while a replay of a stream counts what came out: it waits, and is never lost.

Python calls a signal handler between any two steps of the main thread; what is added to several sums must not end half
way, nor be added again after it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


class CtrlC:
    """Stands before the handler of SIGINT as long as it is entered.

    Elsewhere than in the main thread, and where SIGINT is ignored, as in the background of a shell, it does nothing.

    Parameters
    ----------
    interruptible: whether the handler may be called now.

    Example
    -------
    >>> before = signal.signal(signal.SIGINT, lambda number, frame: print("pressed"))
    >>> with CtrlC(interruptible=lambda: False):
    ...     signal.raise_signal(signal.SIGINT)
    ...     print("counted whole")
    counted whole
    pressed
    >>> _ = signal.signal(signal.SIGINT, before)
    """

    def __init__(self, interruptible: Callable[[], bool]) -> None:
        self._interruptible = interruptible
        self._before: Callable[[int, FrameType | None], object] | None = None
        self._waits = False
        self._raised: BaseException | None = None

    def __enter__(self) -> CtrlC:
        """Take the place of the handler."""
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._before = handler
                signal.signal(signal.SIGINT, self._pressed)
        return self

    def look(self) -> None:
        """Do what a press that waits asks for, and raise what was raised where Python drops it: in a finalizer."""
        if self._raised is not None:
            raise self._raised
        if self._waits and self._before is not None:
            self._waits = False
            self._before(signal.SIGINT, None)

    def __exit__(self, _: object, raised: BaseException | None, __: object) -> None:
        """Give the place back; a press that waits comes now."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if raised is None or raised is not self._raised:
                self.look()

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if self._before is None or not self._interruptible():
            self._waits = True
            return
        try:
            self._before(number, frame)
        except BaseException as raised:
            self._raised = raised
            raise
