"""`manifest.json`: what a snapshot says of itself, written and read strictly. It pins every file but itself.

Source: snapshot.md section 3.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, NoReturn

import msgspec

from fpmsdk.config.schema import describe, shown
from fpmsdk.errors import StateSnapshotError
from fpmsdk.snapshot.state import STATE_ENCODING, STATE_LAYOUT_VERSION
from fpmsdk.version import __version__

SCHEMA_VERSION = 1
STATE_FILE = "state.bin"
CONFIG_FILE = "config.json"
STATE_LIMIT_BYTES = 4 * 1024**3


class RecordedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file below the snapshot."""

    path: str
    size: int
    sha256: str


class Producer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What wrote the snapshot; `engine_spec_schema_version` only for kinds with an engine specification."""

    fpmsdk_version: str
    engine_spec_schema_version: int | None
    state_encoding: str


class PerfDataEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that the fingerprint of performance data covers, see `fpmsdk.perfdb.fingerprint.Entry`."""

    kind: str
    name: str
    size_bytes: int
    sha256: str
    target: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole manifest.

    `identity` is the canonical configuration without the snapshot and without the places of files; `diagnostics` are
    what a restored model must show again; `engine_spec_sha256` and the `perf_data` fields belong to native kinds.
    """

    schema_version: int
    state_layout_version: int
    producer: Producer
    kind: str
    identity: dict[str, Any]
    diagnostics: dict[str, Any]
    readiness: dict[str, Any]
    math_library_sha256: str
    engine_spec_sha256: str | None
    perf_data_fingerprint: str | None
    perf_data_entries: list[PerfDataEntry]
    files: list[RecordedFile]


def encode_document(document: Any) -> bytes:
    """JSON text of a file in a snapshot: pure ASCII, so that names which are no text survive."""
    text = _compiled(document) or json.dumps(document, allow_nan=False).encode("ascii")
    # The compiled encoder breaks no lines, and its own option for that leaves compiled code. A name that is no text
    # makes one long line.
    with contextlib.suppress(msgspec.DecodeError):
        text = msgspec.json.format(text, indent=1)
    return text + b"\n"


def _compiled(document: Any) -> bytes | None:
    # Several times faster than the standard library, but it writes NaN as null and other scripts as they are: taken
    # only where it reads back as what was written.
    with contextlib.suppress(UnicodeError, OverflowError, msgspec.MsgspecError):
        text = msgspec.json.encode(document)
        if text.isascii() and msgspec.json.decode(text) == document:
            return text
    return None


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest."""
    return encode_document(msgspec.to_builtins(manifest))


def decode_document(content: bytes, where: str) -> dict[str, Any]:
    """The JSON object of a file in a snapshot.

    Parameters
    ----------
    where: name of the file for errors.

    Raises
    ------
    StateSnapshotError: malformed text, or no object.
    """
    try:
        document = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as fault:
        raise StateSnapshotError(f"{where}: not a JSON document: {fault or 'nested too deeply'}") from None
    if not isinstance(document, dict):
        raise StateSnapshotError(f"{where}: expected an object, found {describe(document)}")
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def decode_manifest(content: bytes, where: str) -> Manifest:
    """The manifest in some bytes; versions are compared before anything else is looked at.

    Raises
    ------
    StateSnapshotError: another version, or a field that is missing, unknown, ill-typed or impossible.
    """
    document = decode_document(content, where)
    _check_versions(document, where)
    try:
        manifest = msgspec.convert(document, type=Manifest)
    except msgspec.ValidationError as fault:
        raise StateSnapshotError(f"{where}: {fault}") from None
    _check_files(manifest.files, where)
    return manifest


def _check_versions(document: Mapping[str, Any], where: str) -> None:
    producer = document.get("producer")
    written_by = producer.get("fpmsdk_version") if isinstance(producer, Mapping) else None
    by = "" if written_by is None else f" (written by fpmsdk {shown(written_by)})"
    accepted = {"schema_version": SCHEMA_VERSION, "state_layout_version": STATE_LAYOUT_VERSION}
    for name, version in accepted.items():
        found = document.get(name)
        if type(found) is not int:
            raise StateSnapshotError(f"{where}: {name}: expected {version}, found {describe(found)}{by}")
        if found != version:
            age = "newer" if found > version else "older"
            raise StateSnapshotError(
                f"{where}: {age} version {found} of {name}, this release reads {version}{by}; use that release"
            )
    if written_by != __version__:
        raise StateSnapshotError(
            f"{where}: producer.fpmsdk_version: expected {__version__}, found {shown(written_by)}; a snapshot is "
            "restored by the version that wrote it"
        )
    encoding = producer.get("state_encoding") if isinstance(producer, Mapping) else None
    if encoding != STATE_ENCODING:
        raise StateSnapshotError(
            f"{where}: producer.state_encoding: expected {STATE_ENCODING}, found {shown(encoding)}"
        )


def _check_files(files: list[RecordedFile], where: str) -> None:
    paths = [file.path for file in files]
    for index, file in enumerate(files):
        path = PurePosixPath(file.path)
        proper = not path.is_absolute() and ".." not in path.parts and str(path) == file.path and path.parts
        if not proper or "\0" in file.path:
            raise StateSnapshotError(
                f"{where}: files[{index}].path: expected a path below the snapshot, found {shown(file.path)}"
            )
        if file.size < 0:
            raise StateSnapshotError(f"{where}: files[{index}].size: expected at least 0, found {file.size}")
    if len(set(paths)) != len(paths):
        raise StateSnapshotError(f"{where}: files: expected every path once, found a repeated one")
    if paths.count(STATE_FILE) != 1:
        raise StateSnapshotError(f"{where}: files: expected {STATE_FILE}, found {shown(paths)}")
    state = files[paths.index(STATE_FILE)]
    if state.size > STATE_LIMIT_BYTES:
        raise StateSnapshotError(
            f"{where}: {STATE_FILE}: expected at most {STATE_LIMIT_BYTES} bytes, found {shown(state.size)}"
        )
