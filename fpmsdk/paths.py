"""Where fpmsdk may write: the cache directory, and what happens when there is none.

Only decides on directories; what goes into them belongs to whoever caches. Importing this module touches
nothing.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path

CACHE_VARIABLE = "FPMSDK_CACHE_DIR"


@cache
def cache_dir() -> Path | None:
    """The directory for caches, created when absent; None when this process may write nowhere.

    Tries `FPMSDK_CACHE_DIR`, or without it the platform's user cache directory, then a directory of this user
    below the system's temporary one. Nothing but speed depends on the answer.

    Returns
    -------
    A writable directory, the same one for the life of the process.

    Warns
    -----
    RuntimeWarning: once, when the first choice is not usable.
    """
    refused = ""
    for choose in (_preferred, _temporary):
        try:
            path = choose()
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(f"{path} is not writable")
        except (OSError, RuntimeError) as fault:
            refused = refused or f"no usable cache directory: {fault}"
            continue
        if refused:
            _warn(f"{refused}; caching in {path}")
        return path
    _warn(f"{refused}; nothing is cached")
    return None


def _preferred() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    # Imported on use: whoever names a directory does not pay for finding one.
    from platformdirs import user_cache_path

    return user_cache_path("fpmsdk", appauthor=False)


def _temporary() -> Path:
    import tempfile  # only where nothing else can be written

    path = Path(tempfile.gettempdir()) / f"fpmsdk-{os.getuid()}"
    path.mkdir(exist_ok=True, mode=0o700)
    # Anybody may have created it first.
    if path.lstat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    return path


def _warn(fact: str) -> None:
    warnings.warn(f"{fact}. Set {CACHE_VARIABLE} to a writable directory to choose.", RuntimeWarning, stacklevel=3)
