from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from fpmsdk._ext.estimator import Estimator, ServingView

CLOCK_FIELDS: tuple[str, ...]

class LinearStore:
    @property
    def arrays(self) -> dict[str, NDArray[Any]]: ...
    def __init__(
        self,
        layout: Any,
        settings: Mapping[str, Any],
        sampling_axes: tuple[int, ...],
        bins: tuple[int, ...],
        max_observations: int,
    ) -> None: ...
    def saved(self) -> dict[str, Any]: ...
    def restore(self, saved: dict[str, NDArray[Any]]) -> None: ...

class LinearView(ServingView):
    @property
    def ready(self) -> bool: ...
    @property
    def retained_observations(self) -> int: ...
    def stores(self) -> list[tuple[str, bool, int]]: ...

class LinearRegression(Estimator):
    @property
    def serving(self) -> LinearView: ...
    def __init__(
        self,
        role: str,
        weights: tuple[float, float, float],
        axes: tuple[str, ...],
        num_fit_axes: int,
        new_store: Callable[[], LinearStore],
    ) -> None: ...
    def stores(self) -> dict[str, LinearStore]: ...
