from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.frames import Columns, IterationSource

class ServingView:
    def estimate_iteration(self, metrics: Any, decode_frame: Callable[[bytes], Any]) -> float | None: ...
    def estimate_columns(self, source: Columns) -> NDArray[np.float64]: ...

class Estimator:
    @property
    def serving(self) -> ServingView: ...
    def learn_from(self, source: IterationSource) -> None: ...
    def skipped_iterations(self) -> dict[str, int]: ...
