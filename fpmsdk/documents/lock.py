"""A lock file that one process holds at a time; the file stays, ownership dies with its process.

Source: onboarding.md section 5 (lock), collector.md section 11.3.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from fpmsdk.errors import OnboardError


@contextmanager
def exclusive(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Hold a lock file while the block runs; it is made (mode 0600) when it does not exist, and never waited for.

    Parameters
    ----------
    path: the lock file, in an existing folder.
    what: what is locked, for the message.

    Raises
    ------
    OnboardError: another process holds it, or something else than a regular file is there.
    OSError: it cannot be made.

    Example
    -------
    >>> import tempfile
    >>> from pathlib import Path
    >>> place = Path(tempfile.mkdtemp()) / ".support.lock"
    >>> with exclusive(place, "the plan"):
    ...     place.stat().st_size
    0
    """
    import fcntl

    path = os.fspath(path)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, 0o600)
    except OSError as fault:
        if os.path.islink(path):
            raise OnboardError(f"{path}: a lock may not be a symbolic link; remove it", path) from fault
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OnboardError(f"{path}: a lock must be a regular file; remove what is there", path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OnboardError(f"{path}: another process works on {what}; try again when it has ended", path) from None
        yield
    finally:
        os.close(descriptor)
