"""Snapshots of frozen forests: what they hold, where they may lie, and what is refused.

Source: snapshot.md sections 3, 4, 6 and 8.
"""

import hashlib
import json
import shutil

import pytest

from fpmsdk import ForwardPassPerfModel, errors, inspect_state_snapshot
from fpmsdk.perfmodel import restoring
from tests.learned.checkpoints import written_checkpoint
from tests.learned.recorded import artifact_bytes, eval_frames, vectors
from tests.snapshot.kinds import continued, iterations, prepare
from tests.snapshot.tampering import copied, repinned

FOREST = "learned/forest.json"


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory):
    """A saved frozen model and one of an artifact alone; `(folder, config, iterations)` each."""
    folder = tmp_path_factory.mktemp("learned")
    configs = prepare(folder / "data")
    saved = {}
    for name in ("learned frozen hybrid", "from_learned"):
        frames = iterations(configs[name], "train", 200)
        model = ForwardPassPerfModel.best_available(configs[name])
        if name == "from_learned":
            model = ForwardPassPerfModel.from_learned(artifact_bytes("main").decode(), {"max_num_tokens": 200})
        model.tune_with_fpms([[rank] for rank in frames])
        saved[name] = (folder / name, model.save_state_snapshot(folder / name), frames, model)
    return saved


@pytest.fixture(params=["learned frozen hybrid", "from_learned"])
def snapshot(request, snapshots):
    return snapshots[request.param]


@pytest.fixture
def copy_of(snapshots, tmp_path):
    def make(name):
        folder = tmp_path / "copy"
        return folder, copied(snapshots[name][0], folder)

    return make


def refused(config, message, error=errors.StateSnapshotError):
    with pytest.raises(error, match=message) as refusal:
        ForwardPassPerfModel.best_available(config)
    assert not isinstance(refusal.value, errors.PerfDataNotAvailableError)


def test_a_snapshot_holds_the_exact_bytes_of_the_artifact(snapshot):
    folder, config, *_ = snapshot
    assert (folder / FOREST).read_bytes() == artifact_bytes("main")
    learned = config["estimator_config"]["fpm_learned"]
    assert learned["artifact_path"] == str(folder / FOREST)
    assert learned["source_sha256"] == hashlib.sha256(artifact_bytes("main")).hexdigest()


def test_a_restored_model_answers_and_reports_as_the_saved_one(snapshot):
    folder, config, frames, model = snapshot
    for restored in (
        ForwardPassPerfModel.best_available(config),
        ForwardPassPerfModel.best_available(state_snapshot=folder),
    ):
        assert [restored.estimate_forward_pass_time_ms(frame) for frame in frames] == [
            model.estimate_forward_pass_time_ms(frame) for frame in frames
        ]
        assert restored.learned_online_diagnostics() == model.learned_online_diagnostics()
        assert restored.learned_metadata() == model.learned_metadata()
        assert restored.readiness_report() == model.readiness_report()


def test_a_restored_model_of_an_artifact_alone_has_no_provenance_and_no_identity(snapshots):
    _, config, *_ = snapshots["from_learned"]
    model = ForwardPassPerfModel.best_available(config)
    assert model.diagnostics()["provenance"] is None
    assert model.learned_online_diagnostics()["identity_verified"] is False
    assert model.deployment_topology()["model"] == "from_learned"


@pytest.mark.parametrize(
    ("name", "kind"), [("learned frozen hybrid", "learned_frozen"), ("from_learned", "from_learned")]
)
def test_inspection_names_the_kind_and_the_files(snapshots, name, kind):
    report = inspect_state_snapshot(snapshots[name][0])
    assert report["kind"] == kind
    assert [file["path"] for file in report["files"]] == ["state.bin", FOREST]


def test_a_snapshot_of_a_snapshot_stands_alone(copy_of, tmp_path):
    folder, config = copy_of("from_learned")
    config["estimator_config"]["fpm_learned"]["artifact_path"] = str(folder / FOREST)
    again = ForwardPassPerfModel.best_available(continued(config)).save_state_snapshot(tmp_path / "again")
    shutil.rmtree(folder)
    assert ForwardPassPerfModel.best_available(again).diagnostics()["source"] == "learned_with_correction"
    assert (tmp_path / "again" / "state.bin").exists()


def test_of_a_checkpoint_the_forests_alone_are_kept(tmp_path):
    frozen = vectors()["identity_config"]
    source = written_checkpoint(tmp_path)
    learned = {"checkpoint_path": str(source), "adaptation": "frozen"}
    model = ForwardPassPerfModel.best_available(frozen | {"estimator_config": {"fpm_learned": learned}})
    frames = [[frame] for frame in eval_frames()[:60]]
    model.tune_with_fpms(frames)
    config = model.save_state_snapshot(tmp_path / "saved")
    assert (tmp_path / "saved" / FOREST).read_bytes() == (source / "model.json").read_bytes()
    assert config["estimator_config"]["fpm_learned"]["checkpoint_path"] is None
    shutil.rmtree(source)
    restored = ForwardPassPerfModel.best_available(config)
    assert restored.learned_online_diagnostics() == model.learned_online_diagnostics()
    assert [restored.estimate_forward_pass_time_ms(frame) for frame in frames] == [
        model.estimate_forward_pass_time_ms(frame) for frame in frames
    ]


def test_a_copy_of_an_artifact_alone_names_its_own_forests(copy_of):
    folder, config = copy_of("from_learned")
    refused(config, f"artifact_path: expected the forests of the snapshot, '{folder}/{FOREST}', found ")
    config["estimator_config"]["fpm_learned"]["artifact_path"] = str(folder / FOREST)
    assert ForwardPassPerfModel.best_available(config).diagnostics()["source"] == "learned_with_correction"


def test_forests_that_were_tampered_with(copy_of):
    folder, config = copy_of("learned frozen hybrid")
    config["estimator_config"]["fpm_learned"]["artifact_path"] = str(folder / FOREST)
    content = (folder / FOREST).read_bytes()
    (folder / FOREST).write_bytes(content[:-1] + b" ")
    refused(config, "forest.json: expected SHA-256")
    (folder / FOREST).write_bytes(content + b" ")
    refused(config, f"forest.json: expected {len(content)} bytes, found {len(content) + 1}")
    (folder / FOREST).unlink()
    refused(config, "forest.json", FileNotFoundError)


def test_forests_of_another_snapshot_that_are_missing_are_a_missing_file(copy_of, tmp_path):
    _, config = copy_of("learned frozen hybrid")
    config["estimator_config"]["fpm_learned"]["artifact_path"] = str(tmp_path / "none.json")
    refused(config, "none.json", FileNotFoundError)


def test_forests_other_than_the_pinned_ones(copy_of):
    folder, _ = copy_of("learned frozen hybrid")
    document = json.loads((folder / FOREST).read_bytes())
    document["stores"]["pure_decode"]["baseline"] = 9.0
    (folder / FOREST).write_text(json.dumps(document))

    def change(manifest):
        record = next(file for file in manifest["files"] if file["path"] == FOREST)
        content = (folder / FOREST).read_bytes()
        record |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    config = repinned(folder, change=change)
    config["estimator_config"]["fpm_learned"]["artifact_path"] = str(folder / FOREST)
    refused(config, "forest.json: expected SHA-256 .*, as source_sha256 pins it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.update(tp=2), "identity: tp: expected 1, found 2|identity.tp"),
        (
            lambda config: config["estimator_config"]["fpm_learned"].update(source_sha256="0" * 64),
            "source_sha256",
        ),
        (lambda config: config.update(model="from_learned", system="from_learned"), "identity"),
    ],
)
def test_another_identity_is_refused(copy_of, change, message):
    folder, config = copy_of("learned frozen hybrid")
    config["estimator_config"]["fpm_learned"]["artifact_path"] = str(folder / FOREST)
    change(config)
    refused(config, message)


def test_forests_swapped_after_the_check_are_not_used(copy_of, monkeypatch):
    folder, config = copy_of("from_learned")
    config["estimator_config"]["fpm_learned"]["artifact_path"] = str(folder / FOREST)
    select = restoring.select

    def swap(*given):
        (folder / FOREST).write_bytes(b"swapped")
        return select(*given)

    monkeypatch.setattr(restoring, "select", swap)
    assert ForwardPassPerfModel.best_available(config).diagnostics()["source"] == "learned_with_correction"


def test_a_restored_model_refuses_tuning_unless_told_otherwise(snapshot):
    _, config, frames, _ = snapshot
    with pytest.raises(errors.TuningRejectedError):
        ForwardPassPerfModel.best_available(config).tune_with_fpms([[frames[0]]])
    ForwardPassPerfModel.best_available(continued(config)).tune_with_fpms([[frames[0]]])
