from collections.abc import Mapping
from typing import Any

class ErrorMonitor:
    def __init__(self, settings: Mapping[str, Any] | None, tolerance: str) -> None: ...
