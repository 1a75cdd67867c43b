from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

RESOLUTIONS: tuple[str, ...]

class GridTable:
    def __init__(
        self,
        axes: tuple[NDArray[Any], ...],
        latency_ms: NDArray[Any],
        power_w: NDArray[Any] | None,
        sqrt_axis: int,
    ) -> None: ...
    def query(self, coordinates: Sequence[float], roofline_ms: Callable[..., float]) -> tuple[float, float] | None: ...
    def columns(self) -> tuple[tuple[NDArray[Any], ...], NDArray[Any]]: ...
    def support(
        self, coordinates: Sequence[float], roofline_ms: Callable[..., float]
    ) -> tuple[str, dict[int, float]] | None: ...
    def without(self, row: int, axis: int) -> GridTable: ...
