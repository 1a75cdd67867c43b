"""The receipt of imported observers inside an observation: which code observed.

Source: collector.md sections 8.3 and 8.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from fpmsdk.collect.cache_pool import positive
from fpmsdk.collect.instrumentation import IMPORTS_SCHEMA, InstrumentationBundle
from fpmsdk.errors import EvidenceError

_CLASS_FIELDS = {"worker": "worker_class", "scheduler": "scheduler_class"}


def check_imports(record: Mapping[str, Any], import_binding: Mapping[str, Any], bundle: InstrumentationBundle) -> None:
    """Compare the receipt in a record with what the launch froze; no code is imported.

    Parameters
    ----------
    record: an observation whose binding was compared already.
    import_binding: `schema_version` and `loader_sha256` of the launch.
    bundle: the frozen observers.

    Raises
    ------
    EvidenceError: other code was imported than the launch froze, or that cannot be told; names the field.
    """
    if set(import_binding) != {"schema_version", "loader_sha256"} or import_binding["schema_version"] != IMPORTS_SCHEMA:
        raise EvidenceError(f"launch instrumentation_binding: expected {IMPORTS_SCHEMA} with a loader_sha256")
    receipt = record.get("instrumentation_binding")
    if not isinstance(receipt, dict) or receipt.get("status") != "verified" or receipt.get("error"):
        raise EvidenceError("instrumentation_binding: expected a verified import, found none")
    expected = {
        **import_binding,
        **{name: record.get(name) for name in ("attempt_id", "configuration", "phase", "bundle_sha256")},
        "expected_bundle_sha256": bundle.sha256,
        "files": dict(bundle.files),
    }
    for name, value in expected.items():
        if receipt.get(name) != value:
            raise EvidenceError(
                f"instrumentation_binding.{name}: expected {value!r} as frozen, found {receipt.get(name)!r}"
            )
    _check_process(receipt, record.get("cpu_affinity_observation"))
    _check_modules(receipt, bundle)
    field = _CLASS_FIELDS[record["kind"]]
    classes = receipt.get("classes")
    selected = bundle.manifest[field]
    if not isinstance(classes, dict) or classes.get(field) != selected:
        raise EvidenceError(f"instrumentation_binding.classes.{field}: expected {selected!r}, found {classes!r}")
    if selected.rpartition(".")[0] not in receipt["imports"]:
        raise EvidenceError(f"instrumentation_binding.imports: the module of {selected!r} was not imported")


def _check_process(receipt: Mapping[str, Any], affinity: Any) -> None:
    positive(receipt.get("pid"), "instrumentation_binding.pid")
    host = receipt.get("hostname")
    if not isinstance(host, str) or not host.strip():
        raise EvidenceError(f"instrumentation_binding.hostname: expected a name, found {host!r}")
    for name in ("pid", "hostname"):
        told = affinity.get(name) if isinstance(affinity, dict) else None
        if told is not None and told != receipt[name]:
            raise EvidenceError(
                f"instrumentation_binding.{name}: {receipt[name]!r}, but CPUs were observed in {told!r}"
            )


def _check_modules(receipt: Mapping[str, Any], bundle: InstrumentationBundle) -> None:
    root, imports = receipt.get("root"), receipt.get("imports")
    if not isinstance(root, str) or not root.startswith("/") or ".." in PurePosixPath(root).parts:
        raise EvidenceError(f"instrumentation_binding.root: expected an absolute folder, found {root!r}")
    if not isinstance(imports, dict) or not imports:
        raise EvidenceError("instrumentation_binding.imports: nothing was imported")
    for module, told in imports.items():
        where = f"instrumentation_binding.imports[{module}]"
        base = module.replace(".", "/")
        name = told.get("file") if isinstance(told, dict) else None
        if name not in (f"{base}.py", f"{base}/__init__.py") or name not in bundle.files:
            raise EvidenceError(f"{where}.file: {name!r} is no file of that module in the bundle")
        if told.get("sha256") != bundle.files[name]:
            raise EvidenceError(f"{where}.sha256: expected {bundle.files[name]}, found {told.get('sha256')!r}")
        path = told.get("path")
        if not isinstance(path, str) or PurePosixPath(path) != PurePosixPath(root) / name:
            raise EvidenceError(f"{where}.path: expected {name} below {root}, found {path!r}")
