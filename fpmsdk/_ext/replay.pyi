from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fpmsdk._ext.pricing import PassPricer
from fpmsdk._ext.scheduler import Scheduler

class Rows:
    def array(self) -> NDArray[np.void]: ...

class Recorder:
    @property
    def passes(self) -> Rows: ...
    @property
    def gaps(self) -> Rows: ...
    @property
    def admissions(self) -> Rows: ...
    @property
    def committed_prefill_tokens(self) -> int: ...
    def column(self, name: str) -> NDArray[Any]: ...

class Replay:
    @property
    def recorder(self) -> Recorder: ...
    @property
    def now_ms(self) -> float: ...
    def __init__(
        self,
        schedulers: list[Scheduler],
        pricer: PassPricer,
        *,
        dp_size: int,
        arrival_ms: NDArray[np.float64],
        next_turn: ArrayLike,
        delay_ms: ArrayLike,
        concurrency: int = 0,
        max_sim_time_ms: float = ...,
        record_passes: bool = True,
        request_ids: Sequence[str] | None = None,
    ) -> None: ...
    def run(self) -> None: ...
