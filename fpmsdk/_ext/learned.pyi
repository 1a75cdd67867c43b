from collections.abc import Iterable, Mapping

from fpmsdk._ext.correction import CorrectionStore
from fpmsdk._ext.forest import Forest
from fpmsdk._ext.native import NativeEstimator, NativeView

class ForestSet:
    def __init__(self, worker_type: str, features: Iterable[str], forests: dict[str, Forest]) -> None: ...

class LearnedView(NativeView):
    @property
    def forests(self) -> ForestSet: ...

class LearnedEstimator(NativeEstimator):
    def __init__(self, forests: ForestSet, stores: Mapping[str, CorrectionStore] | None) -> None: ...
    @property
    def serving(self) -> LearnedView: ...
