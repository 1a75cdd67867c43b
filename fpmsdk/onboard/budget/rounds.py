"""One round: a campaign of explicit points in a folder of its own, published into a systems root of its own.

Source: collector.md sections 1.5 and 2.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from fpmsdk.collect.options import CollectorOptions
from fpmsdk.collect.paths import checkpoint_path
from fpmsdk.collect.plan import CollectionPlan
from fpmsdk.documents.canonical import pretty_bytes, read_document
from fpmsdk.errors import CollectionError, EvidenceError
from fpmsdk.files import whole_file
from fpmsdk.onboard.budget.grid import Grid, Grids
from fpmsdk.onboard.collect_execute import CampaignRunner
from fpmsdk.onboard.collector_run import collector_plan
from fpmsdk.perfdb.forward_cells import ForwardCell, ForwardTable, open_forward_table
from fpmsdk.perfdb.forward_writer import read_origin

JOURNAL, POINTS, TABLE = "budget.json", "points.json", "fpm_forward_perf.parquet"
SCHEMA = "fpmsdk_budget_collection"


class Round(Struct):
    """A round of the journal.

    Attributes
    ----------
    points: by phase, rows of (batch size, prefill tokens, KV tokens) in the order of the grid.
    seconds: that its campaign took, in the call that ended it; None until then.
    """

    points: dict[str, list[list[int]]]
    seconds: float | None = None

    @property
    def num_points(self) -> int:
        """Points of both phases."""
        return sum(map(len, self.points.values()))

    def grids(self) -> Grids:
        """The points as arrays."""
        return {phase: np.array(rows, np.int64).reshape(-1, 3) for phase, rows in self.points.items()}


class Journal:
    """The rounds of a collection on a budget, on disk after every change; a collection of other settings is refused.

    Raises
    ------
    EvidenceError: the folder has a journal of other settings, or, without `resume`, any.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.file, self._settings = folder / JOURNAL, dict(settings)
        self.rounds: list[Round] = []
        if not self.file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            return
        if not resume:
            raise EvidenceError(
                f"{self.file}: a collection on a budget began here; go on with --resume", str(self.file)
            )
        document = read_document(self.file)
        differing = [name for name, value in self._settings.items() if document.get("settings", {}).get(name) != value]
        if document.get("schema_name") != SCHEMA or differing:
            found = {name: document.get("settings", {}).get(name) for name in differing}
            raise EvidenceError(
                f"{self.file}: began with other settings: {json.dumps(found)}; give these, or plan in a new folder",
                str(self.file),
            )
        self.rounds = [Round(each["points"], each["seconds"]) for each in document["rounds"]]

    def folder_of(self, number: int) -> Path:
        """Where a round keeps everything."""
        return self.file.parent / f"round-{number:03d}"

    def begin(self, points: Mapping[str, Grid]) -> None:
        """Note a round before it starts."""
        self.rounds.append(Round({phase: rows.tolist() for phase, rows in points.items()}))
        self._write()

    def end(self, seconds: float) -> None:
        """Note that the last round has ended."""
        self.rounds[-1].seconds = seconds
        self._write()

    def _write(self) -> None:
        rounds = [{"points": each.points, "seconds": each.seconds} for each in self.rounds]
        document = {"schema_name": SCHEMA, "schema_version": 1, "settings": self._settings, "rounds": rounds}
        with whole_file(self.file) as file:
            file.write(pretty_bytes(document))


def run_round(journal: Journal, words: list[str], run: CampaignRunner, notice: Callable[[str], None]) -> None:
    """Measure the points of the last round of a journal; one that was interrupted goes on.

    Raises
    ------
    CollectionError: cells failed; what they left is in the folder of the round, and another call goes on.
    """
    number = len(journal.rounds) - 1
    folder = journal.folder_of(number)
    folder.mkdir(exist_ok=True)
    file = folder / POINTS
    with whole_file(file) as written:
        written.write(pretty_bytes(_manifest(journal.rounds[-1].grids())))
    begun = time.monotonic()
    options, plan = _round_plan(words, folder)
    notice(f"round {number}: {journal.rounds[-1].num_points} points")
    errors = run(options, plan)
    if errors:
        raise CollectionError(f"round {number} failed, go on with --resume: {json.dumps(errors, sort_keys=True)}")
    journal.end(time.monotonic() - begun)


def _round_plan(words: list[str], folder: Path) -> tuple[CollectorOptions, CollectionPlan]:
    checkpoint = folder / "checkpoint"
    own = [
        *("--fpm-benchmark-points-file", str(folder / POINTS)),
        *("--checkpoint-dir", str(checkpoint)),
        *("--fpm-artifact-root", str(folder / "artifacts")),
        *("--fpm-database-root", str(folder / "systems/data")),
    ]
    if checkpoint_path(checkpoint, smoke=False).exists():
        own += ["--resume", "--resume-retry-failed"]
    return collector_plan([*words, *own])


def _manifest(points: Grids) -> dict[str, Any]:
    entries: dict[str, list[dict[str, Any]]] = {}
    for phase, rows in points.items():
        entries[phase] = []
        for batch, tokens, kv in rows.tolist():
            entry: dict[str, Any] = {"batch_size": batch, "total_kv_read_tokens": kv}
            entries[phase].append(entry | {"total_prefill_tokens": tokens} if phase == "prefill" else entry)
    return {"schema_version": 1, "prefill": entries.get("prefill", []), "decode": entries.get("decode", [])}


def table_of(folder: Path) -> tuple[ForwardTable, ForwardCell, Path]:
    """What a round has published: the table, its one cell, and the file.

    Raises
    ------
    EvidenceError: there is not one table with one cell.
    """
    files = sorted((folder / "systems/data").rglob(TABLE))
    if len(files) != 1:
        raise EvidenceError(f"{folder}: expected one published table, found {len(files)}", str(folder))
    table = open_forward_table(str(files[0]), *read_origin(str(files[0])))
    if len(table.cells) != 1:
        raise EvidenceError(f"{files[0]}: expected one cell, found {len(table.cells)}", str(files[0]))
    return table, table.cells[0], files[0]
