"""Mooncake JSON lines that tell what each turn adds: its prompt is all that was said before in its session, and that.

An answer is part of the next prompt. Its tokens are its own unless `output_token_ids` tell them, so turns of other
sessions share prompts up to the first answer. Blocks of the source need not begin where blocks of a prompt do: what was
said is cut anew, into blocks of `kv_block_tokens`.
Source: engine-and-replay.md section 5.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fpmsdk.replay.formats.mooncake import EMPTY_PROMPT, MooncakeReader, decoded, lengths
from fpmsdk.replay.formats.reader import ReadOptions
from fpmsdk.replay.formats.source import row_error
from fpmsdk.replay.rows import LeftOut, Row
from fpmsdk.replay.trace import MAX_TOKENS

# Tokens that are alike: of a block of the source, of an answer by its line, or one token of an answer that is told.
_Content = tuple[str, int]


class _Identities(dict[tuple[tuple[_Content, int], ...], int]):
    """A number for each content of a block, counted from 0."""

    def __missing__(self, content: tuple[tuple[_Content, int], ...]) -> int:
        self[content] = identity = len(self)
        return identity


@dataclass(slots=True)
class _Said:
    """All tokens of a session: full blocks, and runs of alike tokens after the last of them."""

    tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    tail: list[tuple[_Content, int]] = field(default_factory=list)

    def add(self, content: _Content, count: int, block_tokens: int, identities: _Identities) -> None:
        """Append tokens that are alike."""
        while count:
            taken = min(count, block_tokens - self.tokens % block_tokens)
            if self.tail and self.tail[-1][0] == content:
                self.tail[-1] = (content, self.tail[-1][1] + taken)
            else:
                self.tail.append((content, taken))
            self.tokens += taken
            count -= taken
            if self.tokens % block_tokens == 0:
                self.blocks.append(identities[tuple(self.tail)])
                self.tail.clear()


class MooncakeDeltaReader(MooncakeReader):
    """The turns of a session come in their order; the fields are those of Mooncake rows."""

    form = "mooncake-delta"
    describes_output = True
    options = frozenset({"block_tokens", "time_unit", "kv_block_tokens"})

    def __init__(self, path: str | Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self._source_block_tokens = self.block_tokens
        # Whatever the size of KV blocks is, tokens make them up.
        self.block_tokens = options.kv_block_tokens or 1
        self._identities = _Identities()
        self._sessions: dict[str, _Said] = {}

    def parse(self, line: int, record: bytes) -> Iterator[Row | LeftOut]:
        """One turn with its whole prompt."""
        row = decoded(self.path, line, record)
        hashes, added, output = lengths(self.path, line, row, self._source_block_tokens)
        self.check_capacity(line, added, len(hashes), self._source_block_tokens)
        said = _Said() if row.session_id is None else self._sessions.setdefault(row.session_id, _Said())
        prompt = said.tokens + added
        if prompt == 0:
            raise row_error(self.path, line, EMPTY_PROMPT, "input_length")
        if prompt + output > MAX_TOKENS:
            text = f"brings its session to {prompt + output} tokens, at most {MAX_TOKENS} fit"
            raise row_error(self.path, line, text, "input_length")
        for start, hash_id in zip(range(0, added, self._source_block_tokens), hashes, strict=False):
            count = min(self._source_block_tokens, added - start)
            said.add(("prompt", hash_id), count, self.block_tokens, self._identities)
        if row.output_token_ids is None:
            said.add(("answer", line), output, self.block_tokens, self._identities)
        else:
            for token in row.output_token_ids:
                said.add(("token", token), 1, self.block_tokens, self._identities)
        # One more than the tokens fill, so that the answer counts as described.
        started = [self._identities[tuple(said.tail)]] if said.tail else []
        yield Row(
            line,
            prompt,
            output,
            at=row.timestamp,
            delay=row.delay,
            request_id=row.request_id,
            session_id=row.session_id,
            priority=row.priority or 0,
            hash_ids=[*said.blocks, *started, self._identities[()]],
            describes_output=True,
        )
