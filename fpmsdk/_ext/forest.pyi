from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

class Forest:
    def __init__(
        self,
        baseline: float,
        log_target: bool,
        root: NDArray[np.int32],
        feature: NDArray[np.int16],
        threshold: NDArray[np.float64],
        left: NDArray[np.int32],
        right: NDArray[np.int32],
        value: NDArray[np.float64],
        missing_left: NDArray[np.uint8],
    ) -> None: ...
    @property
    def baseline(self) -> float: ...
    @property
    def log_target(self) -> bool: ...
    @property
    def num_trees(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    def features_read(self) -> list[int]: ...
    def predict(self, features: Sequence[float] | NDArray[np.float64]) -> float: ...
    def predict_rows(self, rows: NDArray[np.float64]) -> NDArray[np.float64]: ...
