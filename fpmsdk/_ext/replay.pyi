from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fpmsdk._ext.recorder import Recorder
from fpmsdk._ext.scheduler import Requests
from fpmsdk._ext.workers import WorkerPool

class Happening(IntEnum):
    ARRIVED = 0
    EMITTED = 1
    SOURCE_HELD = 2
    DESTINATION_RESERVED = 3
    DESTINATION_ACTIVATED = 4
    SOURCE_RELEASED = 5
    ENDED = 6

class Supply(Protocol):
    def next_requests(self) -> Mapping[str, NDArray[Any]] | None: ...
    def placed(self, slots: NDArray[np.int64]) -> None: ...
    def ended(self, slots: NDArray[np.int64]) -> None: ...
    def gaps(self, rows: NDArray[np.void]) -> None: ...
    def counted(self) -> None: ...

class Replay:
    @property
    def recorder(self) -> Recorder: ...
    @property
    def now_ms(self) -> float: ...
    @property
    def interruptible(self) -> bool: ...
    def __init__(
        self,
        requests: Requests,
        recorder: Recorder,
        workers: WorkerPool,
        prefill: WorkerPool | None = None,
        *,
        transfer_bytes_per_token: float = 0.0,
        transfer_bytes_per_s: float = 0.0,
        handoff_ms: float = 0.0,
        transfers_missing_only: bool = False,
        arrival_ms: NDArray[np.float64],
        next_turn: ArrayLike,
        delay_ms: ArrayLike,
        followers: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike] | None = None,
        dp_rank: ArrayLike | None = None,
        prefill_dp_rank: ArrayLike | None = None,
        concurrency: int = 0,
        max_sim_time_ms: float = ...,
        sample_interval_ms: float = 0.0,
        request_ids: Sequence[str] | None = None,
        supply: Supply | None = None,
        ended_at_once: int = 2048,
    ) -> None: ...
    def run(self) -> None: ...
    def listen(self) -> None: ...
    def submit(self, rows: Mapping[str, NDArray[Any]], at_ms: float) -> NDArray[np.int64]: ...
    def cancel(self, request: int) -> None: ...
    def next_event_ms(self) -> float: ...
    def step(self) -> list[tuple[int, int, int]]: ...
    def taken_happenings(self) -> list[tuple[int, int, int]]: ...
