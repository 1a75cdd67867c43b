"""The output directory of a prediction: what may be in it before the run, and what an earlier run left.

Source: predict-recommend.md section 9.4.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from fpmsdk.errors import OnboardError

REPORT, REQUESTS, COVERAGE = "prediction.json", "requests.jsonl", "fpm-coverage.json"
EVENTS, RESOURCES, PLAN = "execution-events.jsonl", "resource-runtime.json", "resource-plan.json"
# What predict and recommend write; an output directory is cleared of these alone.
KNOWN_FILES = (
    REPORT,
    COVERAGE,
    REQUESTS,
    EVENTS,
    RESOURCES,
    PLAN,
    "recommendation.json",
    "recommendation.csv",
    "recommendation.parquet",
    "candidates.jsonl",
)
_RECOMMENDATIONS, _CONFIGURATION = "recommendations", re.compile(r"[0-9]{4}\.yaml")


def prepare_output(folder: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Make the output directory, or clear the files of an earlier prediction from it; other files stay.

    Parameters
    ----------
    overwrite: whether the directory may have something in it.

    Raises
    ------
    OnboardError: something else than a directory is there, or it is not empty and `overwrite` is off.
    OSError: it cannot be made or cleared.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp())
    >>> _ = (place / "prediction.json").write_text("{}")
    >>> prepare_output(place, overwrite=True).is_dir(), list(place.iterdir())
    (True, [])
    """
    path = Path(folder)
    if os.path.lexists(path) and not path.is_dir():
        raise OnboardError(f"{path}: the output directory is no directory; name another", str(path))
    if path.is_dir() and not overwrite and any(path.iterdir()):
        raise OnboardError(f"{path}: the output directory is not empty; pass --overwrite, or name another", str(path))
    path.mkdir(parents=True, exist_ok=True)
    for name in KNOWN_FILES:
        (path / name).unlink(missing_ok=True)  # a link is removed, never followed
    written = path / _RECOMMENDATIONS
    if written.is_dir() and not written.is_symlink():
        for file in written.iterdir():
            if _CONFIGURATION.fullmatch(file.name):
                file.unlink()
    return path
