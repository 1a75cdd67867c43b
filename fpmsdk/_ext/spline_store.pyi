from collections.abc import Mapping
from typing import Any

from fpmsdk._ext.regression import StoreView
from fpmsdk._ext.row_store import RowStore

CLOCK_FIELDS: tuple[str, ...]
MAX_KNOTS: int
MAX_TERMS: int

class SplineView(StoreView): ...

class SplineStore(RowStore):
    def __init__(
        self, layout: Any, settings: Mapping[str, Any], bins: tuple[int, ...], max_observations: int
    ) -> None: ...
