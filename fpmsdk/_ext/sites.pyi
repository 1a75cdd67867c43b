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

class GemmSite:
    def __init__(self, table: GemmTable, n: float, k: float) -> None: ...
    def ask(self, m: float) -> tuple[float, float] | None: ...
