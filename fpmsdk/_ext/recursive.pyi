from collections.abc import Mapping
from typing import Any

from fpmsdk._ext.regression import RegressionStore, StoreView

WORK_AXES: tuple[str, ...]
CLOCK_FIELDS: tuple[str, ...]

class RecursiveView(StoreView): ...

class RecursiveStore(RegressionStore):
    def __init__(self, layout: Any, settings: Mapping[str, Any], min_observations: int, first_axis: int) -> None: ...
