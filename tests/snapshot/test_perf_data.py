"""Snapshots of native models and their data: referenced, packed, changed, loaded before.

Source: snapshot.md section 7.
"""

import json
import os
import shutil
import socket
import sys
import threading
from pathlib import Path

import pytest

from fpmsdk import ForwardPassPerfModel, errors, inspect_state_snapshot
from fpmsdk.perfdb import fingerprint as fingerprints
from fpmsdk.perfdb import open_database
from fpmsdk.perfdb.forward_cells import open_forward_table
from tests.perfdb.fixtures import own_cache  # noqa: F401
from tests.perfdb.pairs import VERSION as PAIR_VERSION
from tests.perfdb.pairs import write_pair
from tests.perfdb.synthetic import Systems
from tests.perfmodel import tiny
from tests.perfmodel.deployments import rank
from tests.snapshot.kinds import corrected, forward_config, forward_in_root_config, forward_rows, op_level_config
from tests.snapshot.processes import run_worker
from tests.snapshot.tampering import copied

QUERIES = [rank(1, 100), rank(2, 64, 128), rank(num_decode=4, decode_kv=900), rank(1, 32, 0, 3, 700)]


@pytest.fixture
def op_level(tmp_path):
    return corrected(op_level_config(tmp_path / "data"), "hybrid")


@pytest.fixture
def forward(tmp_path):
    return corrected(forward_config(tmp_path / "data"), "fixed")


@pytest.fixture
def forward_in_root(tmp_path):
    return corrected(forward_in_root_config(tmp_path / "data"), "fixed")


def tuned(config):
    model = ForwardPassPerfModel.best_available(config)
    model.tune_with_fpms([[query | {"wall_time": 0.004 + 0.001 * i}] for i in range(6) for query in QUERIES])
    return model


def answers(model):
    return [model.estimate_forward_pass_time_ms(query).hex() for query in QUERIES]


def restored(config):
    return answers(ForwardPassPerfModel.best_available(config))


def in_a_new_process(**given):
    return run_worker("attempt", 3, queries=QUERIES, **given)


def root_of(config):
    return config["systems_paths"][0]


def gemm(config):
    return os.path.join(root_of(config), f"data/x100/gemm/vllm/{tiny.VERSION}/gemm_perf.parquet")


def rescale(config, scale=2.0):
    """Measure the GEMMs anew; whoever reads them now gets other latencies."""
    Systems(Path(root_of(config))).table(f"gemm/vllm/{tiny.VERSION}", "gemm_perf", tiny.gemm_rows(scale))


# --- referenced ---


def test_the_manifest_tells_what_the_model_was_saved_over(op_level, tmp_path):
    model = tuned(op_level)
    model.save_state_snapshot(tmp_path / "saved")
    told = inspect_state_snapshot(tmp_path / "saved")
    assert told["perf_data_fingerprint"] == model._kind.data_source.seen.digest
    assert told["engine_spec_sha256"] == model._kind.spec.digest()
    assert told["producer"]["engine_spec_schema_version"] == 29
    assert told["topology"] == model.deployment_topology()
    assert told["topology"]["correction_limits"]["max_batch_size"] == 6


CHANGES = {
    "changed": (lambda root: (root / "query_versions.yaml").write_text("defaults:  {}"), "root/query_versions.yaml"),
    "added": (lambda root: (root / "data/x100/gemm/notes.txt").touch(), "data/gemm/notes.txt: expected nothing"),
    "removed": (lambda root: (root / "query_versions.yaml").unlink(), "root/query_versions.yaml: .* found nothing"),
    "empty version directory": (
        lambda root: (root / "data/x100/gemm/vllm/9.9").mkdir(),
        "data/gemm/vllm/9.9: expected nothing, found directory",
    ),
    "dangling link": (
        lambda root: (root / "data/x100/link").symlink_to("nowhere"),
        "data/link: expected nothing, found unread -> nowhere",
    ),
    "system gone": (lambda root: (root / "x100.yaml").unlink(), "no system 'x100'"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_data_that_changed_are_named(op_level, tmp_path, change):
    (tmp_path / "data/systems/query_versions.yaml").write_text("defaults: {}")
    edit, message = CHANGES[change]
    model = tuned(op_level)
    config = model.save_state_snapshot(tmp_path / "saved")
    edit(tmp_path / "data/systems")
    with pytest.raises(errors.StateSnapshotError, match=f"performance data under .*{message}"):
        ForwardPassPerfModel.best_available(config)
    with pytest.raises(errors.StateSnapshotError, match="performance data under .*restart the process"):
        model.save_state_snapshot(tmp_path / "again")
    assert not (tmp_path / "again").exists()


def non_utf8(root):
    if sys.platform == "linux":  # other file systems refuse such names
        open(os.fsencode(root / "data/x100") + b"/\xff\xfe", "wb").close()


UNSEEN = {
    "hidden file": lambda root: (root / "data/x100/.hidden").touch(),
    "name that is not UTF-8": non_utf8,
    "another system's data": lambda root: (root / "data/y200").mkdir(),
    "modification time": lambda root: os.utime(root / "x100.yaml", (1, 1)),
}


@pytest.mark.parametrize("change", UNSEEN)
def test_what_the_loader_does_not_see_does_not_matter(op_level, tmp_path, change):
    model = tuned(op_level)
    config = model.save_state_snapshot(tmp_path / "saved")
    UNSEEN[change](tmp_path / "data/systems")
    assert restored(config) == answers(model)
    model.save_state_snapshot(tmp_path / "again")


@pytest.mark.parametrize("change", ["table", "sidecar", "table gone"])
def test_an_external_table_belongs_to_the_data(forward, tmp_path, change):
    model = tuned(forward)
    config = model.save_state_snapshot(tmp_path / "saved")
    pair = tmp_path / "data/pair"
    if change == "table":
        write_pair(pair, forward_rows(forward["model"])[:-1])
        name = "external/metadata"
    elif change == "sidecar":
        sidecar = pair / "fpm_forward_perf.metadata.json"
        sidecar.write_text(sidecar.read_text() + " ")
        name = "external/metadata"
    else:
        (pair / "fpm_forward_perf.parquet").unlink()
        name = "external/table"
    with pytest.raises(errors.StateSnapshotError, match=f"first at {name}: expected file of"):
        ForwardPassPerfModel.best_available(config)
    with pytest.raises(errors.StateSnapshotError, match="restart the process"):
        model.save_state_snapshot(tmp_path / "again")


def test_a_table_in_the_root_belongs_to_the_data(forward_in_root, tmp_path):
    model = tuned(forward_in_root)
    config = model.save_state_snapshot(tmp_path / "saved")
    assert restored(config) == answers(model)
    write_pair(tmp_path / f"data/full/data/x100/vllm/{PAIR_VERSION}", forward_rows(forward_in_root["model"])[:-1])
    with pytest.raises(errors.StateSnapshotError, match="first at data/vllm/9.9.9-vec/fpm_forward_perf"):
        ForwardPassPerfModel.best_available(config)


def test_how_the_points_of_a_table_are_read_belongs_to_the_model(forward, tmp_path, monkeypatch):
    config = tuned(forward).save_state_snapshot(tmp_path / "saved")
    monkeypatch.setenv("AIC_FPM_FAKE_FALLBACK_RAW", "1")
    restart = in_a_new_process(config=config)
    assert restart["error"] == "StateSnapshotError" and "engine_spec_sha256" in restart["text"]


# --- this process and new ones ---


def test_after_a_change_this_process_refuses_both_ways_and_a_new_one_works(op_level, tmp_path):
    model = tuned(op_level)
    before = model.save_state_snapshot(tmp_path / "before")
    rescale(op_level)
    with pytest.raises(errors.StateSnapshotError, match="changed since this process loaded them.*data/gemm"):
        model.save_state_snapshot(tmp_path / "here")
    elsewhere = in_a_new_process(config=op_level, save=str(tmp_path / "there"))
    with pytest.raises(errors.StateSnapshotError, match="changed after this process had first loaded them.*restart"):
        ForwardPassPerfModel.best_available(elsewhere["config"])
    assert in_a_new_process(config=elsewhere["config"])["answers"] == elsewhere["answers"]
    refused = in_a_new_process(config=before)
    assert refused["error"] == "StateSnapshotError" and "have changed since the save" in refused["text"]


def test_data_that_changed_back_are_the_data_again(op_level, tmp_path):
    model = tuned(op_level)
    config = model.save_state_snapshot(tmp_path / "saved")
    rescale(op_level)
    with pytest.raises(errors.StateSnapshotError):
        ForwardPassPerfModel.best_available(config)
    rescale(op_level, 1.0)
    assert restored(config) == answers(model)
    model.save_state_snapshot(tmp_path / "again")


def parse(config):
    """What another engine of the process may have done: tables opened without a model."""
    database = open_database(root_of(config), "x100", "vllm", tiny.VERSION)
    return database.table("gemm_perf")


def test_an_engine_does_not_share_tables_that_were_parsed_before_the_data_changed(op_level, tmp_path):
    parse(op_level)
    rescale(op_level)
    model = tuned(op_level)
    fresh = in_a_new_process(config=op_level)
    assert answers(ForwardPassPerfModel.best_available(op_level)) == fresh["answers"]
    config = model.save_state_snapshot(tmp_path / "saved")
    assert in_a_new_process(config=config)["answers"] == answers(model)


def test_a_restored_model_does_not_share_them_either(op_level, tmp_path):
    rescale(op_level)
    saved = in_a_new_process(config=op_level, save=str(tmp_path / "saved"))
    rescale(op_level, 1.0)
    parse(op_level)
    rescale(op_level)
    assert restored(saved["config"]) == saved["answers"]


def test_tables_of_a_pair_that_were_read_before_the_first_model_are_read_again(forward):
    path = forward["estimator_config"]["fpm_interpolation"]["fpm_parquet_path"]
    before = open_forward_table(path, "x100", "vllm", PAIR_VERSION)
    model = ForwardPassPerfModel.best_available(forward)
    assert model._kind.table is not before
    # From then on models share one.
    assert ForwardPassPerfModel.best_available(forward)._kind.table is model._kind.table


def test_a_restore_hashes_the_data_once_and_a_save_compares_with_that(op_level, tmp_path, monkeypatch):
    config = tuned(op_level).save_state_snapshot(tmp_path / "saved")
    monkeypatch.setattr(fingerprints, "_known", {})
    calls = []
    measure = fingerprints.measure_fingerprint
    monkeypatch.setattr(fingerprints, "measure_fingerprint", lambda *given: calls.append(given) or measure(*given))
    model = ForwardPassPerfModel.best_available(config)
    assert len(calls) == 1
    rescale(op_level)
    with pytest.raises(errors.StateSnapshotError, match="restart the process"):
        model.save_state_snapshot(tmp_path / "again")


def test_nothing_is_loaded_before_the_data_agree(op_level, tmp_path, monkeypatch):
    config = tuned(op_level).save_state_snapshot(tmp_path / "saved")
    rescale(op_level)
    monkeypatch.setattr("fpmsdk.perfmodel.restoring.select", lambda *_given: pytest.fail("a model was built"))
    with pytest.raises(errors.StateSnapshotError, match="have changed since the save"):
        ForwardPassPerfModel.best_available(config)


def test_concurrent_first_models_share_one_fingerprint(op_level, monkeypatch):
    monkeypatch.setattr(fingerprints, "_known", {})
    calls = []
    measure = fingerprints.measure_fingerprint
    monkeypatch.setattr(fingerprints, "measure_fingerprint", lambda *given: calls.append(given) or measure(*given))
    models = []
    build = lambda: models.append(ForwardPassPerfModel.best_available(op_level))  # noqa: E731
    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(models), len(calls)) == (4, 1)


def test_data_that_cannot_be_read_keep_a_model_from_being_saved_but_not_from_being_built(
    op_level, tmp_path, monkeypatch
):
    def unreadable(*_given):
        raise errors.PerfDataNotAvailableError("perf database error: cannot read x: Permission denied")

    monkeypatch.setattr(fingerprints, "measure_fingerprint", unreadable)
    model = tuned(op_level)
    with pytest.raises(errors.StateSnapshotError, match="cannot be pinned: .*Permission denied"):
        model.save_state_snapshot(tmp_path / "saved")


# --- packed ---


@pytest.mark.parametrize("kind", ["op_level", "forward", "forward_in_root"])
def test_a_packed_snapshot_needs_the_source_no_more(kind, request, tmp_path):
    config = request.getfixturevalue(kind)
    model = tuned(config)
    packed = model.save_state_snapshot(tmp_path / "saved", include_perf_db=True)
    assert packed["systems_paths"] == [str(tmp_path / "saved/perf_db/systems")]
    if kind == "forward":
        path = packed["estimator_config"]["fpm_interpolation"]["fpm_parquet_path"]
        assert path == str(tmp_path / "saved/perf_db/external/table.parquet")
    expected = answers(model)
    for folder in ("systems", "bare", "full", "pair"):
        shutil.rmtree(tmp_path / "data" / folder, ignore_errors=True)
    assert in_a_new_process(config=packed)["answers"] == expected
    assert restored(packed) == expected
    # And again, from the restored one.
    again = ForwardPassPerfModel.best_available(packed).save_state_snapshot(tmp_path / "again", include_perf_db=True)
    shutil.rmtree(tmp_path / "saved")
    assert restored(again) == expected
    assert (tmp_path / "again/state.bin").stat().st_size > 8


def test_exactly_what_the_fingerprint_covers_is_packed(op_level, tmp_path):
    root = tmp_path / "data/systems"
    (root / "data/x100/.hidden").touch()
    (root / "data/y200/other").mkdir(parents=True)
    (root / "data/x100/empty/vllm/3.0").mkdir(parents=True)
    (root / "data/x100/gemm/vllm/linked").symlink_to(root / f"data/x100/gemm/vllm/{tiny.VERSION}")
    (root / "data/x100/nowhere").symlink_to("to nothing")
    model = tuned(op_level)
    config = model.save_state_snapshot(tmp_path / "saved", include_perf_db=True)
    packed = tmp_path / "saved/perf_db/systems"
    assert (packed / "data/x100/empty/vllm/3.0").is_dir()
    assert os.readlink(packed / "data/x100/nowhere") == "to nothing"
    assert (packed / "data/x100/gemm/vllm/linked/gemm_perf.parquet").is_file()
    assert not (packed / "data/x100/gemm/vllm/linked").is_symlink()
    assert not (packed / "data/y200").exists() and not (packed / "data/x100/.hidden").exists()
    shutil.rmtree(root)
    assert restored(config) == answers(model)


def test_what_has_no_content_cannot_be_packed(op_level, tmp_path):
    with socket.socket(socket.AF_UNIX) as pipe:
        here = os.getcwd()
        os.chdir(tmp_path / "data/systems/data/x100")  # names of sockets are short
        try:
            pipe.bind("s")
        finally:
            os.chdir(here)
        model = tuned(op_level)
        with pytest.raises(errors.StateSnapshotError, match="data/x100/s is neither a file nor a directory that ends"):
            model.save_state_snapshot(tmp_path / "saved", include_perf_db=True)
        assert not (tmp_path / "saved").exists()
        assert restored(model.save_state_snapshot(tmp_path / "referenced")) == answers(model)


TAMPERED = {
    "changed": (lambda root: (root / "x100.yaml").write_text("x"), "perf_db/systems/x100.yaml: expected .* bytes"),
    "removed": (lambda root: (root / "x100.yaml").unlink(), "x100.yaml"),
    "added": (lambda root: (root / "data/x100/new").touch(), "data/new: expected nothing"),
    "linked": (
        lambda root: (root.rename(root.with_name("real")), root.symlink_to("real")),
        "perf_db/systems: expected a directory, found a symbolic link",
    ),
}


@pytest.mark.parametrize("change", TAMPERED)
def test_a_packed_copy_that_was_tampered_with(op_level, tmp_path, change):
    edit, message = TAMPERED[change]
    config = tuned(op_level).save_state_snapshot(tmp_path / "saved", include_perf_db=True)
    edit(tmp_path / "saved/perf_db/systems")
    error = FileNotFoundError if change == "removed" else errors.StateSnapshotError
    with pytest.raises(error, match=message):
        ForwardPassPerfModel.best_available(config)


def test_a_copy_whose_configuration_was_edited_reads_the_data_of_the_original(op_level, tmp_path):
    model = tuned(op_level)
    model.save_state_snapshot(tmp_path / "saved", include_perf_db=True)
    config = copied(tmp_path / "saved", tmp_path / "copy")
    assert config["systems_paths"] == [str(tmp_path / "saved/perf_db/systems")]
    assert restored(config) == answers(model)
    moved = config | {"systems_paths": [str(tmp_path / "copy/perf_db/systems")]}
    shutil.rmtree(tmp_path / "saved")
    assert restored(moved) == answers(model)


def test_a_packed_snapshot_still_needs_the_configuration_of_the_model(op_level, tmp_path):
    config = tuned(op_level).save_state_snapshot(tmp_path / "saved", include_perf_db=True)
    shutil.rmtree(tmp_path / "data/tiny")
    with pytest.raises(ValueError, match="tiny"):
        ForwardPassPerfModel.best_available(config)


def test_data_that_differ_from_the_fingerprint_are_not_packed(op_level, tmp_path, monkeypatch):
    model = tuned(op_level)
    monkeypatch.setattr(type(model._kind.data_source), "require_unchanged", lambda _source: rescale(op_level))
    with pytest.raises(errors.StateSnapshotError, match="the copy differs from the data at data/gemm"):
        model.save_state_snapshot(tmp_path / "saved", include_perf_db=True)
    assert os.listdir(tmp_path) == ["data"]


# --- where the data lie ---


def respell(config, spelling):
    path = Path(root_of(config)) / "x100.yaml"
    text = path.read_text().replace("data_dir: data/x100", f"data_dir: {json.dumps(spelling)}")
    assert json.dumps(spelling) in text
    path.write_text(text)


@pytest.mark.parametrize("spelling", ["./data/x100", "data/./x100/", "data//x100"])
def test_plain_spellings_can_be_packed(op_level, tmp_path, spelling):
    respell(op_level, spelling)
    model = tuned(op_level)
    config = model.save_state_snapshot(tmp_path / "saved", include_perf_db=True)
    shutil.rmtree(tmp_path / "data/systems")
    assert restored(config) == answers(model)


SPELLINGS = {
    "..": (lambda root: "data/nothing/../x100", "is not made of plain relative names"),
    "outside by ..": (lambda root: "../systems/data/x100", "is not made of plain relative names"),
    "absolute": (lambda root: f"{root}/data/x100", "is not made of plain relative names"),
    "outside by a link": (lambda root: "linked", "leads outside of the root"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_can_be_referenced_but_not_packed(op_level, tmp_path, spelling):
    root = tmp_path / "data/systems"
    (root / "data/nothing").mkdir()
    spell, message = SPELLINGS[spelling]
    if spelling == "outside by a link":
        shutil.move(root / "data/x100", tmp_path / "elsewhere")
        (root / "linked").symlink_to(tmp_path / "elsewhere")
    respell(op_level, spell(root))
    model = tuned(op_level)
    config = model.save_state_snapshot(tmp_path / "saved")
    assert restored(config) == answers(model)
    assert in_a_new_process(config=config)["answers"] == answers(model)
    with pytest.raises(errors.StateSnapshotError, match=message):
        model.save_state_snapshot(tmp_path / "packed", include_perf_db=True)
    assert not (tmp_path / "packed").exists()


def test_a_link_inside_the_root_is_packed_as_what_it_leads_to(op_level, tmp_path):
    root = tmp_path / "data/systems"
    (root / "linked").symlink_to("data/x100")
    respell(op_level, "linked")
    model = tuned(op_level)
    config = model.save_state_snapshot(tmp_path / "saved", include_perf_db=True)
    shutil.rmtree(root)
    assert restored(config) == answers(model)


def test_a_missing_data_dir_is_part_of_what_was_saved(forward, tmp_path):
    config = tuned(forward).save_state_snapshot(tmp_path / "saved")
    assert not (tmp_path / "data/bare/data").exists()
    (tmp_path / "data/bare/data/x100").mkdir(parents=True)
    with pytest.raises(errors.StateSnapshotError, match="first at data: expected absent, found directory"):
        ForwardPassPerfModel.best_available(config)


def test_a_snapshot_names_the_one_root_it_was_saved_over(op_level, tmp_path):
    config = tuned(op_level).save_state_snapshot(tmp_path / "saved")
    with pytest.raises(errors.StateSnapshotError, match="expected the one root that the snapshot was saved over"):
        ForwardPassPerfModel.best_available(config | {"systems_paths": [root_of(config), str(tmp_path)]})
