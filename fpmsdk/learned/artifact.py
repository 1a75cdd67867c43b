"""The forest artifact: reading with every rule checked, writing, and the compiled form that serves.

What may be done with a forest is elsewhere. Source: regression-and-learned.md section 3.1.
"""

import math
import os
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.features import ROLES, WORKLOAD_KINDS
from fpmsdk._ext.forest import Forest
from fpmsdk._ext.forest_features import NAMES
from fpmsdk.config.schema import shown
from fpmsdk.errors import LearnedModelError, PerfDataNotAvailableError
from fpmsdk.files import read_regular

SCHEMA = "aic_fpm_learned_forward_perf"
SCHEMA_VERSION = 1
TARGETS = ("log_ms", "ms")
ARTIFACT_LIMIT_BYTES = 1024**3

# Stores that a worker of each type can have.
STORES_OF = {"prefill": ("pure_prefill",), "decode": ("pure_decode",), "aggregated": WORKLOAD_KINDS}


class Tree(NamedTuple):
    """Nodes of one tree as parallel arrays; node 0 is the root.

    `left` and `right` int32 (both negative at leaves), `feature` int16, `threshold` and `value` float64, `missing_left`
    uint8. A node goes left when its feature is at most the threshold.
    """

    left: NDArray[np.int32]
    right: NDArray[np.int32]
    feature: NDArray[np.int16]
    threshold: NDArray[np.float64]
    value: NDArray[np.float64]
    missing_left: NDArray[np.uint8]

    @property
    def num_leaves(self) -> int:
        """Leaves, reachable or not."""
        return int(np.count_nonzero(self.left < 0))


class StoreForest(NamedTuple):
    """The forest of one workload kind; `baseline` and leaf values are in the space of the target."""

    baseline: float
    trees: tuple[Tree, ...]

    def compiled(self, target: str) -> Forest:
        """The form that answers; `target` is the artifact's.

        Example
        -------
        >>> StoreForest(2.0, ()).compiled("ms").predict([])
        2.0
        """
        sizes = [len(tree.left) for tree in self.trees]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])[: len(sizes)]
        shift = np.repeat(starts, sizes).astype(np.int32)
        left, right = _joined(self.trees, "left", np.int32), _joined(self.trees, "right", np.int32)
        inner = left >= 0
        return Forest(
            self.baseline,
            target == "log_ms",
            starts.astype(np.int32),
            _joined(self.trees, "feature", np.int16),
            _joined(self.trees, "threshold", np.float64),
            np.where(inner, left + shift, -1).astype(np.int32),
            np.where(inner, right + shift, -1).astype(np.int32),
            _joined(self.trees, "value", np.float64),
            _joined(self.trees, "missing_left", np.uint8),
        )


class Artifact(NamedTuple):
    """A learned forest per workload kind, with what it was trained for.

    `stores` is in the order of workload kinds. `identity` in `metadata` is the deployment that it was trained on.
    """

    worker_type: str
    target: str
    features: tuple[str, ...]
    stores: dict[str, StoreForest]
    metadata: dict[str, Any]

    @property
    def identity(self) -> dict[str, Any] | None:
        """The deployment that the forests were trained on; None when the artifact does not say."""
        return self.metadata.get("identity")

    def to_json_bytes(self) -> bytes:
        """The artifact as a file holds it; reading it gives the same forests, bit for bit.

        Example
        -------
        >>> artifact = Artifact("decode", "ms", ("num_decode_requests",), {"pure_decode": StoreForest(2.0, ())}, {})
        >>> read_artifact(artifact.to_json_bytes()).stores["pure_decode"].baseline
        2.0
        """
        stores = {
            kind: _StoreDocument(store.baseline, [_tree_document(tree) for tree in store.trees])
            for kind, store in self.stores.items()
        }
        return msgspec.json.encode(
            _Document(SCHEMA, SCHEMA_VERSION, self.worker_type, self.target, list(self.features), stores, self.metadata)
        )


def read_artifact(source: bytes | str | os.PathLike[str]) -> Artifact:
    """Read an artifact and check every rule of the format.

    Parameters
    ----------
    source: the bytes of an artifact, or the path of its file.

    Raises
    ------
    LearnedModelError: it is no artifact of this version, or breaks a rule; names the place.
    PerfDataNotAvailableError: the file cannot be read.

    Source: regression-and-learned.md section 3.1.

    Example
    -------
    >>> read_artifact(b'{"schema": "other"}')
    Traceback (most recent call last):
        ...
    fpmsdk.errors.LearnedModelError: learned forward-pass model: schema: expected 'aic_fpm_learned_forward_perf', \
found 'other'
    """
    document = _decoded(source if isinstance(source, bytes) else read_source(source))
    _require(document.worker_type in ROLES, "worker_type", f"one of {', '.join(ROLES)}", document.worker_type)
    _require(document.target in TARGETS, "target", f"one of {', '.join(TARGETS)}", document.target)
    _check_features(document.features)
    if not document.stores:
        raise _error("stores", "there are none; an artifact has at least one")
    stores = {}
    for kind in document.stores:
        if kind not in WORKLOAD_KINDS:
            raise _error("stores", f"unknown store kind {shown(kind)}; expected some of {', '.join(WORKLOAD_KINDS)}")
        allowed = STORES_OF[document.worker_type]
        if kind not in allowed:
            message = f"a {document.worker_type} worker has no such store; it has {', '.join(allowed)}"
            raise _error(f"stores.{kind}", message)
    for kind in WORKLOAD_KINDS:
        if kind in document.stores:
            stores[kind] = _read_store(document.stores[kind], f"stores.{kind}", len(document.features))
    if not isinstance(document.metadata.get("identity", {}), dict | None):
        raise _error("metadata.identity", f"expected an object, found {shown(document.metadata['identity'])}")
    return Artifact(document.worker_type, document.target, tuple(document.features), stores, document.metadata)


def read_source(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a learned file.

    Raises
    ------
    LearnedModelError: no regular file, or larger than such a file may be.
    PerfDataNotAvailableError: it cannot be read.
    """
    try:
        return read_regular(path, limit_bytes=ARTIFACT_LIMIT_BYTES)
    except OSError as fault:
        raise PerfDataNotAvailableError(f"learned forward-pass model: {path} cannot be read: {fault}") from fault
    except ValueError as fault:
        raise LearnedModelError(f"learned forward-pass model: {path}: {fault}", str(path)) from None


# --- the document ---

_Index = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class _TreeDocument(msgspec.Struct):
    left: list[_Index]
    right: list[_Index]
    feature: list[_Index]
    threshold: list[float]
    value: list[float]
    missing_left: list[bool] = []


class _StoreDocument(msgspec.Struct):
    baseline: float
    trees: list[_TreeDocument]


class _Document(msgspec.Struct):
    schema: str
    schema_version: int
    worker_type: str
    target: str
    features: list[str]
    stores: dict[str, _StoreDocument]
    metadata: dict[str, Any] = {}


class _Header(msgspec.Struct):
    schema: Any = None
    schema_version: Any = None


_DECODER = msgspec.json.Decoder(_Document)

_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _decoded(content: bytes) -> _Document:
    try:
        document = _DECODER.decode(content)
    except msgspec.ValidationError as fault:
        # A newer version may be of another shape; that it is newer says more.
        _check_version(_header(content))
        message, _, place = str(fault).partition(" - at `$")
        raise _error(place.strip("`.") or "document", message) from None
    except _NO_JSON as fault:
        raise _invalid_json(fault) from None
    _check_version(_Header(document.schema, document.schema_version))
    return document


def _header(content: bytes) -> _Header:
    try:
        return msgspec.json.decode(content, type=_Header)
    except msgspec.ValidationError:  # no object at all
        return _Header()
    except _NO_JSON as fault:  # broken beyond the place where the first error was
        raise _invalid_json(fault) from None


def _invalid_json(fault: Exception) -> LearnedModelError:
    return LearnedModelError(f"learned forward-pass model: invalid JSON: {fault}", "")


def _check_version(header: _Header) -> None:
    _require(header.schema == SCHEMA, "schema", repr(SCHEMA), header.schema)
    version = header.schema_version
    is_newer = isinstance(version, int) and version > SCHEMA_VERSION
    accepted = f"{SCHEMA_VERSION}; a newer release wrote this one" if is_newer else str(SCHEMA_VERSION)
    _require(version == SCHEMA_VERSION and not isinstance(version, bool), "schema_version", accepted, version)


def _error(path: str, message: str) -> LearnedModelError:
    return LearnedModelError(f"learned forward-pass model: {path}: {message}", path)


def _require(holds: bool, path: str, accepted: str, found: Any) -> None:
    if not holds:
        raise _error(path, f"expected {accepted}, found {shown(found)}")


def _check_features(features: list[str]) -> None:
    if not features:
        raise _error("features", "there are none; an artifact has at least one")
    seen: set[str] = set()
    for position, name in enumerate(features):
        if name not in _KNOWN:
            raise _error(f"features[{position}]", f"unknown feature {shown(name)}")
        if name in seen:
            raise _error(f"features[{position}]", f"duplicate feature {name!r}")
        seen.add(name)


_KNOWN = frozenset(NAMES)


def _read_store(document: _StoreDocument, path: str, num_features: int) -> StoreForest:
    _require(math.isfinite(document.baseline), f"{path}.baseline", "a finite number", document.baseline)
    trees = [_read_tree(tree, f"{path}.trees[{i}]", num_features) for i, tree in enumerate(document.trees)]
    return StoreForest(document.baseline, tuple(trees))


def _read_tree(document: _TreeDocument, path: str, num_features: int) -> Tree:
    size = len(document.left)
    if size == 0:
        raise _error(path, "a tree has at least one node, found none")
    for name in ("right", "feature", "threshold", "value", "missing_left"):
        found = len(getattr(document, name))
        if found != size and not (name == "missing_left" and found == 0):
            raise _error(f"{path}.{name}", f"expected {size} nodes as in left, found {found}")
    left, right = np.array(document.left, np.int32), np.array(document.right, np.int32)
    feature = np.array(document.feature, np.int32)
    threshold, value = np.array(document.threshold), np.array(document.value)
    missing_left = np.array(document.missing_left or [True] * size, np.uint8)
    _check_nodes(path, left, right, feature, num_features)
    is_leaf = left < 0
    _first(path, ~is_leaf & ~np.isfinite(threshold), "the threshold is not finite")
    _first(path, is_leaf & ~np.isfinite(value), "the leaf value is not finite")
    return Tree(left, right, np.where(is_leaf, 0, feature).astype(np.int16), threshold, value, missing_left)


def _check_nodes(
    path: str, left: NDArray[np.int32], right: NDArray[np.int32], feature: NDArray[np.int32], num_features: int
) -> None:
    size = len(left)
    _first(path, ((left < 0) != (right < 0)) | (left >= size) | (right >= size), f"children out of range 0..{size - 1}")
    inner = left >= 0
    parent = np.arange(size)
    _first(path, inner & ((left <= parent) | (right <= parent)), "a child's index must be larger than its parent's")
    _first(path, inner & ((feature < 0) | (feature >= num_features)), f"feature out of range 0..{num_features - 1}")
    parents = np.bincount(np.concatenate([left[inner], right[inner]]), minlength=size)
    _first(path, parents > 1, "the node has more than one parent")


def _first(path: str, broken: NDArray[np.bool_], message: str) -> None:
    if broken.any():
        raise _error(f"{path}, node {int(np.argmax(broken))}", message)


def _tree_document(tree: Tree) -> _TreeDocument:
    return _TreeDocument(
        tree.left.tolist(),
        tree.right.tolist(),
        tree.feature.tolist(),
        tree.threshold.tolist(),
        tree.value.tolist(),
        tree.missing_left.astype(bool).tolist(),
    )


def _joined(trees: tuple[Tree, ...], name: str, dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *(getattr(tree, name) for tree in trees)]).astype(dtype, copy=False)
