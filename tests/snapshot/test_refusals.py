"""Everything that a restore refuses, each with its class and a message that names the first difference.

Digests are made to fit again wherever the case is not the digest itself. Source: snapshot.md sections 6, 8 and 10.
"""

import copy
import hashlib
import json
import os
import shutil
import struct
import sys

import numpy as np
import pytest

from fpmsdk import ForwardPassPerfModel, FpmBatch, errors, inspect_state_snapshot, sample
from fpmsdk._ext import linear_store
from fpmsdk.perfmodel import restoring
from tests.snapshot.kinds import THRESHOLD, iterations, prepare, regression
from tests.snapshot.tampering import copied, edited, repinned

SNAPSHOT = "estimator_config.state_snapshot"


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory):
    """A saved state by kind; `(folder, config)` each."""
    folder = tmp_path_factory.mktemp("kinds")
    configs = prepare(folder / "data")
    wanted = {
        "regression": regression(),
        "threshold": regression(linear={"update_policy": THRESHOLD}),
        "untuned": regression(),
        "spline": configs["regression spline"],
        "spline periodic": configs["regression spline periodic"],
        "spline untuned": configs["regression spline"],
        "fixed": configs["op_level fixed"],
        "dynamic": configs["op_level dynamic_local"],
        "hybrid": configs["op_level hybrid"],
        "forward": configs["fpm_interpolation hybrid"],
        "profile": configs["execution_profile"],
    }
    saved = {}
    for name, config in wanted.items():
        model = ForwardPassPerfModel.best_available(config)
        if "untuned" not in name:
            model.tune_with_fpms([[rank] for rank in iterations(config, "train", 333)])
        saved[name] = (folder / name, model.save_state_snapshot(folder / name))
    return saved


@pytest.fixture
def copy_of(snapshots, tmp_path):
    def make(name):
        folder = tmp_path / "copy"
        return folder, copied(snapshots[name][0], folder)

    return make


def refused(config, message, error=errors.StateSnapshotError):
    with pytest.raises(error, match=message):
        ForwardPassPerfModel.best_available(config)


# --- rules of the configuration ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"estimation_mode": "auto"}, "needs an explicit estimation_mode"),
        ({"fallback_policy": "allow"}, "needs fallback_policy deny"),
        ({"fallback_policy": "regression"}, "needs fallback_policy deny"),
    ],
)
def test_rules_come_before_any_file(changes, message):
    section = {"state_snapshot": {"path": "/nowhere"}}
    config = sample.MODEL | {"estimator_config": section} | changes
    refused(config, message, errors.ConfigError)


@pytest.mark.parametrize(
    "section",
    [None, [], "/s", {"sha256": "0" * 64}, {"path": "/s", "bogus": 1}, {"path": "/s", "on_tune": "maybe"}, {"path": 1}],
)
def test_a_malformed_section_is_a_configuration_error(section):
    refused(sample.MODEL | {"estimator_config": {"state_snapshot": section}}, SNAPSHOT, errors.ConfigError)


# --- where the snapshot is ---


def ways_to_read(folder, config):
    return {
        "state_snapshot=": lambda: ForwardPassPerfModel.best_available(state_snapshot=folder),
        "config=": lambda: ForwardPassPerfModel.best_available(config),
        "inspection": lambda: inspect_state_snapshot(folder),
    }


@pytest.mark.parametrize("way", ["state_snapshot=", "config=", "inspection"])
@pytest.mark.parametrize("kind", ["regression", "fixed"])
def test_a_missing_snapshot_is_a_missing_file(copy_of, way, kind):
    folder, config = copy_of(kind)
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError) as caught:
        ways_to_read(folder, config)[way]()
    assert isinstance(caught.value, errors.StateSnapshotIOError)
    assert not isinstance(caught.value, errors.PerfDataNotAvailableError)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_missing_manifest_is_a_missing_file_with_and_without_a_digest(copy_of, pinned):
    folder, config = copy_of("regression")
    (folder / "manifest.json").unlink()
    if not pinned:
        del config["estimator_config"]["state_snapshot"]["sha256"]
    refused(config, "manifest.json", FileNotFoundError)


def test_a_path_below_a_file_is_no_directory(copy_of):
    folder, config = copy_of("regression")
    config["estimator_config"]["state_snapshot"]["path"] = str(folder / "state.bin")
    refused(config, "state.bin/manifest.json", NotADirectoryError)


def test_a_copied_directory_does_not_restore_the_original(snapshots, tmp_path):
    folder, _ = snapshots["regression"]
    shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(ValueError, match=f"is not the directory that its configuration pins, {folder}"):
        ForwardPassPerfModel.best_available(state_snapshot=tmp_path / "copy")


def test_a_configuration_that_names_a_copy_restores_the_copy(copy_of):
    folder, config = copy_of("regression")
    assert ForwardPassPerfModel.best_available(config).readiness_report()["ready"]
    assert ForwardPassPerfModel.best_available(state_snapshot=folder).readiness_report()["ready"]


def test_an_alias_is_the_same_directory(snapshots, tmp_path):
    folder, config = snapshots["regression"]
    alias = tmp_path / "alias"
    alias.symlink_to(folder)
    ForwardPassPerfModel.best_available(state_snapshot=alias)
    config = copy.deepcopy(config)
    config["estimator_config"]["state_snapshot"]["path"] = str(alias)
    model = ForwardPassPerfModel.best_available(config)
    assert model.diagnostics()["provenance"]["config"]["estimator_config"]["state_snapshot"]["path"] == str(alias)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"estimator_config": {}}', b'{"estimator_config": {"state_snapshot": {}}}']
)
def test_a_directory_without_a_configuration_of_a_snapshot_is_refused(copy_of, content):
    folder, _ = copy_of("regression")
    (folder / "config.json").write_bytes(content)
    with pytest.raises(errors.StateSnapshotError, match="config.json"):
        ForwardPassPerfModel.best_available(state_snapshot=folder)


# --- the manifest ---


def test_another_manifest_than_the_pinned_one(snapshots):
    config = copy.deepcopy(snapshots["regression"][1])
    config["estimator_config"]["state_snapshot"]["sha256"] = "0" * 64
    refused(config, "manifest.json: expected SHA-256 '0000.*', as the configuration pins it, found '[0-9a-f]{64}'")


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_a_manifest_that_is_no_regular_file_is_not_waited_for(copy_of, kind):
    folder, config = copy_of("regression")
    (folder / "manifest.json").unlink()
    (os.mkdir if kind == "directory" else os.mkfifo)(folder / "manifest.json")
    refused(config, "manifest.json: expected a regular file")


@pytest.mark.parametrize("pinned", [True, False])
def test_a_manifest_beyond_the_limit_is_not_read(copy_of, pinned):
    folder, config = copy_of("regression")
    with open(folder / "manifest.json", "r+b") as file:
        file.truncate(64 * 1024**2 + 1)
    if not pinned:
        del config["estimator_config"]["state_snapshot"]["sha256"]
    refused(config, "manifest.json: expected at most 67108864 bytes, found 67108865")
    with pytest.raises(errors.StateSnapshotError, match="expected at most 67108864 bytes"):
        inspect_state_snapshot(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2, "surprise": 1}, "newer version 2 of schema_version, this release reads 1"),
        ({"state_layout_version": 9}, "newer version 9 of state_layout_version, this release reads 2"),
        ({"schema_version": 0}, "older version 0 of schema_version"),
        ({"schema_version": True}, "schema_version: expected 1, found boolean true"),
        ({"schema_version": "1"}, "schema_version: expected 1, found string '1'"),
        ({"state_layout_version": None}, "state_layout_version: expected 2, found null"),
        ({"surprise": 1}, "surprise"),
        ({"kind": 1}, "kind"),
        ({"files": []}, "files: expected state.bin"),
        ({"kind": "op_level"}, "kind: expected regression_linear, found 'op_level'"),
    ],
)
def test_fields_of_the_manifest(copy_of, change, message):
    folder, _ = copy_of("regression")
    refused(repinned(folder, change=lambda document: document.update(change)), message)


def test_the_version_that_wrote_it_is_named(copy_of):
    folder, _ = copy_of("regression")

    def newer(document):
        document |= {"schema_version": 7, "what": "nobody knows"}
        document["producer"] = {"fpmsdk_version": "99.0", "later": True}

    config = repinned(folder, change=newer)
    refused(config, "newer version 7 of schema_version, this release reads 1 \\(written by fpmsdk '99.0'\\)")
    with pytest.raises(errors.StateSnapshotError, match="newer version 7"):
        inspect_state_snapshot(folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("fpmsdk_version", "0.0.9", "producer.fpmsdk_version: expected .*, found '0.0.9'"),
        ("state_encoding", "cbor", "producer.state_encoding: expected positional-little-endian, found 'cbor'"),
        ("surprise", 1, "surprise"),
    ],
)
def test_the_producer_is_this_release(copy_of, field, value, message):
    folder, _ = copy_of("regression")
    refused(repinned(folder, change=lambda document: document["producer"].update({field: value})), message)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"NaN", b'{"a": NaN}', b"[" * 100_000, b"5"])
def test_a_manifest_that_is_no_document(copy_of, content):
    folder, _ = copy_of("regression")
    refused(repinned(folder, manifest=content), "manifest.json")


@pytest.mark.parametrize("path", ["../state.bin", "/state.bin", "a/../b", "./a", "", ".", "a//b", "a\0b"])
def test_recorded_paths_stay_below_the_snapshot(copy_of, path):
    folder, _ = copy_of("regression")

    def add(document):
        document["files"].append({"path": path, "size": 0, "sha256": hashlib.sha256(b"").hexdigest()})

    refused(repinned(folder, change=add), "files\\[1\\].path: expected a path below the snapshot")


def test_a_path_is_recorded_once(copy_of):
    folder, _ = copy_of("regression")
    refused(
        repinned(folder, change=lambda document: document["files"].append(document["files"][0])), "expected every path"
    )


# --- identity ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "other"}, "identity.model: expected 'qwen3-small-random', found 'other'"),
        ({"worker_type": "decode", "tp": 2}, "identity.worker_type: expected 'aggregated', found 'decode'"),
        ({"attention_dp": 2}, "identity.attention_dp: expected 1, found 2"),
        ({"decoder_replay": True}, "identity.decoder_replay: expected False, found True"),
        ({"cp_size": 2}, "identity.cp_size: found 2, expected nothing"),
    ],
)
def test_the_first_differing_field_is_named(snapshots, changes, message):
    refused(snapshots["regression"][1] | changes, message)


def test_a_difference_deep_inside_is_named(snapshots):
    config = copy.deepcopy(snapshots["regression"][1])
    config["estimator_config"]["fpm_regression"]["sampling"]["bins_per_axis"] = [4, 5]
    refused(config, "identity.estimator_config.fpm_regression.sampling.bins_per_axis\\[1\\]: expected 4, found 5")


def test_types_belong_to_the_identity(copy_of):
    folder, _ = copy_of("regression")
    config = repinned(folder, change=lambda document: document["identity"].update(tp=1.0))
    refused(config, "identity.tp: expected 1.0, found 1")


def test_what_tuning_does_is_not_part_of_the_identity(snapshots):
    config = copy.deepcopy(snapshots["regression"][1])
    for on_tune in ("reject", "continue"):
        config["estimator_config"]["state_snapshot"]["on_tune"] = on_tune
        ForwardPassPerfModel.best_available(config)


# --- files ---


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda old: old[:-1], "expected .* bytes, found"),
        (lambda old: old + b"\0", "expected .* bytes, found"),
        (lambda old: old[:-1] + bytes([old[-1] ^ 1]), "expected SHA-256"),
        (lambda old: b"", "expected [0-9]+ bytes, found 0"),
    ],
)
def test_a_state_that_is_not_the_recorded_one(copy_of, content, message):
    folder, config = copy_of("regression")
    (folder / "state.bin").write_bytes(content((folder / "state.bin").read_bytes()))
    refused(config, f"state.bin: {message}")


@pytest.mark.parametrize("size", [2**64 - 1, 2**63, 4 * 1024**3 + 1, 10**30])
def test_a_recorded_size_beyond_the_limit(copy_of, size):
    folder, _ = copy_of("regression")
    refused(
        repinned(folder, change=lambda document: document["files"][0].update(size=size)),
        "state.bin: expected at most 4294967296 bytes, found|files",
    )


def test_a_negative_size(copy_of):
    folder, _ = copy_of("regression")
    refused(
        repinned(folder, change=lambda document: document["files"][0].update(size=-1)), "expected at least 0, found -1"
    )


def test_a_sparse_state_one_byte_over_the_limit_is_not_read(copy_of):
    folder, _ = copy_of("regression")
    size = 4 * 1024**3 + 1
    with open(folder / "state.bin", "r+b") as file:
        file.truncate(size)
    config = repinned(folder)
    refused(config, f"state.bin: expected [0-9]+ bytes, found {size}")
    refused(
        repinned(folder, change=lambda document: document["files"][0].update(size=size)), "at most 4294967296 bytes"
    )


def test_a_missing_state_is_a_missing_file(copy_of):
    folder, config = copy_of("regression")
    (folder / "state.bin").unlink()
    refused(config, "state.bin", FileNotFoundError)


def test_a_linked_state_is_refused(copy_of):
    folder, config = copy_of("regression")
    (folder / "state.bin").rename(folder / "elsewhere")
    (folder / "state.bin").symlink_to("elsewhere")
    refused(config, "state.bin: expected .*(a symbolic link|bytes)")


def test_the_buffer_that_was_checked_is_the_one_that_is_decoded(copy_of, monkeypatch):
    folder, config = copy_of("regression")
    expected = ForwardPassPerfModel.best_available(config).diagnostics()
    select = restoring.select

    def swap(*given):
        (folder / "state.bin").write_bytes(b"swapped after the check")
        return select(*given)

    monkeypatch.setattr(restoring, "select", swap)
    assert ForwardPassPerfModel.best_available(config).diagnostics() == expected


def test_an_execution_profile_that_was_tampered_with(copy_of):
    folder, config = copy_of("profile")
    path = folder / "execution_profile.json"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b" ")
    refused(config, "execution_profile.json: expected SHA-256")
    path.unlink()
    refused(config, "execution_profile.json", FileNotFoundError)


def test_a_profile_swapped_after_the_check_is_not_used(copy_of, monkeypatch):
    folder, config = copy_of("profile")
    config["estimator_config"]["op_level"]["execution_profile"]["path"] = str(folder / "execution_profile.json")
    select = restoring.select

    def swap(*given):
        (folder / "execution_profile.json").write_bytes(b"swapped")
        return select(*given)

    monkeypatch.setattr(restoring, "select", swap)
    assert ForwardPassPerfModel.best_available(config).diagnostics()["source"] == "aic"


def test_another_math_library_is_reported_as_that(copy_of):
    folder, _ = copy_of("regression")
    config = repinned(folder, change=lambda document: document.update(math_library_sha256="0" * 64))
    refused(config, "written with another C math library")


# --- the decoded state ---


def field(part, name, index, value):
    def edit(arrays):
        arrays[part][name][index] = value

    return edit


def another_key(arrays):
    keys = arrays[LINEAR]["bucket_key"]
    keys[-1] = 14 if keys[-1] == 15 else 15


def shrunk_bounds(arrays):
    linear = arrays[LINEAR]
    linear["axis_max"][0] = np.median(linear["coordinates"][:, 0])


def repeated_sequence(arrays):
    arrays[SPLINE]["sequence"][0] = arrays[SPLINE]["sequence"][1]


def another_mean(arrays):
    # That of the target follows those of the terms in use.
    spline = arrays[SPLINE]
    spline["basis_mean"][spline["knot_count"].sum() + 2] *= 1.5


def swapped_knots(arrays):
    knots = arrays[SPLINE]["knots"]
    knots[0, :2] = knots[0, 1::-1].copy()


LINEAR = "pure_decode (linear_store)"
SPLINE = "pure_decode (spline_store)"
FIXED = "decode (fixed_correction)"
DYNAMIC = "decode (dynamic_local_correction)"
NOT_A_NUMBER = float("nan")

WRONG = {
    # the sampler: totals, order, keys, bounds
    "total": ("regression", field(LINEAR, "extent", 0, 63), "field coordinates: expected shape"),
    "total of no rows": ("untuned", field(LINEAR, "extent", 0, 1), "field coordinates: expected shape \\(1, 2\\)"),
    "buckets": ("regression", field(LINEAR, "extent", 1, 99), "field bucket_key: expected shape \\(99,\\)"),
    "next slot": ("regression", field(LINEAR, "extent", 2, 5), "field extent\\[2\\]: expected 64, found 5"),
    "order": ("regression", field(LINEAR, "order", 3, 4), "field order\\[3\\]: expected 3, found 4"),
    "key out of range": ("regression", field(LINEAR, "bucket_key", -1, 16), "field bucket_key.*: expected below 16"),
    "key of another cell": ("regression", another_key, "expected [0-9]+, the bucket of row"),
    "keys out of order": ("fixed", field(FIXED, "bucket_key", 1, 0), "field bucket_key\\[1\\]: expected above"),
    "empty bucket": ("regression", field(LINEAR, "bucket_start", 1, 0), "field bucket_start\\[1\\]: expected in 1"),
    "first position": ("regression", field(LINEAR, "bucket_start", 0, 1), "field bucket_start: expected from 0 to"),
    "last position": ("regression", field(LINEAR, "bucket_start", -1, 2), "field bucket_start: expected from 0 to"),
    "row outside of the bounds": ("regression", shrunk_bounds, "field coordinates\\[[0-9]+, 0\\]: expected inside"),
    "crossed bounds": ("regression", field(LINEAR, "axis_min", 0, 99.0), "expected ascending finite bounds"),
    "bounds that are no numbers": ("regression", field(LINEAR, "axis_min", 0, NOT_A_NUMBER), "expected ascending"),
    "bounds without rows": ("untuned", field(LINEAR, "axis_min", 0, 0.0), "expected inf, -inf without rows"),
    "coordinates": ("regression", field(LINEAR, "coordinates", (0, 1), 0.7), "field coordinates|bucket_key"),
    "features": ("regression", field(LINEAR, "features", (5, 0), 3.5), "field coordinates\\[5, 0\\]: expected"),
    "target": ("regression", field(LINEAR, "target_ms", 0, 0.0), "field target_ms\\[0\\]: expected above 0"),
    # the clock and the statistics
    "count": ("regression", field(LINEAR, "clock", 0, 63), "field clock \\(count\\): expected 64, found 63"),
    "damaged": ("regression", field(LINEAR, "clock", 2, 1), "expected statistics that need no rebuild"),
    "accepted": ("regression", field(LINEAR, "clock", 3, 1), "field clock \\(accepted_rows\\): expected 64 to"),
    "accepted without end": ("regression", field(LINEAR, "clock", 3, 2**63 - 1), "\\(accepted_rows\\): expected 64 to"),
    "observed without end": (
        "dynamic",
        field(DYNAMIC, "extent", 3, 2**63 - 1),
        "\\(next_sequence\\): expected at most",
    ),
    "age": ("regression", field(LINEAR, "clock", 4, 9), "field clock \\(age\\): expected 0, found 9"),
    "age beyond": ("threshold", field(LINEAR, "clock", 4, 10**6), "field clock \\(age\\): expected at most"),
    "verdicts": ("threshold", field(LINEAR, "clock", 5, 99), "field errors: expected 99 verdicts"),
    "verdicts without a policy": ("regression", field(LINEAR, "clock", 5, 1), "field errors: expected 1 verdicts"),
    "bad verdicts": ("threshold", field(LINEAR, "clock", 6, 11), "field clock \\(num_bad_errors\\): expected"),
    "scatter": ("regression", field(LINEAR, "scatter", (0, 1), 1.0), "field scatter\\[1, 0\\]: expected 1.0, as"),
    "statistics": (
        "regression",
        field(LINEAR, "mean", 0, 1.0),
        "field fit: expected .*recomputed, found|a rebuild",
    ),
    "statistics without rows": ("untuned", field(LINEAR, "mean", 0, 1.0), "field mean: expected zeros"),
    "mutations without rows": ("untuned", field(LINEAR, "clock", 1, 1), "field clock \\(mutations\\): expected 0"),
    # the fit
    "slope": ("regression", field(LINEAR, "fit_slope_ms", 0, 1.25), "field fit: expected .*recomputed, found"),
    "intercept": ("regression", field(LINEAR, "fit_intercept_ms", 0, 1.25), "field fit: expected .*, recomputed"),
    "fit without rows": ("untuned", field(LINEAR, "fit_intercept_ms", 0, 1.0), "field fit: expected .*recomputed"),
    "ready": ("regression", field(LINEAR, "fit_flags", 0, 2), "field fit_flags\\[0\\]: expected 0 or 1, found 2"),
    "active": ("regression", field(LINEAR, "fit_flags", 1, 4), "field fit_flags\\[1\\]: expected bits of 2 axes"),
    "scale": ("regression", field(LINEAR, "fit_scale", 0, 0.0), "field fit_scale\\[0\\]: expected above 0|field fit"),
    "infinite slope": ("regression", field(LINEAR, "fit_slope_ms", 0, np.inf), "expected a finite number, found inf"),
    "negative feature": ("regression", field(LINEAR, "features", (0, 0), -1.0), "expected a finite number from 0"),
    # the spline
    "searches before the first": (
        "spline untuned",
        field(SPLINE, "clock", 7, 1),
        "\\(searches\\): expected above 0 from",
    ),
    "no search after the first": ("spline", field(SPLINE, "clock", 7, 0), "\\(searches\\): expected above 0 from 32"),
    "searches too many": ("spline", field(SPLINE, "clock", 7, 99), "observations apart|rebuilds"),
    "last search to come": ("spline", field(SPLINE, "clock", 8, 10**6), "\\(last_search\\): expected 32 to"),
    "last search of a step": (
        "spline periodic",
        field(SPLINE, "clock", 8, 33),
        "\\(searches, last_search\\)|\\(basis_",
    ),
    "searches of a step": ("spline periodic", field(SPLINE, "clock", 7, 2), "\\(searches, last_search\\): expected"),
    "basis count": ("spline", field(SPLINE, "clock", 3, 9), "\\(basis_count\\): expected 48, found 9"),
    "basis mutations": ("spline", field(SPLINE, "clock", 4, 10**6), "\\(basis_mutations\\): expected at most two"),
    "basis damaged": ("spline", field(SPLINE, "clock", 5, 1), "\\(basis_damaged\\): expected 0, found 1"),
    "rebuilds": ("spline", field(SPLINE, "clock", 9, 10**6), "\\(rebuilds\\): expected at most one"),
    "fallbacks": ("spline", field(SPLINE, "clock", 10, 10**5), "\\(batch_fallbacks\\): expected at most"),
    "verdicts without a window": (
        "spline periodic",
        field(SPLINE, "clock", 11, 1),
        "field errors: expected 1 verdicts",
    ),
    "bad verdicts of a search": (
        "spline",
        field(SPLINE, "clock", 12, 16),
        "\\(num_bad_errors\\)|no search that is due",
    ),
    "sequence twice": ("spline", repeated_sequence, "field sequence: expected each number once"),
    "sequence of no row yet": ("spline", field(SPLINE, "sequence", 0, 10**6), "field sequence: expected below"),
    "guard": ("spline", field(SPLINE, "guard_max", 0, 1e9), "field guard_min\\[0\\], guard_max\\[0\\]: expected"),
    "guard without rows": (
        "spline untuned",
        field(SPLINE, "guard_min", 0, 1.0),
        "guard_max\\[0\\]: expected \\(inf, -inf",
    ),
    "scale below one": ("spline", field(SPLINE, "scale", 0, 0.5), "field scale\\[0\\]: expected"),
    "scale before a search": ("spline untuned", field(SPLINE, "scale", 0, 1.0), "field scale: expected zeros"),
    "knots too many": ("spline", field(SPLINE, "knot_count", 0, 3), "field knot_count\\[0\\]: expected at most 2"),
    "knots out of order": ("spline", swapped_knots, "field knots\\[0\\]: expected ascending"),
    "knots that are not counted": ("spline", field(SPLINE, "knots", (0, 2), 0.9), "field knots: expected zeros where"),
    "basis mean": ("spline", another_mean, "recomputed|a rebuild"),
    "basis scatter": ("spline", field(SPLINE, "basis_scatter", (0, 0), 0.25), "recomputed|a rebuild"),
    "basis scatter below": (
        "spline",
        field(SPLINE, "basis_scatter", (1, 0), 0.25),
        "field basis_scatter: expected zeros",
    ),
    "spline slope": ("spline", field(SPLINE, "spline_slope_ms", 0, 1e9), "field spline: expected .*, recomputed"),
    "spline intercept": (
        "spline",
        field(SPLINE, "spline_intercept_ms", 0, 1e9),
        "field spline: expected .*, recomputed",
    ),
    "no spline": ("spline", field(SPLINE, "spline_exists", 0, 0), "expected zeros where|field spline"),
    "spline before a search": (
        "spline untuned",
        field(SPLINE, "spline_exists", 0, 1),
        "field spline_exists: expected zeros",
    ),
    "linear fit of a spline": ("spline", field(SPLINE, "fit_slope_ms", 0, 1e9), "field fit: expected .*, recomputed"),
    # corrections
    "fixed range": ("fixed", field(FIXED, "axis_max", 0, 7.0), "field axis_max: expected \\[6.0, 6000.0\\], the fixed"),
    "fixed ratio": ("fixed", field(FIXED, "ratio", 0, 0.0), "field ratio\\[0\\]: expected a ratio in"),
    "fixed factor": ("fixed", field(FIXED, "cell_factor", 0, 3.5), "field cell_factor\\[0\\]: expected .*, recomputed"),
    "dynamic factor": ("dynamic", field(DYNAMIC, "cell_factor", 0, 3.5), "field cell_factor\\[0\\]: .*recomputed"),
    "global factor": ("dynamic", field(DYNAMIC, "global_factor", 0, 3.5), "field global_factor: .*, recomputed"),
    "global factor unused": ("hybrid", field("prefill (dynamic_local_correction)", "recent", 0, -1.0), "a finite"),
    "dynamic keys": ("dynamic", field(DYNAMIC, "cell_key", 0, 15), "field cell_key: expected .*, recomputed"),
    "dynamic row outside": ("dynamic", field(DYNAMIC, "coordinates", (0, 0), 50.0), "expected inside \\["),
    "dynamic bounds": ("dynamic", field(DYNAMIC, "axis_min", 0, 90.0), "expected ascending bounds from 0"),
    "dynamic bound below 0": ("dynamic", field(DYNAMIC, "axis_min", 0, -1.0), "expected ascending bounds from 0"),
    "sequence order": ("dynamic", field(DYNAMIC, "sequence", 1, 0), "field sequence\\[1\\]: expected in"),
    "sequence to come": ("dynamic", field(DYNAMIC, "sequence", -1, 10**6), "field sequence\\[[0-9]+\\]: expected in"),
    "next sequence": ("dynamic", field(DYNAMIC, "extent", 3, 3), "field extent \\(num_recent\\): expected 3"),
    "recent": ("dynamic", field(DYNAMIC, "extent", 0, 3), "field recent: expected shape \\(3,\\)"),
    "recent ratio": ("dynamic", field(DYNAMIC, "recent", -1, 77.0), "field ratio|field global_factor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_state_that_tuning_does_not_leave_behind(copy_of, case):
    kind, edit, message = WRONG[case]
    folder, _ = copy_of(kind)
    config = repinned(folder, state=edited((folder / "state.bin").read_bytes(), edit))
    refused(config, f"state.bin.*(?s:.*)({message})")


def test_a_sampler_fuller_than_it_may_be(snapshots, copy_of):
    model = ForwardPassPerfModel.best_available(
        regression(sampling={"bins_per_axis": [4, 4], "max_observations": 80}),
    )
    model.tune_with_fpms(FpmBatch.from_frames(sample.train_frames()[:600]))
    folder, _ = copy_of("regression")
    model.save_state_snapshot(folder.parent / "larger")
    config = repinned(folder, state=(folder.parent / "larger/state.bin").read_bytes())
    refused(config, "store pure_decode \\(linear_store\\): field extent\\[0\\]: expected at most 64 rows, found 80")


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        ("regression", "fixed", "stores: expected .*'pure_decode'.*, found .*'prefill', 'fixed_correction'"),
        ("fixed", "regression", "stores: expected .*'fixed_correction'.*, found .*'linear_store'"),
        ("fixed", "hybrid", "stores: expected .*found"),
        ("hybrid", "dynamic", "stores: expected .*found"),
        ("fixed", "dynamic", "stores\\[0\\]\\[1\\]: expected 'fixed_correction', found 'dynamic_local_correction'"),
        ("profile", "fixed", "stores: expected \\[\\], found"),
    ],
)
def test_a_foreign_state(snapshots, copy_of, kind, other, message):
    folder, _ = copy_of(kind)
    refused(repinned(folder, state=(snapshots[other][0] / "state.bin").read_bytes()), f"state.bin: {message}")


def test_stores_in_another_order(copy_of):
    folder, _ = copy_of("untuned")
    content = (folder / "state.bin").read_bytes()
    size = (len(content) - 8) // 4
    parts = [content[8 + i * size : 8 + (i + 1) * size] for i in range(4)]
    parts[0], parts[1] = parts[1], parts[0]
    config = repinned(folder, state=content[:8] + b"".join(parts))
    refused(config, "stores\\[0\\]\\[0\\]: expected 'pure_decode', found 'contains_locally_mixed'")
    config = repinned(folder, state=struct.pack("<Q", 3) + b"".join(parts[:3]))
    refused(config, "stores: expected .*, found")


@pytest.mark.parametrize("kind", ["regression", "hybrid"])
@pytest.mark.parametrize("change", ["truncated", "trailing"])
def test_bytes_too_few_and_too_many(copy_of, kind, change):
    folder, _ = copy_of(kind)
    content = (folder / "state.bin").read_bytes()
    changed = content + b"\0" if change == "trailing" else content[:-1]
    refused(repinned(folder, state=changed), "state.bin.*expected")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["diagnostics"].update(retained_observations=1), "diagnostics.retained_observations: expected 1"),
        (lambda d: d["diagnostics"].update(source="aic"), "diagnostics.source: expected 'aic', found"),
        (lambda d: d["readiness"].update(ready=False), "readiness.ready: expected False, found True"),
    ],
)
def test_what_was_restored_reports_what_was_saved(copy_of, change, message):
    folder, _ = copy_of("regression")
    refused(repinned(folder, change=change), message)


def test_a_changed_engine_specification(copy_of):
    folder, _ = copy_of("fixed")
    config = repinned(folder, change=lambda document: document.update(engine_spec_sha256="0" * 64))
    refused(config, "engine_spec_sha256: expected '0{64}', found '[0-9a-f]{64}'")


def test_the_engine_specification_is_that_of_the_model(snapshots, copy_of):
    # The same identity over a checkpoint that has changed.
    _, config = copy_of("fixed")
    checkpoint = os.path.join(config["model"], "config.json")
    with open(checkpoint) as file:
        before = file.read()
    try:
        with open(checkpoint, "w") as file:
            json.dump(json.loads(before) | {"num_hidden_layers": 3}, file)
        refused(config, "engine_spec_sha256: expected")
    finally:
        with open(checkpoint, "w") as file:
            file.write(before)


@pytest.mark.skipif(sys.platform != "linux", reason="needs names of any bytes")
def test_inspection_needs_a_manifest_and_nothing_else(copy_of):
    folder, _ = copy_of("regression")
    for name in ("state.bin", "config.json"):
        (folder / name).unlink()
    assert inspect_state_snapshot(folder)["kind"] == "regression_linear"


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["identity"].update(surprise=1),
        lambda d: d["identity"].pop("tp"),
        lambda d: d["identity"].update(tp="1"),
        lambda d: d.update(identity={}),
    ],
)
def test_inspection_refuses_an_identity_that_is_none(copy_of, change):
    folder, _ = copy_of("regression")
    repinned(folder, change=change)
    with pytest.raises(errors.StateSnapshotError, match="identity"):
        inspect_state_snapshot(folder)


@pytest.mark.parametrize("name", ["regression", "threshold"])
def test_a_store_whose_count_is_at_its_limit_answers_and_learns_no_more(copy_of, name, tmp_path):
    folder, _ = copy_of(name)
    field = linear_store.CLOCK_FIELDS.index("accepted_rows")

    def edit(stores):
        for arrays in stores.values():
            if arrays["clock"][field] > 0:
                arrays["clock"][field] = 2**62

    content = edited((folder / "state.bin").read_bytes(), edit)
    model = ForwardPassPerfModel.best_available(repinned(folder, state=content))
    decode = {"wall_time": 0.5, "scheduled_requests": {"num_decode_requests": 2, "sum_decode_kv_tokens": 300}}
    before = model.estimate_forward_pass_time_ms(decode)
    model.tune_with_fpms([[decode]] * 3)
    assert model.estimate_forward_pass_time_ms(decode) == before
    model.save_state_snapshot(tmp_path / "again")
    assert (tmp_path / "again" / "state.bin").read_bytes() == content
