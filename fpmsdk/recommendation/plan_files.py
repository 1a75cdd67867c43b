"""Where a collection plan is in a folder of results, and how it goes from there.

Source: predict-recommend.md sections 5.4 and 9.4.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

PLAN, FOLDER = "missing-points.json", "missing-points"
_WRITTEN = re.compile(r"[0-9]{4}(-profile)?\.json")


def remove_collect_plan(folder: str | os.PathLike[str]) -> None:
    """Remove an earlier plan; what was collected by it, and everything else, stays.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp())
    >>> (place / FOLDER / "collected-0").mkdir(parents=True)
    >>> for name in (PLAN, f"{FOLDER}/0001.json"):
    ...     _ = (place / name).write_text("{}")
    >>> remove_collect_plan(place)
    >>> sorted(path.name for path in place.rglob("*"))
    ['collected-0', 'missing-points']
    """
    place = Path(folder)
    (place / PLAN).unlink(missing_ok=True)
    inside = place / FOLDER
    if not inside.is_dir() or inside.is_symlink():
        return
    for path in inside.iterdir():
        if _WRITTEN.fullmatch(path.name):
            path.unlink()
    if not any(inside.iterdir()):
        inside.rmdir()
