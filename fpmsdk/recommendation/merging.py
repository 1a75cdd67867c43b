"""One result from the parts of a sweep that were searched apart.

Source: predict-recommend.md section 17.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.recommendation.journal import JOURNAL, Journal, read_journal, same_sweep
from fpmsdk.recommendation.search.driver import COMPLETE
from fpmsdk.recommendation.shards import parse_shard


def merged_journal(folders: Sequence[str | os.PathLike[str]]) -> Journal:
    """The journal that one sweep would have written, from those of its parts.

    Parameters
    ----------
    folders: output directories of all parts, in any order.

    Raises
    ------
    OnboardError: the parts are of different sweeps, one is missing, given twice or not finished.
    EvidenceError: a journal is missing or damaged, or two parts say different things of a candidate.

    Source: predict-recommend.md section 17.
    """
    if not folders:
        raise OnboardError("recommend merge: name the output directories of all parts")
    parts: dict[int, tuple[Path, Journal]] = {}
    count = 0
    for folder in folders:
        path = Path(folder) / JOURNAL
        try:
            journal = read_journal(path)
        except FileNotFoundError:
            raise EvidenceError(
                f"{path}: no journal; name the output directory of a part of a sweep", str(path)
            ) from None
        shard = parse_shard(journal.head["shard"])
        if parts:
            first_path, first = next(iter(parts.values()))
            _same(path, journal, first_path, first)
        count = shard.count
        if shard.number in parts:
            other, _ = parts[shard.number]
            raise OnboardError(f"{path}: is part {shard}, and so is {other}; name each part once", str(path))
        parts[shard.number] = (path, journal)
    _all_there(parts, count)
    head = {**parts[1][1].head, "shard": "1/1"}
    merged = Journal(head, end=COMPLETE)
    for path, journal in parts.values():
        for index, entry in journal.entries.items():
            if merged.entries.setdefault(index, entry) != entry:
                raise EvidenceError(f"{path}: candidate {index} is in another part with another outcome", str(path))
    return merged


def _same(path: Path, journal: Journal, first_path: Path, first: Journal) -> None:
    def sweep(of: Journal) -> dict[str, Any]:
        return {**of.head, "shard": None, "parts": parse_shard(of.head["shard"]).count}

    same_sweep(sweep(journal), sweep(first), path, f"here is {first_path.parent}: merge the parts of one sweep")


def _all_there(parts: dict[int, tuple[Path, Journal]], count: int) -> None:
    missing = [f"{number}/{count}" for number in range(1, count + 1) if number not in parts]
    if missing:
        raise OnboardError(f"recommend merge: part {', '.join(missing)} is missing; run it, and name its directory")
    for number, (path, journal) in sorted(parts.items()):
        if journal.end != COMPLETE:
            raise OnboardError(
                f"{path}: part {number}/{count} is not finished ({journal.end or 'interrupted'}); go on with it by "
                f"--shard {number}/{count} --resume",
                str(path),
            )
