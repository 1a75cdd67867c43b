"""Where candidates are evaluated: threads of this process, processes that can be killed, or a Dask cluster.

Each is a `concurrent.futures.Executor` whose tasks are importable functions of plain data. A task that takes too long
fails with `CandidateTimeoutError`, one whose worker keeps dying with `WorkerLostError`; nothing else depends on which
executor it is. Source: predict-recommend.md sections 6.5, 11 and 17.
"""

from fpmsdk.recommendation.executors.deadline import CandidateTimeoutError, WorkerLostError
from fpmsdk.recommendation.executors.opening import KINDS, Workers, open_workers

__all__ = ["KINDS", "CandidateTimeoutError", "WorkerLostError", "Workers", "open_workers"]
