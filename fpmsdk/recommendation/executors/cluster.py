"""Tasks on the workers of a Dask cluster that somebody else runs.

Source: predict-recommend.md section 17.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from fpmsdk.errors import CollectionError, OnboardError, StartTimeoutError
from fpmsdk.recommendation.executors.deadline import WorkerLostError, within
from fpmsdk.version import __version__

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# How often the workers of the cluster are counted.
_LOOK_SECONDS = 0.5


@contextmanager
def cluster_workers(
    address: str, *, timeout_seconds: float | None = None, start_seconds: float = 60.0
) -> Iterator[tuple[Executor, int]]:
    """An executor of the cluster at an address, and how many tasks it runs at once.

    Parameters
    ----------
    address: of the Dask scheduler, such as `tcp://host:8786`.
    timeout_seconds: the longest time of a task in s.
    start_seconds: the longest wait in s for the scheduler and its first worker.

    Raises
    ------
    OnboardError: the library is not installed, or nobody answers at the address.
    StartTimeoutError: no worker came in time.
    CollectionError: a worker has another fpmsdk.
    """
    try:
        from distributed import Client
    except ImportError:
        raise OnboardError("--scheduler needs the Dask library; pip install 'fpmsdk[dask]'", "--scheduler") from None
    try:
        client = Client(address, timeout=start_seconds, set_as_default=False)
    except (OSError, ValueError) as fault:
        reason = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        raise OnboardError(f"--scheduler {address}: no Dask scheduler answers: {reason}", "--scheduler") from None
    with client:
        try:
            client.wait_for_workers(1, timeout=start_seconds)
        except TimeoutError:
            raise StartTimeoutError(f"{address}: no worker joined within {start_seconds:g} s; start one") from None
        _same_version(client, address)
        cluster = _Cluster(client, timeout_seconds)
        ended = threading.Event()
        threading.Thread(target=cluster.watch, args=(ended, address, start_seconds), daemon=True).start()
        try:
            yield cluster, max(1, sum(client.nthreads().values()))
        finally:
            ended.set()


class _Cluster(Executor):
    """The executor of a client, with what a task of ours ends as."""

    def __init__(self, client: Any, timeout_seconds: float | None) -> None:
        # The scheduler gives a task of a dead worker to another one by itself.
        self._executor = client.get_executor(pure=False)
        self._client = client
        self._timeout_seconds = timeout_seconds
        self._waiting: set[Future[Any]] = set()

    def submit(
        self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        theirs = self._executor.submit(remote, __version__, self._timeout_seconds, fn, args, kwargs)
        future: Future[Result] = Future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        theirs.add_done_callback(lambda done: _pass_on(done, future))
        return future

    def watch(self, ended: threading.Event, address: str, patience_seconds: float) -> None:
        """Fail what waits when there has been no worker for so long: nobody would ever answer."""
        last_seen = time.monotonic()
        while not ended.wait(_LOOK_SECONDS):
            if self._client.nthreads():
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > patience_seconds:
                for future in tuple(self._waiting):
                    message = (
                        f"{address}: no worker has been left for {patience_seconds:g} s; start some, then --resume"
                    )
                    with contextlib.suppress(InvalidStateError):
                        future.set_exception(CollectionError(message))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._executor.shutdown(wait=wait and not cancel_futures)


def _pass_on(theirs: Future[Any], future: Future[Any]) -> None:
    with contextlib.suppress(InvalidStateError):  # given up before
        if theirs.cancelled():
            future.cancel()
            future.set_running_or_notify_cancel()
        elif (fault := theirs.exception()) is None:
            future.set_result(theirs.result())
        elif type(fault).__name__ == "KilledWorker":
            future.set_exception(WorkerLostError("every worker of the cluster that took it up died"))
        else:
            future.set_exception(fault)


def remote(version: str, seconds: float | None, call: Callable[..., Any], arguments: Any, options: Any) -> Any:
    """The result of a call on a worker, which must have the version of whoever asks.

    >>> remote(__version__, None, sum, ([1, 2],), {})
    3
    """
    if version != __version__:
        raise CollectionError(f"a worker of the cluster has fpmsdk {__version__}, the sweep is of {version}")
    return within(seconds, lambda: call(*arguments, **options))


def _version() -> str:
    return __version__


def _same_version(client: Any, address: str) -> None:
    try:
        found = client.run(_version)
    except Exception as fault:
        reason = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        raise CollectionError(f"{address}: a worker cannot import fpmsdk {__version__}: {reason}") from None
    others = {worker: version for worker, version in found.items() if version != __version__}
    if others:
        listed = ", ".join(f"{worker} has {version}" for worker, version in sorted(others.items()))
        raise CollectionError(f"{address}: every worker needs fpmsdk {__version__}; {listed}")
