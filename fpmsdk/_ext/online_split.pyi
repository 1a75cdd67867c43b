from typing import Any

from numpy.typing import NDArray

def key_of_node(seed: int, store: int, tree: int, path: int, generation: int) -> int: ...

class SplitSearch:
    @property
    def num_candidates(self) -> int: ...
    @property
    def num_columns(self) -> int: ...
    def __init__(
        self,
        num_bins: NDArray[Any],
        column_of: NDArray[Any],
        l2: float,
        min_samples_leaf: int,
        sampling_rate: float,
    ) -> None: ...
    def drawn(self, key: int, kept: int) -> list[int]: ...
