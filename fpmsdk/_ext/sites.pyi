from typing import Any

from numpy.typing import NDArray

class GemmTable:
    def __init__(
        self,
        n: NDArray[Any],
        k: NDArray[Any],
        first: NDArray[Any],
        m: NDArray[Any],
        latency_ms: NDArray[Any],
        power_w: NDArray[Any] | None,
        flops_per_s: float,
        bytes_per_element: float,
        mem_bw_bytes_per_s: float,
    ) -> None: ...
    def point(self, entry: int) -> tuple[tuple[float, float, float], float]: ...
    def without(self, entry: int, whole_site: bool) -> GemmTable: ...

class GemmSite:
    @property
    def table(self) -> GemmTable: ...
    def __init__(self, table: GemmTable, n: float, k: float) -> None: ...
    def ask(self, m: float) -> tuple[float, float] | None: ...
    def support(self, m: float) -> tuple[str, dict[int, float]] | None: ...
    def neighbours(self, m: float, count: int) -> list[int]: ...
