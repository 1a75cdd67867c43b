from collections.abc import Iterable
from typing import Any

class PassRoofline:
    names: tuple[str, ...]
    def __init__(self, records: Iterable[dict[str, Any]]) -> None: ...
    def at(self, batch: float, seq_len: float, prefix: float, tokens: float) -> float: ...
