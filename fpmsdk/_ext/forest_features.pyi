from collections.abc import Container, Iterable

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.frames import Columns

AGGREGATES: tuple[str, ...]
REQUESTS: tuple[str, ...]
SLOTS: tuple[str, ...]
NAMES: tuple[str, ...]

class FeatureProgram:
    def __init__(self, names: Iterable[str], read: Container[str] | None = None) -> None: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def num_features(self) -> int: ...
    @property
    def needs_requests(self) -> bool: ...
    def matrix(self, source: Columns) -> tuple[NDArray[np.float64], NDArray[np.bool_]]: ...
