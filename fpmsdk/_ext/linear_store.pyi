from collections.abc import Mapping
from typing import Any

from fpmsdk._ext.regression import StoreView
from fpmsdk._ext.row_store import RowStore

CLOCK_FIELDS: tuple[str, ...]

class LinearView(StoreView): ...

class LinearStore(RowStore):
    def __init__(
        self,
        layout: Any,
        settings: Mapping[str, Any],
        sampling_axes: tuple[int, ...],
        bins: tuple[int, ...],
        max_observations: int,
    ) -> None: ...
