"""An executor by its name, for as long as a sweep needs it.

Source: predict-recommend.md sections 8.1, 11 and 17.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from msgspec import Struct

from fpmsdk.errors import OnboardError
from fpmsdk.recommendation.executors.threads import ThreadWorkers

KINDS = ("threads", "processes", "dask")


class Workers(Struct, frozen=True):
    """An executor, and how many tasks it runs at once.

    >>> with open_workers("threads", 2) as workers:
    ...     workers.capacity, workers.executor.submit(abs, -3).result()
    (2, 3)
    """

    executor: Executor
    capacity: int
    kind: str


@contextmanager
def open_workers(
    kind: str,
    workers: int,
    *,
    scheduler: str | None = None,
    timeout_seconds: float | None = None,
    memory_limit_bytes: int | None = None,
    start_seconds: float = 60.0,
) -> Iterator[Workers]:
    """Workers of a kind; when the block ends by an exception, what still waits is dropped.

    Parameters
    ----------
    kind: `threads`, `processes` or `dask`.
    workers: how many threads or processes; a cluster has its own.
    scheduler: address of the Dask scheduler.
    timeout_seconds: the longest time of a task in s. A process that is late is killed; a late thread is left to itself.
    memory_limit_bytes: the address space of a process.
    start_seconds: the longest time in s until a process or cluster is ready.

    Raises
    ------
    OnboardError: no such kind, or no such cluster.

    Source: predict-recommend.md sections 11 and 17.

    >>> with open_workers("threads", 1) as workers:
    ...     workers.executor.submit(max, 1, 2).result()
    2
    """
    if kind not in KINDS:
        raise OnboardError(f"--executor: found {kind!r}, accepted are {', '.join(KINDS)}", "--executor")
    if (kind == "dask") != (scheduler is not None):
        raise OnboardError("--executor dask and --scheduler ADDRESS belong together; give both or none", "--scheduler")
    if scheduler is not None:
        from fpmsdk.recommendation.executors.cluster import cluster_workers

        cluster = cluster_workers(scheduler, timeout_seconds=timeout_seconds, start_seconds=start_seconds)
        with cluster as (theirs, capacity), _ending(theirs):
            yield Workers(theirs, capacity, kind)
        return
    if kind == "threads":
        executor: Executor = ThreadWorkers(workers, timeout_seconds=timeout_seconds)
    else:
        from fpmsdk.recommendation.executors.processes import ProcessWorkers

        executor = ProcessWorkers(
            workers,
            timeout_seconds=timeout_seconds,
            memory_limit_bytes=memory_limit_bytes,
            start_seconds=start_seconds,
        )
    with _ending(executor):
        yield Workers(executor, workers, kind)


@contextmanager
def _ending(executor: Executor) -> Iterator[None]:
    try:
        yield
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()


def cpu_limit() -> int:
    """How many candidates are priced at once when nobody says: all cores of this process but one, at least 1.

    >>> cpu_limit() >= 1
    True
    """
    return max(1, len(os.sched_getaffinity(0)) - 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 2) - 1)
