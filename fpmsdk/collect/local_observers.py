"""Staged observers of an engine that runs as a process of this machine: unpacked, and found by the engine.

In a container the start script does this; a local engine has its folders elsewhere.
Source: collector.md sections 4.3, 8.3 and 8.4.
"""

from __future__ import annotations

import os

from fpmsdk.collect.observer_staging import ARCHIVE_FILE, BUNDLE_FOLDER, CONTEXT_FILE, unpack_observers
from fpmsdk.collect.unit_folder import UnitFolder

_CONTEXT, _MANIFEST, _FOLDER = (
    f"AISIMULATE_RUNTIME_{name}" for name in ("CONTEXT", "INSTRUMENTATION", "OBSERVATION_DIR")
)


def observer_environment(unit: UnitFolder, python_path: str = "") -> dict[str, str]:
    """Unpack the observers that were staged for a unit; the variables by which its engine finds them.

    Parameters
    ----------
    unit: where the archive was staged; its digest was compared then.
    python_path: `PYTHONPATH` of the engine without them.

    Returns
    -------
    Nothing when the launch is not observed.

    Raises
    ------
    EvidenceError: a name of the archive leads out of it.
    """
    archive = unit.work / ARCHIVE_FILE
    if not archive.exists():
        return {}
    manifest = unpack_observers(archive, unit.work / BUNDLE_FOLDER)
    return {
        _CONTEXT: str(unit.work / CONTEXT_FILE),
        _MANIFEST: str(manifest),
        _FOLDER: str(unit.results),
        # The importer was staged beside the archive.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(unit.work), python_path))),
    }
