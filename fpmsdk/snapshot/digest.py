"""SHA-256 of content that is still being made or written: hashing takes as long as a disk, and neither has to wait."""

import hashlib
import threading

# Smaller pieces are hashed before a thread has started.
_LARGE_BYTES = 1 << 20


class BackgroundDigest:
    """A digest of pieces in their order; large ones are hashed while the caller goes on.

    Example
    -------
    >>> digest = BackgroundDigest()
    >>> digest.update(b"ab")
    >>> digest.update(bytes(2_000_000))
    >>> digest.hexdigest() == hashlib.sha256(b"ab" + bytes(2_000_000)).hexdigest()
    True
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._last: threading.Thread | None = None  # hashes the last piece, after the one before it

    def update(self, piece: bytes | memoryview) -> None:
        """Add a piece, which must stay as it is."""
        if self._last is None and len(piece) < _LARGE_BYTES:
            self._digest.update(piece)
            return
        self._last = threading.Thread(target=self._hash, args=(self._last, piece))
        self._last.start()

    def hexdigest(self) -> str:
        """The digest of all pieces; waits for it."""
        if self._last is not None:
            self._last.join()
        return self._digest.hexdigest()

    def _hash(self, before: threading.Thread | None, piece: bytes | memoryview) -> None:
        if before is not None:
            before.join()
        self._digest.update(piece)
