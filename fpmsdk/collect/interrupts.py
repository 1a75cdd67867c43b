"""SIGTERM as an interrupt, for work in the background that has something to clean up.

Source: collector.md section 2.2.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on SIGTERM while the block runs; in other threads than the main one nothing changes.

    >>> with sigterm_interrupts():
    ...     signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    False
    """
    # Work in the background is ended with SIGTERM, and is to clean up as after Ctrl-C.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
