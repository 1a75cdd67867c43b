"""The lock of a whole-forward pair: one publisher at a time; readers wait only where files do not belong together.

Source: fpm-interpolation.md section 1.4, collector.md section 0.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def lock_path(table_path: str) -> str:
    """Path of the lock file beside a table, which other publishers of the format take too; it stays.

    >>> lock_path("/data/fpm_forward_perf.parquet")
    '/data/.fpm_forward_perf.lock'
    """
    folder, name = os.path.split(table_path)
    return os.path.join(folder, f".{name.removesuffix('.parquet')}.lock")


@contextmanager
def locked(table_path: str, *, exclusive: bool) -> Iterator[None]:
    """Hold the lock of a pair: alone to publish, with other readers to read. A reader never makes the lock file."""
    import fcntl

    # A reader may have no right to write.
    with open(lock_path(table_path), "ab" if exclusive else "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
