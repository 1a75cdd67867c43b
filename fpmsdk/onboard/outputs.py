"""Where assessments are written: fresh directories apart from everything they rest on.

Source: onboarding.md sections 0 and 8.2.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fpmsdk.errors import OnboardError


def fresh_directory(output: str | os.PathLike[str], inputs: Iterable[str | os.PathLike[str]], option: str) -> Path:
    """Make the directory of an assessment.

    Parameters
    ----------
    output: where nothing is yet, or an empty directory.
    inputs: files and directories that are read; the output may be none of them, hold none of them and lie in none.
    option: what names the output, for messages.

    Returns
    -------
    Path: absolute, without links.

    Raises
    ------
    OnboardError: a symbolic link, something is there, or the output is not apart from an input. Nothing is made then.
    OSError: it cannot be made.

    >>> import tempfile
    >>> fresh_directory(Path(tempfile.mkdtemp()) / "quality", [], "--validation-output-dir").name
    'quality'
    """
    place = Path(output).expanduser()
    if place.is_symlink():
        raise OnboardError(f"{option} {place}: is a symbolic link; name the directory itself", option)
    place = place.resolve()
    require_apart(place, inputs, option)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise OnboardError(f"{option} {place}: is not empty; resume what is there, or name a fresh directory", option)
    place.mkdir(parents=True, exist_ok=True)
    return place


def require_apart(output: Path, inputs: Iterable[str | os.PathLike[str]], option: str) -> None:
    """Raise `OnboardError` when an absolute directory is, holds, or lies in one of some files and directories."""
    for given in inputs:
        source = Path(given).expanduser().resolve()
        if output == source or output in source.parents or source in output.parents:
            raise OnboardError(f"{option} {output}: must be apart from {source}, which is read; choose another", option)
