"""Files that only make the next start faster: found by content digest, checked on reading, never required.

Every fault of the cache, from a full disk to a damaged file, means a miss and nothing else.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import xxhash

from fpmsdk.files import whole_file
from fpmsdk.paths import cache_dir

ALIGNMENT = 64
# When a process finds more than this, the least recently written entries go.
SIZE_LIMIT_BYTES = 2 * 1024**3
_MAGIC = b"fpmsdk-c"
_HEADER = struct.Struct(f"<8sQI{ALIGNMENT - 20}x")


def key(kind: str, *parts: bytes) -> str:
    """Return the name of the entry of this kind that follows from `parts` and the code of this package."""
    digest = xxhash.xxh3_128(kind.encode())
    for part in (_code_digest(), *parts):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return f"{kind}-{digest.hexdigest()}"


def load(name: str) -> memoryview | None:
    """Return the content of an entry, mapped read-only into memory, or None when there is no sound one."""
    folder = _folder()
    if folder is None:
        return None
    try:
        with open(folder / name, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    if len(mapped) < _HEADER.size:
        return None
    magic, size, checksum = _HEADER.unpack_from(mapped)
    content = memoryview(mapped)[_HEADER.size :]
    if magic != _MAGIC or size != len(content) or checksum != zlib.crc32(content):
        return None
    return content


def store(name: str, chunks: Iterable[bytes | memoryview]) -> memoryview | None:
    """Write an entry in one step: readers and other writers see a whole one or none.

    Returns: its content, mapped read-only into memory, or None when it could not be written.
    """
    folder = _folder()
    if folder is None:
        return None
    size = checksum = 0
    content = None
    with contextlib.suppress(OSError), whole_file(folder / name) as file:
        file.write(bytes(_HEADER.size))
        for chunk in chunks:
            file.write(chunk)
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
        file.seek(0)
        file.write(_HEADER.pack(_MAGIC, size, checksum))
        file.flush()
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[_HEADER.size :]
    _shrink_once(folder)
    return content


def _folder() -> Path | None:
    base = cache_dir()
    if base is None:
        return None
    folder = base / "perfdb"
    try:
        folder.mkdir(exist_ok=True, mode=0o700)
    except OSError:
        return None
    return folder


@cache
def _code_digest() -> bytes:
    """Digest of this package: an entry made by other code is never found, whatever changed in it."""
    digest = xxhash.xxh3_128()
    for path in sorted(Path(__file__).parent.glob("*.py*")):
        digest.update(path.read_bytes())
    return digest.digest()


@cache
def _shrink_once(folder: Path) -> None:
    """Remove the oldest entries beyond the limit; once a process, because it looks at every entry."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        files = sorted((entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in entries)
        excess = sum(size for _, size, _ in files) - SIZE_LIMIT_BYTES
        for _, size, path in files:
            if excess <= 0:
                return
            os.unlink(path)
            excess -= size
