"""Checkpoints: what is written reads back, what was saved resumes, and every sort of damage is named."""

import json
import shutil
import zlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from fpmsdk import ForwardPassPerfModel, errors
from fpmsdk.files import sha256
from fpmsdk.learned.runtime_checkpoint import read_runtime_checkpoint
from fpmsdk.learned.training_checkpoint import read_training_checkpoint
from tests.learned.checkpoints import recorded_checkpoint, written_checkpoint
from tests.learned.recorded import eval_frames, vectors

BASE = vectors()["identity_config"]
FAILURES = (errors.LearnedModelError, errors.PerfDataNotAvailableError, errors.ConfigError)


def config(path, **learned):
    return BASE | {"estimator_config": {"fpm_learned": {"checkpoint_path": str(path)} | learned}}


def tuned(path, frames=40, **learned):
    model = ForwardPassPerfModel.best_available(config(path, **learned))
    model.tune_with_fpms([[frame] for frame in eval_frames()[:frames]])
    return model


def rewritten(folder, change):
    """Change the manifest's document of a checkpoint."""
    path = folder / "manifest.json"
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))
    return folder


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_what_was_written_reads_back(tmp_path):
    original = recorded_checkpoint("main")
    read = read_training_checkpoint(written_checkpoint(tmp_path))
    assert read.identity == original.identity
    assert read.sha256 == sha256((tmp_path / "checkpoint-main" / "manifest.json").read_bytes())
    assert read.artifact.to_json_bytes() == original.artifact.to_json_bytes()
    for kind, store in original.stores.items():
        for one, other in zip(store[:4], read.stores[kind][:4], strict=True):
            np.testing.assert_array_equal(one, other)
        for one, other in zip(store.bin_thresholds, read.stores[kind].bin_thresholds, strict=True):
            np.testing.assert_array_equal(one, other)
        assert store[5:10] == read.stores[kind][5:10]


def test_a_checkpoint_is_only_written_where_nothing_is(tmp_path):
    written_checkpoint(tmp_path)
    with pytest.raises(FileExistsError):
        written_checkpoint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-main"]


# --- training checkpoints that are refused ---


def edit_rows(folder, change):
    path = folder / "pure_decode.rows.parquet"
    table = change(pyarrow.parquet.read_table(path))
    pyarrow.parquet.write_table(table, path)
    digest = sha256(path.read_bytes())
    return rewritten(folder, lambda document: document["stores"]["pure_decode"].update(rows_sha256=digest))


REPEATED = object()


def with_column(name, value):
    def change(table):
        values = table.column(name).to_numpy().copy()
        values[1] = values[0] if value is REPEATED else value
        return table.set_column(table.schema.get_field_index(name), name, pyarrow.array(values))

    return change


def in_store(**changes):
    def change(document):
        document["stores"]["pure_decode"].update(changes)

    return change


def move_thresholds(document):
    # The first one that a tree of the store uses.
    trees = vectors()["forests"]["main"]["artifact"]["stores"]["pure_decode"]["trees"]
    feature, threshold = trees[0]["feature"][0], trees[0]["threshold"][0]
    limits = document["stores"]["pure_decode"]["bin_thresholds"][feature]
    limits[limits.index(threshold)] += 0.25


DAMAGES = {
    "model.json tampered": (lambda f: flipped(f / "model.json"), "artifact_sha256: model.json: expected SHA-256"),
    "rows tampered": (lambda f: flipped(f / "pure_decode.rows.parquet"), "pure_decode.rows_sha256"),
    "rows missing": (lambda f: (f / "pure_decode.rows.parquet").unlink(), "cannot be read"),
    "manifest truncated": (
        lambda f: (f / "manifest.json").write_bytes((f / "manifest.json").read_bytes()[:999]),
        "manifest.json: invalid JSON",
    ),
    "newer version": (lambda f: rewritten(f, lambda d: d.update(schema_version=2)), "schema_version: expected 1"),
    "other schema": (lambda f: rewritten(f, lambda d: d.update(schema="x")), "schema: expected"),
    "field missing": (lambda f: rewritten(f, lambda d: d.pop("target")), "missing required field `target`"),
    "row count": (lambda f: rewritten(f, in_store(row_count=1159)), "row_count: expected 1158, found 1159"),
    "thresholds moved": (lambda f: rewritten(f, move_thresholds), "is not in the bin mapper"),
    "thresholds unordered": (
        lambda f: rewritten(f, in_store(bin_thresholds=[[1.0, 1.0], [], [], []], n_bins_non_missing=[3, 1, 1, 1])),
        "strictly increasing",
    ),
    "bin counts": (lambda f: rewritten(f, in_store(n_bins_non_missing=[1, 1, 1, 1])), "n_bins_non_missing\\[0\\]"),
    "other loss": (lambda f: rewritten(f, in_store(loss="poisson")), "loss: expected 'squared_error'"),
    "missing bin": (lambda f: rewritten(f, in_store(missing_values_bin_idx=9)), "missing_values_bin_idx"),
    "learning rate": (lambda f: rewritten(f, in_store(learning_rate=0.0)), "learning_rate: expected"),
    "small leaves": (lambda f: rewritten(f, in_store(min_samples_leaf=200)), "min_samples_leaf 200 rows in every leaf"),
    "leaf budget": (lambda f: rewritten(f, in_store(max_leaf_nodes=4)), "at most 4 leaves"),
    "depth": (lambda f: rewritten(f, in_store(max_depth=1)), "depth of at most 1"),
    "file outside": (
        lambda f: rewritten(f, lambda d: d.update(artifact_file="../model.json")),
        "file in the directory",
    ),
    "stores differ": (lambda f: rewritten(f, lambda d: d["stores"].pop("pure_prefill")), "stores: expected"),
    "features differ": (lambda f: rewritten(f, lambda d: d["features"].reverse()), "features: expected"),
    "identity differs": (lambda f: rewritten(f, lambda d: d["identity"].update(tp=2)), "identity"),
    "repeated id": (lambda f: edit_rows(f, with_column("row_id", REPEATED)), "row_id: expected 'unique ids'"),
    "target of another time": (
        lambda f: edit_rows(f, with_column("y", 9.0)),
        "y\\[1\\]: .* from wall_time_ms",
    ),
    "no time": (lambda f: edit_rows(f, with_column("wall_time_ms", 0.0)), "wall_time_ms: expected"),
    "infinite feature": (lambda f: edit_rows(f, with_column("x1", np.inf)), "features: expected"),
    "column missing": (lambda f: edit_rows(f, lambda table: table.drop(["x2"])), "x2"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_training_checkpoint_is_refused_by_name(name, tmp_path):
    damage, message = DAMAGES[name]
    path = written_checkpoint(tmp_path)
    damage(path)
    with pytest.raises(FAILURES, match=message):
        ForwardPassPerfModel.best_available(config(path))


def test_another_exporter_is_accepted(tmp_path):
    path = rewritten(written_checkpoint(tmp_path), lambda document: document.update(exporter_version="2"))
    assert ForwardPassPerfModel.best_available(config(path)).diagnostics()["source"] == "learned_online"


def test_the_deployment_and_the_pinned_digest_have_to_agree(tmp_path):
    path = written_checkpoint(tmp_path)
    with pytest.raises(errors.LearnedModelError, match="identity.tp: expected 2"):
        ForwardPassPerfModel.best_available(config(path) | {"tp": 2})
    with pytest.raises(errors.ConfigError, match="source_sha256"):
        ForwardPassPerfModel.best_available(config(path, source_sha256="0" * 64))
    canonical = ForwardPassPerfModel.normalize_config(config(path))
    rewritten(path, lambda document: document.update(exporter_version="2"))
    with pytest.raises(FAILURES, match="source_sha256"):
        ForwardPassPerfModel.best_available(canonical)


# --- runtime checkpoints ---


@pytest.mark.parametrize(
    "learned",
    [
        {"split_sampling_rate": 1.0, "split_rank_tolerance": 0.0},
        {"update_every": 3, "recent_max_age_observations": 30},
        {"update_mode": "leaf_only", "mutable_tree_tail": 4},
    ],
    ids=["structural", "batches", "leaf_only"],
)
def test_a_saved_learner_resumes_where_it_stopped(learned, tmp_path):
    model = tuned(written_checkpoint(tmp_path), frames=100, **learned)
    model.save_online_checkpoint(tmp_path / "saved")
    resumed = ForwardPassPerfModel.best_available(config(tmp_path / "saved", **learned))
    for frame in eval_frames()[100:220]:
        assert resumed.estimate_forward_pass_time_ms([frame]) == model.estimate_forward_pass_time_ms([frame])
        model.tune_with_fpms([[frame]])
        resumed.tune_with_fpms([[frame]])
    model.save_online_checkpoint(tmp_path / "one")
    resumed.save_online_checkpoint(tmp_path / "other")
    for name in ("manifest.json", "model.json", "state.bin"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_the_manifest_of_a_runtime_checkpoint_has_the_recorded_keys(tmp_path):
    training = written_checkpoint(tmp_path)
    tuned(training).save_online_checkpoint(tmp_path / "saved")
    document = json.loads((tmp_path / "saved" / "manifest.json").read_bytes())
    assert sorted(document) == vectors()["runtime_checkpoint_manifest_keys"]
    assert document["schema_version"] == 5
    assert document["anchor_manifest_sha256"] == sha256((training / "manifest.json").read_bytes())
    state = read_runtime_checkpoint(tmp_path / "saved").state
    assert (state.source_path, state.source_sha256) == (str(training), document["anchor_manifest_sha256"])


def test_a_frozen_model_serves_the_forests_of_either_checkpoint(tmp_path):
    training = written_checkpoint(tmp_path)
    online = tuned(training)
    online.save_online_checkpoint(tmp_path / "saved")
    corrections_off = {"correction": {"enabled": False}}
    for path, expected in ((training, tuned(training, frames=0)), (tmp_path / "saved", online)):
        base = config(path, adaptation="frozen")
        frozen = ForwardPassPerfModel.best_available(
            base | {"estimator_config": base["estimator_config"] | corrections_off}
        )
        for frame in eval_frames()[:50]:
            assert frozen.estimate_forward_pass_time_ms([frame]) == expected.estimate_forward_pass_time_ms([frame])


VERSIONS = [(version, "restart from the training checkpoint") for version in (1, 2, 3, 4)] + [(6, "the release that")]


@pytest.mark.parametrize(("version", "advice"), VERSIONS)
def test_other_versions_of_a_runtime_checkpoint_are_refused(version, advice, tmp_path):
    tuned(written_checkpoint(tmp_path)).save_online_checkpoint(tmp_path / "saved")
    path = rewritten(tmp_path / "saved", lambda document: document.update(schema_version=version))
    with pytest.raises(errors.LearnedModelError, match=f"schema_version: expected 5, found {version}; .*{advice}"):
        ForwardPassPerfModel.best_available(config(path))


def test_controls_have_to_be_those_of_the_save(tmp_path):
    tuned(written_checkpoint(tmp_path)).save_online_checkpoint(tmp_path / "saved")
    with pytest.raises(errors.LearnedModelError, match="controls.recent_window: online controls differ .* 64.*9"):
        ForwardPassPerfModel.best_available(config(tmp_path / "saved", recent_window=9))


def test_the_selector_takes_no_runtime_checkpoint(tmp_path):
    tuned(written_checkpoint(tmp_path)).save_online_checkpoint(tmp_path / "saved")
    with pytest.raises(errors.LearnedModelError, match="causal_selector needs a training checkpoint"):
        ForwardPassPerfModel.best_available(config(tmp_path / "saved", adaptation="causal_selector"))


def test_a_runtime_checkpoint_with_one_bit_or_half_of_its_bytes_gone_is_refused(tmp_path):
    tuned(written_checkpoint(tmp_path)).save_online_checkpoint(tmp_path / "saved")
    for name in ("model.json", "state.bin", "manifest.json"):
        for damage in (flipped, lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])):
            copy = tmp_path / f"{name} {zlib.crc32(repr(damage).encode())}"
            shutil.copytree(tmp_path / "saved", copy)
            damage(copy / name)
            with pytest.raises(FAILURES):
                ForwardPassPerfModel.best_available(config(copy))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.export_learned_artifact(), "export_learned_artifact needs one forest"),
        (lambda model: model.save_online_checkpoint("never"), "save_online_checkpoint needs adaptation online"),
    ],
)
def test_a_selector_refuses_what_holds_only_one_expert(call, message, tmp_path):
    model = tuned(written_checkpoint(tmp_path), adaptation="causal_selector")
    model.flush_updates()
    with pytest.raises(errors.UnsupportedQueryError, match=message):
        call(model)


def test_a_failed_construction_leaves_the_model_before_it_usable(tmp_path):
    path = written_checkpoint(tmp_path)
    model = tuned(path)
    before = model.estimate_forward_pass_time_ms([eval_frames()[60]])
    flipped(path / "model.json")
    with pytest.raises(FAILURES):
        ForwardPassPerfModel.best_available(config(path))
    assert model.estimate_forward_pass_time_ms([eval_frames()[60]]) == before
    model.tune_with_fpms([[eval_frames()[61]]])
