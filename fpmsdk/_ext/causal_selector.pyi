from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from fpmsdk._ext.correction import CorrectionStore, CorrectionTable
from fpmsdk._ext.estimator import Estimator, ServingView
from fpmsdk._ext.learned import ForestSet
from fpmsdk._ext.learned_online import OnlineLearner

KEYS: tuple[tuple[str, str], ...]

class CausalView(ServingView):
    def calibrations(self) -> dict[tuple[str, str], CorrectionTable]: ...

class CausalEstimator(Estimator):
    @property
    def learner(self) -> OnlineLearner: ...
    @property
    def serving(self) -> CausalView: ...
    def __init__(
        self,
        stable: ForestSet,
        learner: OnlineLearner,
        calibrations: Mapping[tuple[str, str], CorrectionStore],
        selector: Mapping[str, Any],
        arrays: dict[str, NDArray[Any]],
    ) -> None: ...
    def stores(self) -> dict[tuple[str, str], CorrectionStore]: ...
    def flush(self) -> None: ...
    def states(self) -> list[dict[str, Any]]: ...
    def saved(self) -> dict[str, NDArray[Any]]: ...
    def restore(self, saved: dict[str, NDArray[Any]]) -> None: ...
