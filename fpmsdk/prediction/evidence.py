"""What a run leaves beside its result: its events, and what it took of the machine.

Source: predict-recommend.md section 9.1.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from fpmsdk.files import whole_file
from fpmsdk.prediction.output import EVENTS, PLAN, RESOURCES
from fpmsdk.prediction.resources import MemoryPlan, peak_rss_bytes


class RunEvidence:
    """Evidence of one run in its output directory, written with the last word of `end`.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp())
    >>> RunEvidence(place, MemoryPlan(2, 4096, None, None)).end("completed", 0)
    >>> json.loads((place / "resource-runtime.json").read_text())["status"]
    'completed'
    """

    def __init__(self, folder: Path, plan: MemoryPlan) -> None:
        self._folder = folder
        self._plan = plan
        self._started = time.monotonic()
        self._events: list[dict[str, Any]] = []
        self.tell("resource_plan", **plan.document())

    def tell(self, event: str, **fields: Any) -> None:
        """Keep an event with the seconds since the run began."""
        self._events.append({"event": event, "elapsed_seconds": time.monotonic() - self._started, **fields})

    def refuse(self, exit_code: int) -> None:
        """End a run that may not begin, with its plan in a file of its own."""
        _write(self._folder / PLAN, self._plan.document())
        self.end("refused", exit_code)

    def end(self, status: str, exit_code: int) -> None:
        """Write the evidence."""
        self.tell("ended", status=status, exit_code=exit_code)
        with whole_file(self._folder / EVENTS) as file:
            file.writelines(json.dumps(event, separators=(",", ":")).encode() + b"\n" for event in self._events)
        _write(
            self._folder / RESOURCES,
            {
                "status": status,
                "exit_code": exit_code,
                "memory_limit_bytes": self._plan.limit_bytes,
                "peak_rss_bytes": peak_rss_bytes(),
                "wall_seconds": time.monotonic() - self._started,
            },
        )


def _write(path: Path, document: dict[str, Any]) -> None:
    with whole_file(path) as file:
        file.write((json.dumps(document, indent=2, sort_keys=True) + "\n").encode())
