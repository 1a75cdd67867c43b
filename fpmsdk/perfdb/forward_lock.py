"""The lock of a whole-forward pair: one publisher at a time; readers wait only where files do not belong together.

Source: fpm-interpolation.md section 1.4.
"""

from collections.abc import Iterator
from contextlib import contextmanager


def lock_path(table_path: str) -> str:
    """Path of the lock file beside a table; it stays after its first publication.

    >>> lock_path("/data/fpm_forward_perf.parquet")
    '/data/fpm_forward_perf.parquet.lock'
    """
    return f"{table_path}.lock"


@contextmanager
def locked(table_path: str, *, exclusive: bool) -> Iterator[None]:
    """Hold the lock of a pair: alone to publish, with other readers to read. A reader never makes the lock file."""
    import fcntl

    # A reader may have no right to write.
    with open(lock_path(table_path), "ab" if exclusive else "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
