"""Snapshots that were changed by somebody who knew how to make the digests fit again."""

import hashlib
import json
import shutil
import struct
from pathlib import Path

from fpmsdk.perfmodel.state_registry import STATES


def copied(snapshot, target):
    """A copy of a snapshot whose configuration names the copy; returns the configuration."""
    shutil.copytree(snapshot, target, symlinks=True)
    return repinned(target)


def repinned(folder, *, state=None, change=None, manifest=None):
    """Change a snapshot in place and make every digest fit; returns its configuration, which goes on tuning.

    `state` replaces `state.bin`, `change` edits the manifest's document, `manifest` replaces its bytes.
    """
    folder = Path(folder)
    document = json.loads((folder / "manifest.json").read_bytes())
    if state is not None:
        (folder / "state.bin").write_bytes(state)
        (recorded,) = (file for file in document["files"] if file["path"] == "state.bin")
        recorded |= {"size": len(state), "sha256": hashlib.sha256(state).hexdigest()}
    if change is not None:
        change(document)
    content = json.dumps(document).encode() if manifest is None else manifest
    (folder / "manifest.json").write_bytes(content)
    config = json.loads((folder / "config.json").read_bytes())
    config["estimator_config"]["state_snapshot"] = {
        "path": str(folder),
        "sha256": hashlib.sha256(content).hexdigest(),
        "on_tune": "continue",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return config


def edited(content, edit):
    """A state with its arrays changed: `edit` gets {"store (layout)": arrays}."""
    parts = STATES.decode(content)
    edit({part.name: part.arrays for part in parts})
    # Written by hand: values out of their bounds are part of what is tried.
    chunks = [struct.pack("<Q", len(parts))]
    for part in parts:
        code = next(code for code, layout in STATES.layouts.items() if layout.name == part.layout.name)
        chunks.append(bytes((STATES.stores.index(part.store), code)))
        for item in part.layout.fields:
            array = part.arrays[item.name]
            if isinstance(item.shape[0], str):
                chunks.append(struct.pack("<Q", len(array)))
            chunks.append(array.tobytes())
    return b"".join(chunks)
