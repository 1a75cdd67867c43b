from collections.abc import Mapping
from typing import Any

from fpmsdk._ext.regression import RegressionStore, StoreView

class AutomaticView(StoreView): ...

class AutomaticStore(RegressionStore):
    def __init__(self, layout: Any, settings: Mapping[str, Any], candidates: dict[str, RegressionStore]) -> None: ...
    @property
    def names(self) -> tuple[str, ...]: ...
