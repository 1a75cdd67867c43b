"""Weka agentic plays: one coding conversation per JSON object, with block hashes, idle times and subagents.

A source is a file of one play, JSON lines of plays, or a directory of files. A play with its subagents is a session;
its requests are turns. A subagent starts when the request before it has been answered, and the play goes on when the
subagents are done that were done in the record. Plays have no common clock: all start at 0, and `concurrency` serves so
many of them at once.
Source: callanjfox/kv-cache-tester, trace format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from fpmsdk.errors import TraceError
from fpmsdk.replay.formats.fields import refused_field
from fpmsdk.replay.formats.reader import Reader, ReadOptions
from fpmsdk.replay.formats.source import lines, read_bytes
from fpmsdk.replay.rows import Clock, LeftOut, Row
from fpmsdk.replay.scratch import full_disk_told, scratch_database
from fpmsdk.replay.trace import MAX_TOKENS

_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_HashId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Request(msgspec.Struct, tag_field="type", tag="n"):
    t: _Seconds
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = msgspec.field(name="in")
    output_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] = msgspec.field(name="out")
    hash_ids: list[_HashId] = []
    api_time: float | None = None


class _Streamed(_Request, tag_field="type", tag="s"):
    pass


class _Subagent(msgspec.Struct, tag_field="type", tag="subagent"):
    t: _Seconds
    requests: list[_Request | _Streamed]
    agent_id: str = "agent"


class _Play(msgspec.Struct):
    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    requests: list[_Request | _Streamed | _Subagent]
    hash_id_scope: Literal["local", "global"] = "local"


_DECODER = msgspec.json.Decoder(_Play)

_RECENT_IDENTITIES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Call:
    """A request of a play on the play's clock in s."""

    request: _Request
    thread: int
    name: str
    at: float
    end: float

    @classmethod
    def of(cls, request: _Request, thread: int, name: str, start: float) -> _Call:
        at = start + request.t
        return cls(request, thread, name, at, at + max(0.0, request.api_time or 0.0))


def _in_order(requests: Iterable[Any]) -> list[_Request]:
    return sorted(requests, key=lambda request: request.t)


def _awaited(calls: list[_Call], number: int, latest: dict[int, int], last: dict[int, int]) -> list[int]:
    """The calls that a call waits for, oldest first.

    The one before it in its thread; for the first of a subagent the last one of the play; and for a call of the play
    every subagent that was done before it started, if no call of the play has waited for that subagent.
    """
    call = calls[number]
    before = latest.get(call.thread, latest.get(0))
    if before is None:
        return [] if number == 0 else [0]
    if call.thread != 0:
        return [before]
    joined = [
        other
        for thread, other in latest.items()
        if thread != 0 and other == last[thread] and calls[before].at < calls[other].end <= call.at
    ]
    return sorted({before, *joined})


class _Identities(dict[int, int]):
    """Raw hash ids of one scope and the identities that stand for them; an unknown one gets a fresh identity."""

    def __init__(self, fresh: Iterator[int]) -> None:
        self._fresh = fresh

    def __missing__(self, raw: int) -> int:
        self[raw] = identity = next(self._fresh)
        return identity


class _Source:
    """What is known of a whole source: its plays, and the identities of hash ids of global scope. It is on disk."""

    def __init__(self, path: str | Path, fresh: Iterator[int]) -> None:
        self._path = path
        self._fresh = fresh
        self._recent: dict[int, int] = {}  # plays of one agent repeat the blocks of those just before
        with full_disk_told(path):
            self._database = scratch_database()
            self._database.execute("create table plays (id blob primary key) without rowid")
            self._database.execute("create table identities (raw integer primary key, identity integer)")

    def is_new(self, play: str) -> bool:
        """Whether a play of that id was not seen before; it is from now on."""
        with full_disk_told(self._path):
            key = (play.encode(),)
            return self._database.execute("insert or ignore into plays values (?)", key).rowcount == 1

    def __getitem__(self, raw: int) -> int:
        identity = self._recent.get(raw)
        if identity is None:
            with full_disk_told(self._path):
                known = self._database.execute("select identity from identities where raw = ?", (raw,)).fetchone()
                identity = next(self._fresh) if known is None else int(known[0])
                if known is None:
                    self._database.execute("insert into identities values (?, ?)", (raw, identity))
            if len(self._recent) == _RECENT_IDENTITIES:
                self._recent.clear()
            self._recent[raw] = identity
        return identity


class WekaReader(Reader):
    """Plays in order of file and line; all have blocks of one size, and hash ids of one scope."""

    form = "weka"
    options = frozenset({"nested_timestamps"})
    has_lines = False

    def __init__(self, path: str | Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self.clock = Clock.SECONDS
        self._nested = options.nested_timestamps or "auto"
        self._common: tuple[int, str] | None = None  # block size and scope of the hash ids
        self._fresh = count()
        self._source = _Source(path, self._fresh)

    def records(self) -> Iterator[tuple[int, tuple[str, bytes]]]:
        """The text of each play and where it stands, one in memory at a time."""
        return enumerate(self._texts(), 1)

    def parse(self, line: int, record: tuple[str, bytes]) -> Iterator[Row | LeftOut]:
        """The requests of one play in order of time."""
        where, text = record
        play = self._play(where, text)
        ids = self._source if play.hash_id_scope == "global" else _Identities(self._fresh)
        calls = self._calls(play)
        last = {call.thread: number for number, call in enumerate(calls)}
        latest: dict[int, int] = {}  # the last call so far of each thread
        for number, call in enumerate(calls):
            awaited = _awaited(calls, number, latest, last)
            latest[call.thread] = number
            ended = max((calls[other].end for other in awaited), default=call.at)
            yield Row(
                line,
                call.request.prompt_tokens,
                call.request.output_tokens,
                at=call.at,
                delay=max(0.0, call.at - ended),
                request_id=f"{play.id}:{call.name}",
                session_id=play.id,
                hash_ids=self._identities(call.request, ids),
                awaits=[number - other for other in awaited] if awaited != [number - 1] else (),
            )

    def _calls(self, play: _Play) -> list[_Call]:
        """All calls of a play, each with its thread: 0 for the play itself, the others for its subagents."""
        main = [entry for entry in play.requests if not isinstance(entry, _Subagent)]
        calls = [_Call.of(request, 0, str(number), 0.0) for number, request in enumerate(_in_order(main))]
        for thread, entry in enumerate(play.requests, 1):
            if isinstance(entry, _Subagent):
                start, name = self._start(entry), f"{thread - 1}-{entry.agent_id}"
                for number, request in enumerate(_in_order(entry.requests)):
                    calls.append(_Call.of(request, thread, f"{name}:{number}", start))
        return sorted(calls, key=lambda call: call.at)

    def _start(self, subagent: _Subagent) -> float:
        """What to add to the times of a subagent's requests."""
        if self._nested == "relative":
            return subagent.t
        is_relative = self._nested == "auto" and any(request.t < subagent.t for request in subagent.requests)
        return subagent.t if is_relative else 0.0

    def _identities(self, request: _Request, ids: _Identities | _Source) -> list[int]:
        """Identities over the whole source; the last block, when it is not full, has no hash in the source."""
        identities = list(map(ids.__getitem__, request.hash_ids))
        if identities and 0 < request.prompt_tokens - len(identities) * self.block_tokens < self.block_tokens:
            identities.append(next(self._fresh))
        return identities

    def _texts(self) -> Iterator[tuple[str, bytes]]:
        path = Path(self.path)
        for file in _files(path) if path.is_dir() else [path]:
            if ".jsonl" in file.suffixes:
                yield from ((f"{file}: trace line {line}", text) for line, text in lines(file))
            else:
                yield str(file), read_bytes(file)

    def _play(self, where: str, text: bytes) -> _Play:
        try:
            play = _DECODER.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
            field = refused_field(fault)
            raise TraceError(f"{where}: not a Weka play: {fault}", path=str(self.path), field=field) from fault
        if not self._source.is_new(play.id):
            raise TraceError(f'{where}: repeats the play "{play.id}"; plays have unique ids', path=str(self.path))
        found = (play.block_size, play.hash_id_scope)
        if self._common not in (None, found):
            raise TraceError(
                f"{where}: the play has block_size {found[0]} and hash_id_scope {found[1]}, the plays before it "
                f"{self._common}; read them as traces of their own",
                path=str(self.path),
                field="block_size",
            )
        self._common = found
        self.block_tokens = play.block_size
        return play


def _files(folder: Path) -> list[Path]:
    endings = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
    try:
        return sorted(file for file in folder.iterdir() if file.name.endswith(endings))
    except OSError as fault:
        raise TraceError(f"{folder}: cannot read the folder: {fault.strerror}", path=str(folder)) from fault
