"""A process group that outlives nobody's memory of it: who started it is on disk, and only that is ever ended.

Source: collector.md section 4.3.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.documents.canonical import read_document, write_document
from fpmsdk.errors import CollectionError, OnboardError

TOKEN = "FPMSDK_LOCAL_TOKEN"
_POLL_S = 0.05


class OwnedProcess:
    """One process group of this machine, recorded in a file before it is started.

    Parameters
    ----------
    record: `{pid, pgid, start_time, token}`; pid is null until the process runs.
    grace_s: seconds between asking the group to end and ending it.
    """

    def __init__(self, record: Path, *, grace_s: float = 30.0) -> None:
        self._record = record
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None

    def claim(self) -> None:
        """Write a token of our own. A process that carries it is ours, whatever happens to its number."""
        if not Path("/proc/self/stat").exists():
            raise OnboardError("executor local needs /proc to recognise its own processes; use another executor")
        write_document(self._record, {"pid": None, "pgid": None, "start_time": None, "token": secrets.token_hex(16)})

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        logs: tuple[Path, Path],
        timeout_s: float,
    ) -> int:
        """Run a command in a process group of its own, and wait.

        Returns
        -------
        Its exit code; 124 when it was ended after `timeout_s`.

        Raises
        ------
        CollectionError: it cannot be started.
        """
        token = read_document(self._record)["token"]
        with logs[0].open("wb") as out, logs[1].open("wb") as err:
            try:
                self._process = subprocess.Popen(
                    list(command),
                    env={**environment, TOKEN: token},
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            except OSError as fault:
                raise CollectionError(f"{command[0]}: cannot be started: {fault.strerror}") from fault
            pid = self._process.pid
            known = {"pid": pid, "pgid": pid, "start_time": _start_time(pid), "token": token}
            write_document(self._record, known)
            try:
                return self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.end()
                return 124

    def end(self) -> None:
        """End every process that carries the token of the record, and remove the record.

        Raises
        ------
        CollectionError: some are left.
        """
        if not self._record.exists():
            return
        known = read_document(self._record)
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + self._grace_s
            for pid in _carriers(known):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            while _carriers(known) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            if not _carriers(known):
                if self._process is not None:
                    self._process.wait()
                self._record.unlink()
                return
        raise CollectionError(f"{self._record}: processes {_carriers(known)} do not end; end them by hand, then resume")


def _carriers(known: Mapping[str, Any]) -> list[int]:
    # By their environment and not by number alone: numbers are given to others once a process has ended.
    sought = f"{TOKEN}={known['token']}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if sought in (entry / "environ").read_bytes().split(b"\0") and not _is_dead(int(entry.name)):
                found.append(int(entry.name))
    pid = known["pid"]
    if pid in found and known["start_time"] not in (None, _start_time(pid)):
        found.remove(pid)
    return found


def _is_dead(pid: int) -> bool:
    return _stat(pid)[0] in ("Z", "X")


def _start_time(pid: int) -> str | None:
    # Clock ticks since the machine started: with the number it names a process for good.
    try:
        return _stat(pid)[19]
    except OSError:
        return None


def _stat(pid: int) -> list[str]:
    # The name in parentheses may hold anything.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
