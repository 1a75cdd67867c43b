"""Which collector made a plan: a content-addressed revision, so that no campaign is continued by other code.

Source: collector.md section 1.6 (aic_revision).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath

from fpmsdk.documents.canonical import digest
from fpmsdk.errors import OnboardError

ENVIRONMENT = "FPM_COLLECTOR_SOURCE_REVISION"
_DISTRIBUTION = "fpmsdk"
_THIS = PurePosixPath("fpmsdk/collect/revision.py")


def source_revision() -> str:
    """The revision of this collector.

    `FPM_COLLECTOR_SOURCE_REVISION` where it is set; of an installed wheel its name, version and the digest of its
    verified files; of a checkout the commit, with a digest of what was changed since.

    Raises
    ------
    OnboardError: neither is there, or an installed file is not the one that was installed.
    """
    override = os.environ.get(ENVIRONMENT, "").strip()
    if override:
        return override
    return _installed_revision() or git_revision(Path(__file__).resolve().parents[2])


@cache
def _installed_revision() -> str | None:
    try:
        distribution = metadata.distribution(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
    # The metadata of an editable install do not lie beside this file.
    root = Path(str(distribution.locate_file(""))).resolve()
    if (root / _THIS).resolve() != Path(__file__).resolve() or not distribution.read_text("RECORD"):
        return None
    if not any(row[:1] == [str(_THIS)] for row in _record(distribution)):
        return None
    return installed_revision(distribution)


def _record(distribution: metadata.Distribution) -> list[list[str]]:
    return list(csv.reader(io.StringIO(distribution.read_text("RECORD") or ""), strict=True))


def installed_revision(distribution: metadata.Distribution) -> str:
    """`installed:NAME==VERSION:record-sha256:DIGEST` of a distribution whose package files are those of its record.

    Raises
    ------
    OnboardError: a file is missing, changed, unhashed, repeated or outside the distribution; names it.
    """
    root = Path(str(distribution.locate_file(""))).resolve()
    payload: dict[str, tuple[str, int]] = {}
    for row in _record(distribution):
        path = PurePosixPath(row[0])
        if path.parts[:1] != (_DISTRIBUTION,) or path.suffix == ".pyc":
            continue
        stated = row[1].removeprefix("sha256=")
        try:
            content = (root / path).read_bytes()
        except OSError as fault:
            raise _damaged(path, f"cannot be read: {fault.strerror}") from fault
        found = hashlib.sha256(content)
        if ".." in path.parts or row[0] in payload or len(row) != 3:
            raise _damaged(path, "has a malformed entry in RECORD")
        if base64.urlsafe_b64encode(found.digest()).decode().rstrip("=") != stated or row[2] != str(len(content)):
            raise _damaged(path, "is not the file that was installed")
        payload[row[0]] = (found.hexdigest(), len(content))
    if not payload:
        raise _damaged(_THIS, "is not in RECORD")
    entries = sorted([path, sha256, size] for path, (sha256, size) in payload.items())
    identity = digest({"payload": entries, "version": distribution.version})
    return f"installed:{_DISTRIBUTION}=={distribution.version}:record-sha256:{identity}"


def _damaged(path: PurePosixPath, reason: str) -> OnboardError:
    return OnboardError(f"{path} of the installed {_DISTRIBUTION} {reason}; install it again", str(path))


def git_revision(root: Path) -> str:
    """The commit of a checkout, with a digest of what was changed in its tracked files since.

    Raises
    ------
    OnboardError: no checkout, or no git.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=root, check=True, capture_output=True, text=True, timeout=30, encoding="utf-8"
        )
        return done.stdout

    try:
        head = git("rev-parse", "HEAD").strip()
        # Untracked files do not count: artifacts of campaigns lie in checkouts.
        status = git("status", "--porcelain", "--untracked-files=no")
        if not status.strip():
            return head
        # Plumbing, because drivers and settings of the host change what `git diff` prints.
        changes = git("diff-index", "--no-ext-diff", "--full-index", "-p", "HEAD")
    except (OSError, subprocess.SubprocessError) as fault:
        raise OnboardError(
            f"the revision of this collector is unknown: no installed wheel, and git failed in {root} ({fault}); set "
            f"{ENVIRONMENT}",
            ENVIRONMENT,
        ) from None
    return f"{head}-dirty-{hashlib.sha256((status + changes).encode()).hexdigest()[:12]}"
