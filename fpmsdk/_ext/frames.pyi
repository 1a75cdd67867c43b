from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

RANK_DTYPE: np.dtype[np.void]
COLUMNS: tuple[str, ...]

class IterationSource:
    @property
    def num_iterations(self) -> int: ...
    @property
    def max_ranks(self) -> int: ...

class Records(IterationSource): ...

class Columns(IterationSource):
    def __init__(self, arrays: dict[str, NDArray[Any]]) -> None: ...

def read_columns(source: Iterable[Any], decode_frame: Callable[[bytes], Any]) -> dict[str, NDArray[Any]]: ...
def workload_kinds(source: Columns) -> NDArray[np.int8]: ...
