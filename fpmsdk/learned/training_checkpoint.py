"""The training checkpoint: a forest with the exact rows and bins it was fitted on, which an online learner starts from.

A directory of `model.json`, one Parquet file of rows a store, and a manifest that pins them. Source:
regression-and-learned.md section 3.4.
"""

import io
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.online_trees import DEPTH_LIMIT
from fpmsdk.config.schema import shown
from fpmsdk.errors import LearnedModelError
from fpmsdk.files import sha256, write_directory
from fpmsdk.learned.artifact import Artifact, StoreForest, Tree, read_artifact, read_source
from fpmsdk.learned.online_seed import bin_of

SCHEMA = "aisimulate_fpm_training_checkpoint"
SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"
ARTIFACT_FILE = "model.json"
EXPORTER_VERSION = "1"
SHRINKAGE = "included_in_leaf_values"
MISSING_BIN = 255

# The content of a file of a checkpoint, by its path.
Read = Callable[[str], bytes]


class TrainingStore(NamedTuple):
    """Rows and bins that the forest of one workload kind was fitted on.

    `rows` float64 [row, feature], NaN missing; `targets` float64 [row] in the artifact's target space; `wall_time_ms`
    float64 [row]; `row_ids` int64 [row], unique; `bin_thresholds` per feature, strictly increasing, at most 254;
    `sources` tells where each row came from, empty for nothing. The rest are the trainer's settings; None is no limit.
    """

    rows: NDArray[np.float64]
    targets: NDArray[np.float64]
    wall_time_ms: NDArray[np.float64]
    row_ids: NDArray[np.int64]
    bin_thresholds: tuple[NDArray[np.float64], ...]
    learning_rate: float
    l2_regularization: float
    min_samples_leaf: int
    max_depth: int | None
    max_leaf_nodes: int | None
    sources: tuple[str, ...] = ()


class TrainingCheckpoint(NamedTuple):
    """What a checkpoint holds; stores are those of the artifact, in its order. `sha256` is that of the manifest."""

    artifact: Artifact
    identity: dict[str, Any]
    stores: dict[str, TrainingStore]
    sha256: str = ""


class _Store(msgspec.Struct, kw_only=True):
    rows_file: str
    rows_sha256: str
    row_count: Annotated[int, msgspec.Meta(ge=0)]
    bin_thresholds: list[list[float]]
    n_bins_non_missing: list[int]
    missing_values_bin_idx: int
    loss: str
    learning_rate: float
    l2_regularization: float
    min_samples_leaf: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    max_depth: Annotated[int, msgspec.Meta(ge=1)] | None
    max_leaf_nodes: Annotated[int, msgspec.Meta(ge=2)] | None


class _Manifest(msgspec.Struct, kw_only=True):
    schema: str
    schema_version: int
    artifact_file: str
    artifact_sha256: str
    identity: dict[str, Any]
    features: list[str]
    target: str
    exporter_version: str
    shrinkage: str
    stores: dict[str, _Store]


def write_training_checkpoint(path: str | os.PathLike[str], checkpoint: TrainingCheckpoint) -> str:
    """Write a checkpoint into a new directory, whole or not at all; returns the SHA-256 of its manifest.

    Raises
    ------
    FileExistsError: something is at `path`.
    OSError: it cannot be written.

    Source: regression-and-learned.md section 3.4.

    Example
    -------
    >>> import tempfile
    >>> folder = tempfile.mkdtemp() + "/checkpoint"
    >>> store = TrainingStore(np.array([[1.0], [2.0]]), np.array([5.0, 7.0]), np.array([5.0, 7.0]), np.array([0, 1]),
    ...     (np.array([1.5]),), 0.1, 0.0, 1, None, None)
    >>> artifact = Artifact("decode", "ms", ("num_decode_requests",), {"pure_decode": StoreForest(6.0, ())}, {})
    >>> digest = write_training_checkpoint(folder, TrainingCheckpoint(artifact, {}, {"pure_decode": store}))
    >>> read_training_checkpoint(folder).stores["pure_decode"].targets.tolist()
    [5.0, 7.0]
    """
    artifact = checkpoint.artifact
    files = {ARTIFACT_FILE: artifact.to_json_bytes()}
    stores = {}
    for kind, store in checkpoint.stores.items():
        name = f"{kind}.rows.parquet"
        files[name] = _rows_bytes(store)
        stores[kind] = _Store(
            rows_file=name,
            rows_sha256=sha256(files[name]),
            row_count=len(store.rows),
            bin_thresholds=[limits.tolist() for limits in store.bin_thresholds],
            n_bins_non_missing=[len(limits) + 1 for limits in store.bin_thresholds],
            missing_values_bin_idx=MISSING_BIN,
            loss="squared_error",
            learning_rate=store.learning_rate,
            l2_regularization=store.l2_regularization,
            min_samples_leaf=store.min_samples_leaf,
            max_depth=store.max_depth,
            max_leaf_nodes=store.max_leaf_nodes,
        )
    manifest = _Manifest(
        schema=SCHEMA,
        schema_version=SCHEMA_VERSION,
        artifact_file=ARTIFACT_FILE,
        artifact_sha256=sha256(files[ARTIFACT_FILE]),
        identity=checkpoint.identity,
        features=list(artifact.features),
        target=artifact.target,
        exporter_version=EXPORTER_VERSION,
        shrinkage=SHRINKAGE,
        stores=stores,
    )
    # Keys are sorted and the manifest is last: until it is there, there is no checkpoint.
    content = json.dumps(msgspec.to_builtins(manifest), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    write_directory(path, files | {MANIFEST_FILE: content})
    return sha256(content)


def read_training_checkpoint(path: str | os.PathLike[str], read: Read = read_source) -> TrainingCheckpoint:
    """Read a checkpoint and verify every digest, dimension and rule.

    Parameters
    ----------
    path: the directory.
    read: gives the content of a file by its path.

    Raises
    ------
    LearnedModelError: it is no such checkpoint, or breaks a rule; names the field or the file.
    PerfDataNotAvailableError: a file cannot be read.

    Source: regression-and-learned.md section 3.4.
    """
    folder = os.fspath(path)
    content = read(os.path.join(folder, MANIFEST_FILE))
    manifest = _decoded(content, folder)
    artifact_bytes = read_pinned(folder, manifest.artifact_file, manifest.artifact_sha256, "artifact_sha256", read)
    artifact = read_artifact(artifact_bytes)
    _require(manifest.features == list(artifact.features), folder, "features", artifact.features, manifest.features)
    _require(manifest.target == artifact.target, folder, "target", artifact.target, manifest.target)
    _require(manifest.shrinkage == SHRINKAGE, folder, "shrinkage", SHRINKAGE, manifest.shrinkage)
    _require(
        artifact.identity in (None, manifest.identity), folder, "identity", "that of the artifact", manifest.identity
    )
    _require(
        set(manifest.stores) == set(artifact.stores), folder, "stores", list(artifact.stores), sorted(manifest.stores)
    )
    stores = {}
    for kind in artifact.stores:
        document = manifest.stores[kind]
        where = f"stores.{kind}"
        _check_settings(document, folder, where, len(artifact.features))
        rows = read_pinned(folder, document.rows_file, document.rows_sha256, f"{where}.rows_sha256", read)
        stores[kind] = _read_store(document, rows, folder, where, len(artifact.features), artifact.target)
        _check_trees(artifact.stores[kind], stores[kind], folder, where)
    return TrainingCheckpoint(artifact, manifest.identity, stores, sha256(content))


def checkpoint_error(folder: str, field: str, message: str) -> LearnedModelError:
    """The error for a field of the checkpoint in a directory."""
    return LearnedModelError(f"learned forward-pass model: {folder}: {field}: {message}", field)


def read_pinned(folder: str, name: str, digest: str, field: str, read: Read) -> bytes:
    """The content of a file that a manifest pins.

    Raises
    ------
    LearnedModelError: the name leaves the directory, or the content has another digest.
    PerfDataNotAvailableError: it cannot be read.
    """
    if not name or name != os.path.basename(name) or name in (".", "..") or "\0" in name:
        raise checkpoint_error(folder, field, f"expected the name of a file in the directory, found {shown(name)}")
    content = read(os.path.join(folder, name))
    if sha256(content) != digest:
        raise checkpoint_error(
            folder, field, f"{name}: expected SHA-256 {shown(digest)}, found {sha256(content)}; the file is damaged"
        )
    return content


def _decoded(content: bytes, folder: str) -> _Manifest:
    try:
        header = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise checkpoint_error(folder, MANIFEST_FILE, f"invalid JSON: {fault}") from None
    _require(header.get("schema") == SCHEMA, folder, "schema", SCHEMA, header.get("schema"))
    version = header.get("schema_version")
    _require(type(version) is int and version == SCHEMA_VERSION, folder, "schema_version", SCHEMA_VERSION, version)
    try:
        return msgspec.convert(header, type=_Manifest)
    except msgspec.ValidationError as fault:
        message, _, place = str(fault).partition(" - at `$")
        raise checkpoint_error(folder, place.strip("`.") or MANIFEST_FILE, message) from None


def _require(holds: bool, folder: str, field: str, accepted: Any, found: Any) -> None:
    if not holds:
        raise checkpoint_error(folder, field, f"expected {shown(accepted)}, found {shown(found)}")


def _check_settings(store: _Store, folder: str, where: str, num_features: int) -> None:
    _require(store.loss == "squared_error", folder, f"{where}.loss", "squared_error", store.loss)
    missing = store.missing_values_bin_idx
    _require(missing == MISSING_BIN, folder, f"{where}.missing_values_bin_idx", MISSING_BIN, missing)
    for name, least in (("learning_rate", 5e-324), ("l2_regularization", 0.0)):
        value = getattr(store, name)
        accepted = "a finite number above 0" if least else "a finite number of at least 0"
        _require(math.isfinite(value) and value >= least, folder, f"{where}.{name}", accepted, value)
    for name in ("bin_thresholds", "n_bins_non_missing"):
        found = len(getattr(store, name))
        _require(found == num_features, folder, f"{where}.{name}", f"{num_features} features", found)
    for feature, (limits, bins) in enumerate(zip(store.bin_thresholds, store.n_bins_non_missing, strict=True)):
        place = f"{where}.bin_thresholds[{feature}]"
        _require(bins == len(limits) + 1, folder, f"{where}.n_bins_non_missing[{feature}]", len(limits) + 1, bins)
        _require(bins <= MISSING_BIN, folder, place, f"at most {MISSING_BIN - 1} thresholds", len(limits))
        array = np.array(limits, np.float64)
        increasing = bool(np.isfinite(array).all() and (np.diff(array) > 0).all())
        _require(increasing, folder, place, "finite, strictly increasing numbers", limits)


def _read_store(
    store: _Store, content: bytes, folder: str, where: str, num_features: int, target: str
) -> TrainingStore:
    import pyarrow
    import pyarrow.parquet

    names = ["row_id", "y", "wall_time_ms", *(f"x{i}" for i in range(num_features))]
    place = f"{where}.rows_file"
    try:
        table = pyarrow.parquet.read_table(io.BytesIO(content), columns=[*names, "source_json"])
        columns = {name: table.column(name).to_numpy() for name in names}
        sources = tuple(text or "" for text in table.column("source_json").to_pylist())
    except (pyarrow.ArrowException, KeyError, ValueError, OSError) as fault:
        raise checkpoint_error(folder, place, f"{store.rows_file}: {fault}") from None
    count = len(table)
    _require(count == store.row_count, folder, f"{where}.row_count", count, store.row_count)
    _require(count > 0, folder, place, "at least one row", count)
    ids = columns["row_id"]
    proper = ids.dtype.kind in "iu" and bool((ids <= 2**62).all() and (ids >= 0).all())
    _require(proper, folder, f"{place}, row_id", "integers from 0 to 2^62", str(ids.dtype))
    _require(len(np.unique(ids)) == count, folder, f"{place}, row_id", "unique ids", "a repeated one")
    floats = {name: array.astype(np.float64) for name, array in columns.items() if name != "row_id"}
    wall = floats["wall_time_ms"]
    positive = bool(np.isfinite(wall).all() and (wall > 0).all())
    _require(positive, folder, f"{place}, wall_time_ms", "finite numbers above 0", "another")
    rows = np.ascontiguousarray(np.stack([floats[f"x{i}"] for i in range(num_features)], axis=1))
    _require(not np.isinf(rows).any(), folder, f"{place}, features", "finite numbers or NaN", "infinity")
    expected = [math.log(value) for value in wall.tolist()] if target == "log_ms" else wall.tolist()
    for row, (found, wanted) in enumerate(zip(floats["y"].tolist(), expected, strict=True)):
        # A logarithm of another math library may differ in the last places.
        if not abs(found - wanted) <= 1e-12 * max(abs(wanted), 1.0):
            raise checkpoint_error(folder, f"{place}, y[{row}]", f"expected {wanted}, from wall_time_ms, found {found}")
    return TrainingStore(
        rows,
        floats["y"],
        wall,
        ids.astype(np.int64),
        tuple(np.array(limits, np.float64) for limits in store.bin_thresholds),
        store.learning_rate,
        store.l2_regularization,
        store.min_samples_leaf,
        store.max_depth,
        store.max_leaf_nodes,
        sources,
    )


def _check_trees(forest: StoreForest, store: TrainingStore, folder: str, where: str) -> None:
    for number, tree in enumerate(forest.trees):
        place = f"{where}.trees[{number}]"
        reached, depth = _shape(tree)
        _require(reached == len(tree.left), folder, place, f"{len(tree.left)} reachable nodes", reached)
        deepest = DEPTH_LIMIT if store.max_depth is None else min(store.max_depth, DEPTH_LIMIT)
        _require(depth <= deepest, folder, place, f"a depth of at most {deepest}", depth)
        limit = store.max_leaf_nodes
        _require(limit is None or tree.num_leaves <= limit, folder, place, f"at most {limit} leaves", tree.num_leaves)
        for node in np.flatnonzero(tree.left >= 0):
            feature = int(tree.feature[node])
            if bin_of(store.bin_thresholds[feature], float(tree.threshold[node])) < 0:
                raise checkpoint_error(
                    folder,
                    f"{place}, node {node}",
                    f"threshold {tree.threshold[node]} is not in the bin mapper of feature {feature}",
                )


def _shape(tree: Tree) -> tuple[int, int]:
    # (nodes that can be reached, depth)
    reached, deepest, waiting = 0, 0, [(0, 0)]
    while waiting:
        node, depth = waiting.pop()
        reached += 1
        deepest = max(deepest, depth)
        if tree.left[node] >= 0:
            waiting += [(int(tree.left[node]), depth + 1), (int(tree.right[node]), depth + 1)]
    return reached, deepest


def _rows_bytes(store: TrainingStore) -> bytes:
    import pyarrow
    import pyarrow.parquet

    sources = store.sources or ("",) * len(store.rows)
    columns: Mapping[str, Any] = {
        "row_id": pyarrow.array(store.row_ids.astype(np.uint64)),
        "y": pyarrow.array(store.targets),
        "wall_time_ms": pyarrow.array(store.wall_time_ms),
        **{f"x{i}": pyarrow.array(store.rows[:, i]) for i in range(store.rows.shape[1])},
        "source_json": pyarrow.array(list(sources), pyarrow.string()),
    }
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink, compression="zstd")
    return sink.getvalue()
