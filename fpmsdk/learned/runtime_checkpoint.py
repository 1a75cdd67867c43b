"""The runtime checkpoint of an online learner: its published forests, and the state that learning goes on from.

A directory of `model.json`, `state.bin` and a manifest that pins them. Source: regression-and-learned.md section 4.7.
"""

import json
import os
from typing import Any, NamedTuple

import msgspec

from fpmsdk.config.schema import shown
from fpmsdk.files import sha256
from fpmsdk.learned.artifact import Artifact, read_artifact, read_source
from fpmsdk.learned.training_checkpoint import (
    ARTIFACT_FILE,
    MANIFEST_FILE,
    Read,
    checkpoint_error,
    read_pinned,
)

SCHEMA = "aisimulate_fpm_online_checkpoint"
SCHEMA_VERSION = 5
STATE_FILE = "state.bin"


class RuntimeState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `state.bin`.

    `controls` are those of `estimator_config.fpm_learned` without its paths; `source_path` and `source_sha256` name the
    training checkpoint, the path empty inside a saved state; `parts` are the arrays, as their registry encodes them.
    """

    controls: dict[str, Any]
    identity: dict[str, Any]
    source_path: str
    source_sha256: str
    parts: bytes


class RuntimeCheckpoint(NamedTuple):
    """What a checkpoint holds; `sha256` is that of its manifest."""

    artifact: Artifact
    state: RuntimeState
    sha256: str = ""


class _Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: str
    schema_version: int
    anchor_manifest_sha256: str
    artifact_file: str
    artifact_sha256: str
    identity: dict[str, Any]
    state_file: str
    state_sha256: str


def runtime_files(checkpoint: RuntimeCheckpoint) -> dict[str, bytes]:
    """The files of a checkpoint by name, the manifest last. Equal state gives equal bytes.

    Example
    -------
    >>> state = RuntimeState(controls={}, identity={}, source_path="", source_sha256="0" * 64, parts=b"")
    >>> list(runtime_files(RuntimeCheckpoint(Artifact("decode", "ms", ("num_decode_requests",), {}, {}), state)))
    ['model.json', 'state.bin', 'manifest.json']
    """
    artifact = checkpoint.artifact.to_json_bytes()
    state = msgspec.msgpack.encode(checkpoint.state, order="sorted")
    manifest = _Manifest(
        schema=SCHEMA,
        schema_version=SCHEMA_VERSION,
        anchor_manifest_sha256=checkpoint.state.source_sha256,
        artifact_file=ARTIFACT_FILE,
        artifact_sha256=sha256(artifact),
        identity=checkpoint.state.identity,
        state_file=STATE_FILE,
        state_sha256=sha256(state),
    )
    content = json.dumps(msgspec.to_builtins(manifest), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return {ARTIFACT_FILE: artifact, STATE_FILE: state, MANIFEST_FILE: content.encode()}


def is_runtime_manifest(content: bytes) -> bool:
    """Whether a manifest says that it is one of a runtime checkpoint, of whatever version.

    Example
    -------
    >>> is_runtime_manifest(b'{"schema": "aisimulate_fpm_online_checkpoint", "schema_version": 9}')
    True
    """
    try:
        return bool(msgspec.json.decode(content, type=dict[str, Any]).get("schema") == SCHEMA)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def read_runtime_checkpoint(path: str | os.PathLike[str], read: Read = read_source) -> RuntimeCheckpoint:
    """Read a runtime checkpoint and verify its digests; what is in its arrays is for the model to check.

    Parameters
    ----------
    path: the directory.
    read: gives the content of a file by its path.

    Raises
    ------
    LearnedModelError: it is no such checkpoint, of another version, or damaged; names the field or the file.
    PerfDataNotAvailableError: a file cannot be read.

    Source: regression-and-learned.md section 4.7.
    """
    folder = os.fspath(path)
    content = read(os.path.join(folder, MANIFEST_FILE))
    manifest = _decoded(content, folder)
    artifact = read_artifact(
        read_pinned(folder, manifest.artifact_file, manifest.artifact_sha256, "artifact_sha256", read)
    )
    state_bytes = read_pinned(folder, manifest.state_file, manifest.state_sha256, "state_sha256", read)
    try:
        state = msgspec.msgpack.decode(state_bytes, type=RuntimeState)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise checkpoint_error(folder, manifest.state_file, str(fault)) from None
    for field, found, expected in (
        ("identity", state.identity, manifest.identity),
        ("source_sha256", state.source_sha256, manifest.anchor_manifest_sha256),
    ):
        if found != expected:
            raise checkpoint_error(
                folder, f"{manifest.state_file}, {field}", f"expected {shown(expected)}, found {shown(found)}"
            )
    return RuntimeCheckpoint(artifact, state, sha256(content))


def _decoded(content: bytes, folder: str) -> _Manifest:
    try:
        document = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise checkpoint_error(folder, MANIFEST_FILE, f"invalid JSON: {fault}") from None
    if document.get("schema") != SCHEMA:
        raise checkpoint_error(folder, "schema", f"expected {SCHEMA!r}, found {shown(document.get('schema'))}")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION or type(version) is not int:
        older = type(version) is int and 1 <= version < SCHEMA_VERSION
        advice = "restart from the training checkpoint" if older else "use the release that wrote it"
        raise checkpoint_error(folder, "schema_version", f"expected {SCHEMA_VERSION}, found {shown(version)}; {advice}")
    try:
        return msgspec.convert(document, type=_Manifest)
    except msgspec.ValidationError as fault:
        message, _, place = str(fault).partition(" - at `$")
        raise checkpoint_error(folder, place.strip("`.") or MANIFEST_FILE, message) from None
