"""What is staged beside an engine that is observed: the launch context, the frozen observers, the importer.

Source: collector.md sections 8.3 and 8.4, onboarding.md section 6.2 (preview files).
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fpmsdk.collect.cells import Cell
from fpmsdk.collect.instrumentation import (
    MANIFEST_FILE,
    InstrumentationBundle,
    contained_file,
    loader_binding,
    loader_path,
)
from fpmsdk.collect.observation_index import LAUNCH_SCHEMA
from fpmsdk.collect.paths import WORK
from fpmsdk.collect.probe_launch import expected_ranks
from fpmsdk.collect.render import STARTUP
from fpmsdk.documents.canonical import canonical_bytes, write_document
from fpmsdk.documents.evidence import file_meta
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.files import sha256

CONTEXT_FILE, ARCHIVE_FILE = "runtime-probe-context.json", "runtime-instrumentation.zip"
MODEL_CONFIG_FILE = "model-config.json"
BUNDLE_FOLDER = "runtime-instrumentation"
# Two endpoints of every uniform axis are the least that the engine samples.
PROBE_SAMPLING = {"max_new_token_samples": 2, "max_kv_read_token_samples": 2, "max_batch_size_samples": 2}


def launch_context(
    cell: Cell,
    launch: Mapping[str, Any],
    *,
    configuration: str,
    attempt_id: str,
    bundle_sha256: str,
    sampling: Mapping[str, int] | None,
) -> dict[str, Any]:
    """What an engine and its observers are told of one phase of an attempt.

    Parameters
    ----------
    cell: the phase.
    launch: the normalised launch facts.
    configuration, attempt_id: whose attempt it is.
    bundle_sha256: of the frozen observers.
    sampling: how little a probe samples; None for a campaign.
    """
    return {
        "schema_version": LAUNCH_SCHEMA,
        "configuration": configuration,
        "attempt_id": attempt_id,
        "phase": cell.workload_kind,
        "bundle_sha256": bundle_sha256,
        "instrumentation_binding": loader_binding(),
        "launch": dict(launch),
        "sampling": None if sampling is None else dict(sampling),
        "expected_ranks": expected_ranks(cell.topology),
    }


def require_same_context(saved: Any, expected: Mapping[str, Any], where: Path) -> None:
    """A saved context is of this attempt; the importer it froze may be an older one.

    Raises
    ------
    EvidenceError: it is of something else.
    """
    compared = dict(expected)
    if isinstance(saved, dict) and "instrumentation_binding" in saved:
        compared["instrumentation_binding"] = saved["instrumentation_binding"]
    else:
        compared.pop("instrumentation_binding")
    if saved != compared:
        raise EvidenceError(f"{where}: this launch context is not that of the attempt; probe afresh", str(where))


def stage_observers(folder: Path, bundle: InstrumentationBundle, context: Mapping[str, Any]) -> list[Path]:
    """Write the context, the archive of observers and the model's configuration into the folder of a rendered cell.

    The start script of the cell unpacks the archive after it has compared its digest.

    Returns
    -------
    The files to stage beside those of the cell.

    Raises
    ------
    EvidenceError: observers or configuration changed since they were recorded.
    OSError: a file cannot be written.
    """
    for name, content in model_config_files(context["launch"]["model_config"]).items():
        (folder / name).write_bytes(content)
    archive = folder / ARCHIVE_FILE
    with zipfile.ZipFile(archive, "w", compression=zipfile.ZIP_STORED) as target:
        # Fixed times: equal bundles make equal archives.
        target.writestr(zipfile.ZipInfo(MANIFEST_FILE), canonical_bytes(bundle.manifest))
        for name, digest in bundle.files.items():
            content = contained_file(bundle.root, name).read_bytes()
            if sha256(content) != digest:
                raise EvidenceError(f"{bundle.root / name}: was changed since it was frozen", str(bundle.root / name))
            target.writestr(zipfile.ZipInfo(name), content)
    write_document(folder / CONTEXT_FILE, context)
    with open(folder / STARTUP, "a", encoding="utf-8") as script:
        script.write(
            _UNPACKING.format(archive=f"{WORK}/{ARCHIVE_FILE}", digest=file_meta(archive)["sha256"], work=WORK)
        )
    return [archive, folder / CONTEXT_FILE, loader_path()]


def unpack_observers(archive: Path, folder: Path) -> Path:
    """Unpack staged observers as the start script does; the path of their manifest.

    Raises
    ------
    EvidenceError: a name leads out of the folder.
    """
    with zipfile.ZipFile(archive) as source:
        for name in source.namelist():
            if name.startswith("/") or ".." in name.split("/"):
                raise EvidenceError(f"{archive}: {name!r} leads out of the archive", str(archive))
        source.extractall(folder)
    return folder / MANIFEST_FILE


def model_config_files(config: Mapping[str, Any]) -> dict[str, bytes]:
    """The configuration of a model and its sidecar as they are staged, byte for byte those that were recorded.

    Raises
    ------
    OnboardError: a sidecar lies beside the configuration that the launch does not know.
    EvidenceError: other bytes than recorded.
    OSError: a file cannot be read.
    """
    path, sources = Path(config["path"]), config.get("source_files", {})
    beside = path.with_name("hf_quant_config.json")
    if beside.exists() and beside.name not in sources:
        raise OnboardError(
            f"{beside}: lies beside the model's configuration and is not recorded; add it to model_config.source_files",
            "model_config.source_files",
        )
    contents = {}
    for name, place, digest in (
        (MODEL_CONFIG_FILE, path, config["sha256"]),
        *((name, path.with_name(name), digest) for name, digest in sources.items()),
    ):
        contents[name] = place.read_bytes()
        if sha256(contents[name]) != digest:
            raise EvidenceError(f"{place}: was changed since the launch was resolved; resolve it again", str(place))
    return contents


_UNPACKING = """
# The observers, unpacked only when their archive is the frozen one.
python3 - <<'FPM_OBSERVERS'
import hashlib, zipfile
with open('{archive}', 'rb') as file:
    found = hashlib.sha256(file.read()).hexdigest()
if found != '{digest}':
    raise SystemExit('{archive}: other observers than the launch froze: ' + found)
with zipfile.ZipFile('{archive}') as source:
    for name in source.namelist():
        if name.startswith('/') or '..' in name.split('/'):
            raise SystemExit('{archive}: unsafe name ' + name)
    source.extractall('{work}/runtime-instrumentation')
FPM_OBSERVERS
export PYTHONPATH="{work}/runtime-instrumentation:{work}${{PYTHONPATH:+:$PYTHONPATH}}"
"""
