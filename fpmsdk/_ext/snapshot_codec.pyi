from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

class SlotRows:
    def __init__(self, array: NDArray[Any], slots: NDArray[Any]) -> None: ...
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]: ...

class LayoutCodec:
    def __init__(self, layout: Any) -> None: ...
    @property
    def layout(self) -> Any: ...

def encode(
    parts: list[tuple[int, int, LayoutCodec, dict[str, Any]]], encoded: Callable[[memoryview], object] | None = None
) -> memoryview: ...
def decode(
    content: bytes | bytearray | memoryview, codecs: dict[int, LayoutCodec]
) -> list[tuple[int, int, Arrays]]: ...
