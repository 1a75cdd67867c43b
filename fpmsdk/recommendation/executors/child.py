"""What a worker process does: calls what it is told, until nobody is at the other end.

Source: predict-recommend.md section 11.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from fpmsdk.version import __version__

# What is sent when a task has been read and begins.
BEGUN = b"begun"


def main(arguments: Sequence[str]) -> None:
    """Serve calls. `arguments`: the descriptor of the connection, and the limit of the address space in bytes or 0."""
    descriptor, memory_limit_bytes = (int(argument) for argument in arguments)
    # Ctrl-C reaches every process of a terminal; the parent decides what becomes of the work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if memory_limit_bytes:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, hard))
    with Connection(descriptor) as connection:
        connection.send_bytes(__version__.encode())
        while True:
            try:
                payload = connection.recv_bytes()
            except (EOFError, OSError):
                return
            try:
                call = pickle.loads(payload)  # imports what the function needs, which is not the time of a task
            except Exception as fault:
                call = (_raise, (RuntimeError(f"{type(fault).__name__}: {fault}"),), {})
            connection.send_bytes(BEGUN)
            connection.send_bytes(answer(*call))


def _raise(fault: Exception) -> None:
    raise fault


def answer(function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> bytes:
    """The pickled outcome of a call: (True, result) or (False, exception).

    >>> pickle.loads(answer(len, ([1, 2],), {}))
    (True, 2)
    """
    try:
        return pickle.dumps((True, function(*arguments, **options)))
    except Exception as fault:
        try:
            content = pickle.dumps((False, fault))
            pickle.loads(content)  # an exception may be picklable and no more than that
        except Exception:
            return pickle.dumps((False, RuntimeError(f"{type(fault).__name__}: {fault}")))
        return content
