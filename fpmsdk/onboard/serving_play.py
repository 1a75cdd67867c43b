"""The recorded play that a serving run repeats: one conversation in one stream, and how its timing can be driven.

Source: onboarding.md section 8.5.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from fpmsdk.documents.canonical import MAX_DOCUMENT_BYTES
from fpmsdk.errors import OnboardError
from fpmsdk.files import UnfitFileError, read_regular

_GAP_S = 1e-9


class SelectedPlay(NamedTuple):
    """A play, None when the file holds no single one, and what keeps it from being served as it was recorded."""

    document: dict[str, Any] | None
    issues: list[str]


def read_play(path: str | os.PathLike[str]) -> SelectedPlay:
    """The play of a Weka file and its issues.

    Parameters
    ----------
    path: JSON, or JSON lines with one line.

    Raises
    ------
    OnboardError: the file is not JSON.
    OSError: it cannot be read.

    >>> import tempfile
    >>> from pathlib import Path
    >>> file = Path(tempfile.mkdtemp()) / "play.json"
    >>> _ = file.write_text('{"id": "a", "requests": [{"type": "n", "t": 0, "in": 8, "out": 2, "hash_ids": [1]}]}')
    >>> read_play(file).issues
    []
    """
    documents = _documents(path)
    if len(documents) != 1:
        return SelectedPlay(None, [f"{len(documents)} plays are in {path}; choose one complete play"])
    document = documents[0]
    if not isinstance(document, dict) or not isinstance(document.get("requests"), list):
        return SelectedPlay(None, [f"{path} holds no Weka play with requests"])
    issues = [] if isinstance(document.get("id"), str) and document["id"] else ["the play has no id"]
    if not document["requests"]:
        return SelectedPlay(document, [*issues, "the play has no requests"])
    issues += _request_issues(document["requests"])
    if not any(isinstance(row, Mapping) and _tokens(row.get("out")) > 1 for row in document["requests"]):
        issues.append("no request has more than one output token, so that there is no time per output token to compare")
    return SelectedPlay(document, issues)


def timing_subset(play: Mapping[str, Any]) -> str | None:
    """How the benchmark can drive a play so that both of its bounds hold whatever the measured latencies are.

    A replay starts a request at its recorded time and a recorded gap after the previous end, whichever is later. The
    benchmark knows one of the two: gaps suffice when no request took recorded time, timestamps when no gap is left.

    Returns
    -------
    `zero_recorded_api_time`, `zero_idle_gaps`, or None for a play that needs both bounds.

    >>> first, second = {"t": 0.0, "api_time": 2.0}, {"t": 2.0}
    >>> timing_subset({"requests": [first, second]}), timing_subset({"requests": [first, second | {"t": 3.0}]})
    ('zero_idle_gaps', None)
    """
    pairs = list(pairwise(play["requests"]))
    if all(not row.get("api_time") for row, _ in pairs):
        return "zero_recorded_api_time"
    if all(abs(idle_gap_s(row, following)) < _GAP_S for row, following in pairs):
        return "zero_idle_gaps"
    return None


def idle_gap_s(row: Mapping[str, Any], following: Mapping[str, Any]) -> float:
    """Seconds between the recorded end of a request and the start of the next."""
    return float(following["t"] - row["t"] - (row.get("api_time") or 0.0))


def _documents(path: str | os.PathLike[str]) -> list[Any]:
    try:
        text = read_regular(path, limit_bytes=MAX_DOCUMENT_BYTES).decode()
        try:
            return [json.loads(text)]
        except json.JSONDecodeError:
            return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (UnfitFileError, ValueError) as fault:
        raise OnboardError(f"{path}: no Weka play: {fault}", os.fspath(path)) from None


def _request_issues(requests: list[Any]) -> list[str]:
    issues: list[str] = []
    previous: Mapping[str, Any] | None = None
    for place, row in enumerate(requests):
        if not isinstance(row, Mapping) or row.get("type") not in ("n", "s"):
            return [*issues, f"request {place} branches into a subagent; choose a play of one stream"]
        if not (_tokens(row.get("in")) and _tokens(row.get("out"))):
            issues.append(f"request {place} needs positive in and out tokens")
        if not (_is_time(row.get("t")) and _is_time(row.get("api_time") or 0.0)):
            return [*issues, f"request {place} needs finite, non-negative t and api_time"]
        if not isinstance(row.get("hash_ids"), list) or not row["hash_ids"]:
            return [*issues, f"request {place} has no hash_ids of its prompt"]
        if previous is not None and not _continues(previous, row):
            return [
                *issues,
                f"request {place} overlaps the one before, has another model, or a prompt that does not extend it; "
                "choose a play of one stream",
            ]
        previous = row
    return issues


def _continues(previous: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    known = previous["hash_ids"]
    return (
        row["t"] >= previous["t"] + (previous.get("api_time") or 0.0)
        and row.get("model") == previous.get("model")
        and row["hash_ids"][: len(known)] == known
    )


def _tokens(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0
