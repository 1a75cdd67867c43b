"""Recorded scheduler decisions as a file: reading, checking that all is there, and writing only what changes.

A recording is a JSON object, compressed with gzip or not: `note` names the vLLM version, `scenarios` lists runs. With
`"form": "changes"` a step leaves out what is as in the step before (`free_blocks`, `running`, `waiting`, and what a
request holds) and what is empty (`new`, `preempted`, `finished`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fpmsdk.errors import TraceError
from fpmsdk.files import whole_file

_GZIP_MAGIC = b"\x1f\x8b"
_EMPTY: dict[str, Any] = {"new": {}, "preempted": [], "finished": []}
_STATE = ("free_blocks", "running", "waiting")


def changes_only(steps: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Leave out what a step shares with the one before.

    >>> steps = [{"tokens": {"a": 8}, "new": {"a": 0}, "preempted": [], "finished": [], "free_blocks": 7,
    ...           "running": 1, "waiting": 0}, {"tokens": {"a": 1}, "new": {}, "preempted": [], "finished": [],
    ...           "free_blocks": 7, "running": 1, "waiting": 0}]
    >>> list(changes_only(steps))[1]
    {'tokens': {'a': 1}}
    """
    before: dict[str, Any] = {}
    held: dict[str, Any] = {}
    for step in steps:
        kept = {"tokens": step["tokens"]}
        kept |= {name: step[name] for name in _EMPTY if step[name]}
        kept |= {name: step[name] for name in _STATE if before.get(name) != step[name]}
        if "held" in step:
            changed = {request: blocks for request, blocks in step["held"].items() if held.get(request) != blocks}
            kept |= {"held": changed} if changed or not before else {}
            held = step["held"]
        before = {name: step[name] for name in _STATE}
        yield kept


def all_of(steps: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Undo `changes_only`.

    >>> list(all_of([{"tokens": {"a": 8}, "free_blocks": 7, "running": 1, "waiting": 0}, {"tokens": {"a": 1}}]))[1]
    {'tokens': {'a': 1}, 'new': {}, 'preempted': [], 'finished': [], 'free_blocks': 7, 'running': 1, 'waiting': 0}
    """
    state: dict[str, Any] = {}
    held: dict[str, Any] | None = None
    for step in steps:
        state |= {name: step[name] for name in _STATE if name in step}
        whole = {"tokens": step["tokens"], **{name: step.get(name, empty) for name, empty in _EMPTY.items()}, **state}
        if "held" in step or held is not None:
            known = (held or {}) | step.get("held", {})
            held = {request: known[request] for request in state["running"]}
            whole["held"] = held
        yield whole


def read_recording(path: str | Path) -> dict[str, Any]:
    """Read a recording, every step whole.

    Raises
    ------
    TraceError: the file is something else; names the field.
    OSError, ValueError: it cannot be read, or is not JSON.

    >>> import tempfile
    >>> step = {"tokens": {"r": 8}, "new": {"r": 0}, "preempted": [], "finished": []}
    >>> step |= {"free_blocks": 7, "running": 1, "waiting": 0}
    >>> run = {"name": "one", "engine": {}, "requests": [], "num_blocks": 8, "block_size": 16, "steps": [step]}
    >>> path = tempfile.mkdtemp() + "/recording.json.gz"
    >>> write_recording(path, {"note": "vLLM 0.32", "scenarios": [run]})
    >>> read_recording(path)["scenarios"][0]["steps"] == [step]
    True
    """
    data = Path(path).read_bytes()
    document = json.loads(gzip.decompress(data) if data.startswith(_GZIP_MAGIC) else data)
    if not isinstance(document, dict) or "scenarios" not in document:
        raise TraceError("field `scenarios` is missing; expected recorded scheduler decisions")
    for scenario in document["scenarios"]:
        size = "groups" if "groups" in scenario else "block_size"
        for field in ("name", "engine", "requests", "num_blocks", size, "steps"):
            if field not in scenario:
                raise TraceError(f"scenario {scenario.get('name')}: field `{field}` is missing")
        if document.get("form") == "changes":
            scenario["steps"] = list(all_of(scenario["steps"]))
    return document


def write_recording(path: str | Path, document: Mapping[str, Any]) -> None:
    """Write a recording, whole or not at all, in the form of changes; compressed when the name ends in `.gz`.

    Raises
    ------
    OSError: the file cannot be written; what was there before stays.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/recording.json"
    >>> write_recording(path, {"note": "vLLM 0.32", "scenarios": []})
    >>> Path(path).read_text()
    '{"note":"vLLM 0.32","scenarios":[],"form":"changes"}'
    """
    scenarios = [{**scenario, "steps": list(changes_only(scenario["steps"]))} for scenario in document["scenarios"]]
    compact = {**document, "form": "changes", "scenarios": scenarios}
    data = json.dumps(compact, separators=(",", ":")).encode()
    with whole_file(path) as file:
        file.write(gzip.compress(data, 9, mtime=0) if str(path).endswith(".gz") else data)
