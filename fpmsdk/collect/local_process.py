"""A process group that outlives nobody's memory of it: who started it is on disk, and only that is ever ended.

Source: collector.md section 4.3.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.documents.canonical import read_document, write_document
from fpmsdk.errors import CollectionError, OnboardError

TOKEN = "FPMSDK_LOCAL_TOKEN"
TIMED_OUT = 124
_POLL_S = 0.05
_WATCHDOG = (sys.executable, "-m", "fpmsdk.collect.local_watchdog")


class OwnedProcess:
    """One process group of this machine, recorded in a file before it is started.

    Parameters
    ----------
    record: `{pid, pgid, start_time, token}`; pid is null until the process runs. The processes work below its folder.
    grace_s: seconds between asking the group to end and ending it.
    """

    def __init__(self, record: Path, *, grace_s: float = 30.0) -> None:
        self._record = record
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: _Watchdog | None = None

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
        *,
        is_finished: Callable[[], bool] = lambda: False,
        poll_s: float = 2.0,
    ) -> int:
        """Run a command in a process group of its own until it ends or has done what it is for.

        Should this process be killed meanwhile, a small watchdog ends the group.

        Parameters
        ----------
        command, environment, folder: what is run, with which variables, where.
        logs: files of its standard output and standard error.
        timeout_s: seconds that it has.
        is_finished: asked every `poll_s` seconds; a group that has done its work, and would serve on, is ended.

        Returns
        -------
        Its exit code, 0 when it was ended because it is finished; 124 when it was ended after `timeout_s`.

        Raises
        ------
        CollectionError: it cannot be started, or its logs cannot be written. Whatever `is_finished` raises, with the
            group still running.
        """
        known = read_document(self._record)
        try:
            with logs[0].open("wb") as out, logs[1].open("wb") as err:
                self._watchdog = _Watchdog(self._record)
                self._watchdog.tell(known)
                self._process = subprocess.Popen(
                    list(command),
                    env={**environment, TOKEN: known["token"]},
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
                pid = self._process.pid
                known = {**known, "pid": pid, "pgid": pid, "start_time": _start_time(pid)}
                self._watchdog.tell(known)
                write_document(self._record, known)
                return self._wait(timeout_s, is_finished, poll_s)
        except OSError as fault:
            where = fault.filename or command[0]
            raise CollectionError(f"{where}: {command[0]} cannot be started: {fault.strerror}") from fault

    def _wait(self, timeout_s: float, is_finished: Callable[[], bool], poll_s: float) -> int:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._process.wait(max(0.0, min(poll_s, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                if is_finished():
                    self.end()
                    return 0
                if time.monotonic() >= deadline:
                    self.end()
                    return TIMED_OUT

    def end(self) -> None:
        """End every process of the record, and remove the record.

        Raises
        ------
        CollectionError: some are left.
        """
        if not self._record.exists():
            return
        end_group(read_document(self._record), self._record, grace_s=self._grace_s)
        if self._process is not None:
            self._process.wait()
        if self._watchdog is not None:
            self._watchdog.dismiss()
            self._watchdog = None


def end_group(known: Mapping[str, Any], record: Path, *, grace_s: float) -> None:
    """End the processes of a record: ask, wait, end. Then remove the record, unless it is of another start by now.

    Raises
    ------
    CollectionError: some are left; the record stays.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace_s
        for pid in _members(known, record):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while _members(known, record) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not _members(known, record):
            with contextlib.suppress(FileNotFoundError):
                if read_document(record)["token"] == known["token"]:
                    record.unlink()
            return
    raise CollectionError(f"{record}: processes {_members(known, record)} do not end; end them by hand, then resume")


class _Watchdog:
    """A process that ends the group once this one is gone: a pipe to it closes, however this process ends."""

    def __init__(self, record: Path) -> None:
        package = str(Path(__file__).parents[2])
        places = os.pathsep.join(place for place in (package, os.environ.get("PYTHONPATH", "")) if place)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fpmsdk.collect.local_watchdog", str(record)],
            env={**os.environ, "PYTHONPATH": places},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def tell(self, known: Mapping[str, Any] | None) -> None:
        """What is known of the group; None once nothing is left of it."""
        assert self._process.stdin is not None
        # A watchdog that somebody ended is missed only if this process is killed as well.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{json.dumps(known)}\n".encode())
            self._process.stdin.flush()

    def dismiss(self) -> None:
        """Nothing is left to watch."""
        self.tell(None)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def _members(known: Mapping[str, Any], record: Path) -> list[int]:
    # By their environment and not by number alone: numbers are given to others once a process has ended. An engine
    # that sets its title writes over its environment; it is known by its session together with the folder it works in.
    sought = f"{TOKEN}={known['token']}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            stat = _stat(int(entry.name))
            is_of_session = known["pgid"] is not None and stat[3] == str(known["pgid"])
            is_ours = sought in (entry / "environ").read_bytes().split(b"\0") or (
                is_of_session
                and Path(os.readlink(entry / "cwd").removesuffix(" (deleted)")).is_relative_to(record.parent)
            )
            if is_ours and stat[0] not in ("Z", "X"):
                found.append(int(entry.name))
    pid = known["pid"]
    if pid in found and known["start_time"] not in (None, _start_time(pid)):
        found.remove(pid)
    return found


def _start_time(pid: int) -> str | None:
    # Clock ticks since the machine started: with the number it names a process for good.
    try:
        return _stat(pid)[19]
    except OSError:
        return None


def _stat(pid: int) -> list[str]:
    # The name in parentheses may hold anything.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
