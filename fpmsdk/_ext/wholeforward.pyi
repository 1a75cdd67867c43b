from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.native import NativeEngine
from fpmsdk._ext.passroofline import PassRoofline

RESOLUTIONS: tuple[str, ...]
STATUSES: tuple[str, ...]

Coordinates = tuple[float, float | None, float]
Told = tuple[float, str, list[tuple[Coordinates, float, float]]]
Answer = tuple[str, float | None, str | None, list[tuple[Coordinates, float, float]]]
DescribeMiss = Callable[..., Exception]

class CurveSet:
    def __init__(
        self,
        batch: NDArray[np.float64],
        second: NDArray[np.float64],
        first: NDArray[np.int64],
        x: NDArray[np.float64],
        latency_ms: NDArray[np.float64],
        batches: NDArray[np.float64],
        batch_first: NDArray[np.int64],
        x_knees: tuple[tuple[int, ...], bool] = ...,
        second_knees: tuple[tuple[int, ...], bool] = ...,
    ) -> None: ...

class AnswerCounts:
    def read(self) -> dict[str, dict[str, int]]: ...

class WholeForwardEngine(NativeEngine):
    coverage: Any
    def evidence_of(
        self, num_prefill: int, prefill_tokens: int, prefill_kv: int, num_decode: int, decode_kv: int
    ) -> tuple[Told | None, Told | None, Told | None]: ...
    def prefill_query(self, batch: float, tokens: float, kv: float) -> Answer: ...
    def decode_query(self, batch: float, kv: float) -> Answer: ...
    def baseline_query(self, batch: float, kv: float) -> Answer: ...
    def prefill_latency(self, batch: int, tokens: int, kv: int) -> float: ...
    def baseline_latency(self, batch: int, kv: int) -> float: ...
    def decode_latency(self, batch: int, kv: int) -> float: ...

class DirectEngine(WholeForwardEngine):
    def __init__(
        self,
        prefill_curves: CurveSet,
        prefill_over_kv: CurveSet,
        decode_curves: CurveSet,
        rungs: NDArray[np.float64],
        describe_miss: DescribeMiss,
        coverage: Any = None,
        continuous: bool = False,
    ) -> None: ...

class SolAssistedEngine(WholeForwardEngine):
    def __init__(
        self,
        prefill_curves: CurveSet,
        decode_curves: CurveSet,
        rungs: NDArray[np.float64],
        batch_limit: float | None,
        prefill_sol: PassRoofline,
        decode_sol: PassRoofline,
        describe_miss: DescribeMiss,
        coverage: Any = None,
        continuous: bool = False,
    ) -> None: ...
