"""Signatures, classes of errors, what each call returns. Source: snapshot.md sections 1, 2 and 8."""

import copy
import inspect
import json
import os

import pytest

import fpmsdk
from fpmsdk import (
    ForwardPassPerfModel,
    ForwardPassPerfModelConfig,
    FpmBatch,
    config_engine_launch_mismatches,
    errors,
    inspect_state_snapshot,
    sample,
)
from tests.snapshot.tampering import repinned


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("save_state_snapshot", ["self", "path", "include_perf_db"]),
        ("inspect_state_snapshot", ["path"]),
        ("readiness_report", ["self"]),
        ("deployment_topology", ["self"]),
        ("engine_launch_mismatches", ["self", "launch_args"]),
        ("config_engine_launch_mismatches", ["launch_args", "config", "state_snapshot"]),
        ("best_available", ["config", "state_snapshot"]),
    ],
)
def test_parameters_have_the_names_and_the_order_of_the_contract(name, parameters):
    assert list(inspect.signature(getattr(ForwardPassPerfModel, name)).parameters) == parameters


@pytest.mark.parametrize(
    "function",
    [
        ForwardPassPerfModel.best_available,
        ForwardPassPerfModel.config_engine_launch_mismatches,
        config_engine_launch_mismatches,
    ],
)
def test_the_configuration_defaults_to_none_and_the_snapshot_is_a_keyword(function):
    parameters = inspect.signature(function).parameters
    assert parameters["config"].default is None
    assert parameters["state_snapshot"].default is None
    assert parameters["state_snapshot"].kind is inspect.Parameter.KEYWORD_ONLY


def test_packing_is_a_keyword_and_off():
    parameter = inspect.signature(ForwardPassPerfModel.save_state_snapshot).parameters["include_perf_db"]
    assert (parameter.kind, parameter.default) == (inspect.Parameter.KEYWORD_ONLY, False)


@pytest.mark.parametrize("name", ["inspect_state_snapshot", "config_engine_launch_mismatches"])
def test_two_calls_are_also_static_methods_of_the_model(name):
    assert isinstance(inspect.getattr_static(ForwardPassPerfModel, name), staticmethod)
    own = list(inspect.signature(getattr(ForwardPassPerfModel, name)).parameters)
    assert own == list(inspect.signature(getattr(fpmsdk, name)).parameters)


@pytest.mark.parametrize(
    ("builtin", "name"),
    [
        (FileNotFoundError, "StateSnapshotNotFoundError"),
        (FileExistsError, "StateSnapshotExistsError"),
        (NotADirectoryError, "StateSnapshotNotADirectoryError"),
        (IsADirectoryError, "StateSnapshotIsADirectoryError"),
        (PermissionError, "StateSnapshotPermissionError"),
        (OSError, "StateSnapshotIOError"),
    ],
)
def test_io_errors_are_the_matching_builtin_too(builtin, name):
    fault = errors.StateSnapshotIOError.of(builtin(5, "why", "/where"))
    assert type(fault) is getattr(errors, name)
    assert isinstance(fault, errors.StateSnapshotIOError) and isinstance(fault, builtin)
    assert (fault.errno, fault.strerror, fault.filename) == (5, "why", "/where")
    assert not isinstance(fault, errors.PerfDataNotAvailableError | ValueError)


@pytest.mark.parametrize("kind", [errors.StateSnapshotError, errors.TuningRejectedError, errors.StateLayoutError])
def test_refusals_are_value_errors(kind):
    assert issubclass(kind, ValueError) and not issubclass(kind, OSError | RuntimeError)


# --- what the calls do ---


def tuned(count=400, **changes):
    model = ForwardPassPerfModel.best_available(sample.MODEL | changes)
    model.tune_with_fpms(FpmBatch.from_frames(sample.train_frames()[:count]))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "snapshot"
    model = tuned()
    return model, folder, model.save_state_snapshot(folder)


def test_the_returned_configuration_is_that_of_the_directory_and_plain_json(saved):
    _, folder, config = saved
    assert json.loads((folder / "config.json").read_text()) == config == json.loads(json.dumps(config))
    assert ForwardPassPerfModel.normalize_config(config) == config
    assert list(config["estimator_config"])[-1] == "state_snapshot"
    assert config["estimator_config"]["state_snapshot"]["on_tune"] == "reject"


@pytest.mark.parametrize(
    "form",
    [
        lambda folder, config: {"config": config},
        lambda folder, config: {"config": copy.deepcopy(config)},
        lambda folder, config: {"config": json.loads(json.dumps(config))},
        lambda folder, config: {"config": ForwardPassPerfModelConfig(**config)},
        lambda folder, config: {"state_snapshot": folder},
        lambda folder, config: {"state_snapshot": str(folder) + "/"},
        lambda folder, config: {"state_snapshot": os.fsencode(folder)},
    ],
)
def test_every_way_to_name_a_snapshot_restores_it(saved, form):
    model, folder, config = saved
    batch = FpmBatch.from_frames(sample.eval_frames()[:300])
    restored = ForwardPassPerfModel.best_available(**form(folder, config))
    assert restored.estimate_many(batch).tobytes() == model.estimate_many(batch).tobytes()
    assert restored.diagnostics()["provenance"]["config"] == config


def test_a_relative_path_means_the_working_directory(saved, monkeypatch):
    _, folder, _ = saved
    monkeypatch.chdir(folder.parent)
    assert ForwardPassPerfModel.best_available(state_snapshot=folder.name).readiness_report()["ready"]
    assert inspect_state_snapshot(folder.name)["kind"] == "regression_linear"


@pytest.mark.parametrize("sources", [{}, {"config": sample.MODEL, "state_snapshot": "/s"}])
def test_exactly_one_source_is_given(sources):
    for call in (ForwardPassPerfModel.best_available, lambda **given: config_engine_launch_mismatches({}, **given)):
        with pytest.raises(errors.ConfigError, match="exactly one of config and state_snapshot"):
            call(**sources)


class Untouchable:
    def __getattr__(self, name):
        raise AssertionError(f"{name} was looked at")

    __iter__ = __len__ = None


def test_a_restored_model_rejects_tuning_before_it_looks_at_anything(saved):
    _, folder, _ = saved
    model = ForwardPassPerfModel.best_available(state_snapshot=folder)
    with pytest.raises(errors.TuningRejectedError, match="on_tune 'reject'"):
        model.tune_with_fpms(Untouchable())


def test_a_model_that_continues_tunes_and_is_saved_anew(saved, tmp_path):
    _, folder, config = saved
    config = copy.deepcopy(config)
    config["estimator_config"]["state_snapshot"]["on_tune"] = "continue"
    model = ForwardPassPerfModel.best_available(config)
    model.tune_with_fpms(FpmBatch.from_frames(sample.train_frames()[400:450]))
    again = model.save_state_snapshot(tmp_path / "again")
    assert again["estimator_config"]["state_snapshot"]["path"] == str(tmp_path / "again")
    assert again["estimator_config"]["state_snapshot"]["on_tune"] == "reject"
    assert (tmp_path / "again/state.bin").read_bytes() != (folder / "state.bin").read_bytes()
    assert (
        ForwardPassPerfModel.best_available(state_snapshot=tmp_path / "again").diagnostics()["retained_observations"]
        == (model.diagnostics()["retained_observations"])
    )


def test_equal_state_gives_equal_bytes(saved, tmp_path):
    model, folder, _ = saved
    ForwardPassPerfModel.best_available(state_snapshot=folder).save_state_snapshot(tmp_path / "restored")
    model.save_state_snapshot(tmp_path / "again")
    for other in ("restored", "again"):
        for name in ("state.bin", "manifest.json"):
            assert (tmp_path / other / name).read_bytes() == (folder / name).read_bytes()


def test_inspection_tells_what_the_model_told(saved):
    model, folder, config = saved
    told = inspect_state_snapshot(folder)
    assert list(told) == [
        "schema_version",
        "state_layout_version",
        "producer",
        "kind",
        "identity",
        "topology",
        "readiness",
        "diagnostics",
        "engine_spec_sha256",
        "perf_data_fingerprint",
        "files",
        "manifest_sha256",
    ]
    assert told["readiness"] == model.readiness_report()
    assert told["topology"] == model.deployment_topology()
    assert told["manifest_sha256"] == config["estimator_config"]["state_snapshot"]["sha256"]
    assert [file["path"] for file in told["files"]] == ["state.bin"]
    assert told["producer"] == {
        "fpmsdk_version": fpmsdk.__version__,
        "engine_spec_schema_version": None,
        "state_encoding": "positional-little-endian",
    }
    assert (told["engine_spec_sha256"], told["perf_data_fingerprint"]) == (None, None)
    assert ForwardPassPerfModel.inspect_state_snapshot(folder) == told


def test_the_digest_is_filled_in_by_normalisation(saved):
    _, folder, config = saved
    written = copy.deepcopy(config)
    written["estimator_config"]["state_snapshot"] = {"path": f"{folder.parent}/x/.././snapshot"}
    assert ForwardPassPerfModel.normalize_config(written) == config


def test_a_configuration_without_a_snapshot_has_no_such_field():
    assert "state_snapshot" not in ForwardPassPerfModel.normalize_config(sample.MODEL)["estimator_config"]


# --- launch ---

LAUNCH = {"engine": {"worker_type": "aggregated"}}


def test_launch_accepts_the_model_its_configuration_and_its_snapshot(saved):
    model, folder, config = saved
    assert model.engine_launch_mismatches(LAUNCH) == []
    assert config_engine_launch_mismatches(LAUNCH, config) == []
    assert config_engine_launch_mismatches(LAUNCH, state_snapshot=folder) == []
    assert ForwardPassPerfModel.best_available(config).engine_launch_mismatches(LAUNCH) == []


def test_every_conflict_is_told_by_each_of_them(saved):
    model, folder, config = saved
    launch = {"engine": {"worker_type": "decode"}, "dp_size": 2, "tensor_parallel_size": 4}
    expected = [
        "tensor_parallel_size conflicts with canonical tp",
        "dp_size conflicts with canonical attention_dp",
        "AIS worker_type must match engine role",
    ]
    assert model.engine_launch_mismatches(launch) == expected
    assert config_engine_launch_mismatches(launch, config) == expected
    assert config_engine_launch_mismatches(launch, state_snapshot=folder) == expected
    assert ForwardPassPerfModel.config_engine_launch_mismatches(launch, state_snapshot=folder) == expected


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"dp_size": 0}, "dp_size must be positive"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be positive"),
        ({"gpu_memory_utilization": 2.0}, "gpu_memory_utilization must be finite and in \\[0, 1\\]"),
        ({"startup_time": -1}, "startup_time must be finite and non-negative"),
    ],
)
def test_launch_checks_its_own_input_first(saved, tmp_path, inputs, message):
    model, folder, config = saved
    launch = {"engine": {"worker_type": "decode"}, **inputs}
    broken = copy.deepcopy(config)
    broken["estimator_config"]["state_snapshot"]["sha256"] = "0" * 64
    for call in (
        lambda: model.engine_launch_mismatches(launch),
        lambda: config_engine_launch_mismatches(launch, config),
        lambda: config_engine_launch_mismatches(launch, state_snapshot=folder),
        lambda: config_engine_launch_mismatches(launch, broken),
    ):
        with pytest.raises(errors.LaunchConfigError, match=message):
            call()


def test_a_pinned_snapshot_is_checked_as_far_as_its_manifest(saved, tmp_path):
    model, _, _ = saved
    folder = tmp_path / "snapshot"
    config = model.save_state_snapshot(folder)
    (folder / "state.bin").write_bytes(b"not looked at")
    assert config_engine_launch_mismatches(LAUNCH, config) == []
    assert config_engine_launch_mismatches(LAUNCH, state_snapshot=folder) == []
    with pytest.raises(errors.StateSnapshotError, match="identity.tp: expected 1, found 2"):
        config_engine_launch_mismatches(LAUNCH, config | {"tp": 2})
    (folder / "manifest.json").write_bytes(b"{}")
    with pytest.raises(errors.StateSnapshotError, match="expected SHA-256"):
        config_engine_launch_mismatches(LAUNCH, config)
    config = repinned(folder, manifest=b"[]")
    with pytest.raises(errors.StateSnapshotError, match="expected an object, found an array"):
        config_engine_launch_mismatches(LAUNCH, config)
    os.remove(folder / "manifest.json")
    with pytest.raises(FileNotFoundError):
        config_engine_launch_mismatches(LAUNCH, config)
