from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

DEPTH_LIMIT: int
NODE_TYPES: dict[str, type]

class OnlineTrees:
    @property
    def baseline(self) -> float: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def num_trees(self) -> int: ...
    @property
    def history_rows(self) -> int: ...
    def __init__(
        self,
        columns: NDArray[Any],
        column_of: NDArray[Any],
        num_bins: NDArray[Any],
        group_rows: NDArray[Any],
        group_sum: NDArray[Any],
        tree_slots: NDArray[Any],
        tree_nodes: NDArray[Any],
        nodes: Mapping[str, NDArray[Any]],
        controls: Mapping[str, Any],
    ) -> None: ...
    def leaf_rows(self) -> tuple[NDArray[Any], NDArray[Any]]: ...
    def node_arrays(self) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]: ...
    def arrays(self) -> list[NDArray[Any]]: ...
