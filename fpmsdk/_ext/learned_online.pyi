from collections.abc import Iterable, Mapping

from fpmsdk._ext.estimator import Estimator, ServingView
from fpmsdk._ext.online import OnlineStore

LEARNER_CLOCKS: tuple[str, ...]

class OnlineLearner:
    def __init__(
        self,
        worker_type: str,
        features: Iterable[str],
        log_target: bool,
        stores: Mapping[str, OnlineStore],
        clocks: tuple[int, int],
    ) -> None: ...
    def trained(self) -> dict[str, OnlineStore]: ...
    def clocks(self) -> tuple[int, int]: ...
    def flush(self) -> None: ...

class OnlineView(ServingView): ...

class OnlineEstimator(Estimator):
    @property
    def learner(self) -> OnlineLearner: ...
    def __init__(self, learner: OnlineLearner) -> None: ...
    def flush(self) -> None: ...
