from collections.abc import Mapping
from typing import Any

from fpmsdk._ext.regression import RegressionStore, StoreView

CLOCK_FIELDS: tuple[str, ...]

class LinearView(StoreView): ...

class LinearStore(RegressionStore):
    def __init__(
        self,
        layout: Any,
        settings: Mapping[str, Any],
        sampling_axes: tuple[int, ...],
        bins: tuple[int, ...],
        max_observations: int,
    ) -> None: ...
