"""A unit whose `/results` is a folder of this machine: what executors without a remote transport share.

Source: collector.md section 4.3.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmsdk.collect.executor import CellLaunch
from fpmsdk.collect.launch_evidence import SCRIPT_FILE
from fpmsdk.collect.paths import PROVENANCE, RESULTS, WORK
from fpmsdk.collect.points import FILE_NAME, RECEIPT_NAME
from fpmsdk.collect.provenance import provenance_document
from fpmsdk.collect.shell_words import literal_command, literal_exports
from fpmsdk.documents.canonical import write_document
from fpmsdk.documents.evidence import file_meta, manifest
from fpmsdk.errors import CollectionError


class UnitFolder:
    """`raw/<unit>` of a cell as the results of a unit, and `local-runtime/<unit>` as the folder it works in."""

    def __init__(self, launch: CellLaunch, unit: str) -> None:
        self.launch = launch
        self.unit = unit
        self.results = launch.folder / "raw" / unit
        self.work = launch.folder / "local-runtime" / unit
        self.logs = launch.folder / "logs"

    def stage(self, files: Sequence[Path]) -> None:
        """Copy files beside the engine and compare their digests.

        Raises
        ------
        CollectionError: a copy differs.
        """
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        for file in files:
            copy = self.work / file.name
            shutil.copyfile(file, copy)
            if file_meta(copy) != file_meta(file):
                raise CollectionError(f"{copy}: the staged copy differs from {file}; stage it again")

    def prepare(
        self,
        *,
        cell_id: str,
        plan_sha256: str,
        attempt_id: str,
        label: str | None,
        found_version: str,
        dynamo_version: str | None = None,
    ) -> None:
        """Empty the results and write whose attempt they belong to.

        Raises
        ------
        CollectionError: the engine has another version than was observed before planning; the provenance stays.
        """
        shutil.rmtree(self.results, ignore_errors=True)
        self.results.mkdir(parents=True)
        self.logs.mkdir(exist_ok=True)
        document = provenance_document(
            cell_id=cell_id,
            plan_sha256=plan_sha256,
            attempt_id=attempt_id,
            backend_version=found_version,
            dynamo_version=dynamo_version,
        )
        if label is not None:
            document["backend_version"] = label
        write_document(self.results / PROVENANCE, document)
        expected = self.launch.plan.runtime_backend_version
        if expected is not None and expected != found_version:
            raise CollectionError(
                f"{self.unit}: the engine has version {found_version}, the plan was made for {expected}; use that "
                "runtime, or plan again"
            )

    def record_points(self, receipt: Mapping[str, Any]) -> None:
        """Hash the staged points and write the receipt. Raises `CollectionError` when they differ from it."""
        found = file_meta(self.work / FILE_NAME)["sha256"]
        if found != receipt["sha256"]:
            raise CollectionError(f"{self.work / FILE_NAME}: expected sha256 {receipt['sha256']}, found {found}")
        write_document(self.results / RECEIPT_NAME, dict(receipt))

    def manifest(self) -> dict[str, dict[str, int | str]]:
        """Size and digest of every result."""
        return manifest(self.results)

    def command(self, engine: Sequence[str]) -> list[str]:
        """The command of `run.sh` with another engine, and with the paths of this unit.

        Parameters
        ----------
        engine: replaces `python3 -m dynamo.vllm`.
        """
        words = literal_command((self.launch.folder / SCRIPT_FILE).read_text())
        return [*engine, *(self._local(word) for word in words[3:])]

    def environment(self) -> dict[str, str]:
        """The literal exports of `run.sh`, with the paths of this unit."""
        exports = literal_exports((self.launch.folder / SCRIPT_FILE).read_text())
        # A list of folders, as PYTHONPATH is, has paths in it as well.
        return {
            name: os.pathsep.join(self._local(part) for part in value.split(os.pathsep))
            for name, value in exports.items()
        }

    def _local(self, word: str) -> str:
        word = word.replace("__FPM_NODE_RANK__", str(int(self.unit.removeprefix("node"))))
        for place, folder in ((RESULTS, self.results), (WORK, self.work)):
            if word == place or word.startswith(f"{place}/"):
                return str(folder) + word[len(place) :]
        return word

    def require_results(self) -> None:
        """Require that there are results. Raises `CollectionError` otherwise."""
        if all(file.stem.endswith("_merged") for file in self.results.glob("benchmark*.json")):
            raise CollectionError(f"{self.unit}: the engine wrote no benchmark*.json; see {os.fspath(self.logs)}")
