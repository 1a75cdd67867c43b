"""`fpmsdk snapshot`: save, inspect, verify, diff, and a replay priced by a saved model."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fpmsdk.sample
from fpmsdk import ForwardPassPerfModel, FpmBatch, sample
from fpmsdk.cli.app import app
from fpmsdk.metrics import write_frames
from tests.snapshot.tampering import copied, repinned

REQUESTS = str(Path(fpmsdk.sample.__file__).parent / "requests_eval.json.gz")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def result_of(*arguments, code=0):
    ran = run(*arguments, "--json")
    assert ran.exit_code == code, ran.output
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    path = tmp_path_factory.mktemp("frames") / "some.bin.gz"
    write_frames(path, fpmsdk.sample.train_frames()[:3000])
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory, frames):
    """Two states of one model: after 3000 iterations, and after 50 more."""
    folder = tmp_path_factory.mktemp("saved")
    told = result_of("snapshot", "save", folder / "first", frames)
    told["config"]["estimator_config"]["state_snapshot"]["on_tune"] = "continue"
    model = ForwardPassPerfModel.best_available(told["config"])
    model.tune_with_fpms(FpmBatch.from_frames(sample.train_frames()[3000:3050]))
    model.save_state_snapshot(folder / "second")
    return folder / "first", folder / "second", told


def test_save_tunes_and_writes_what_restores(saved, frames):
    first, _, told = saved
    model = ForwardPassPerfModel.best_available(state_snapshot=first)
    assert model.diagnostics()["retained_observations"] == told["retained_observations"] > 0
    again = run("snapshot", "save", first, frames)
    assert again.exit_code == 2
    assert again.stderr.startswith("error: ") and "only written where nothing is" in again.stderr


def test_a_missing_directory_is_named_as_it_was_given(frames, tmp_path):
    ran = CliRunner().invoke(app, ["snapshot", "save", str(tmp_path / "none" / "saved"), str(frames)])
    assert ran.exit_code == 2
    assert ran.stderr.split(": ")[-1].strip() == f"'{tmp_path / 'none' / 'saved'}'"


def test_inspect_tells_kind_readiness_and_files(saved):
    first, _, _ = saved
    assert result_of("snapshot", "inspect", first) == fpmsdk.inspect_state_snapshot(first)
    shown = run("snapshot", "inspect", first).stdout
    assert "regression_linear of unnamed on unprofiled, vllm aggregated, tp 1" in shown
    assert "pure_decode" in shown and "below_min_observations" in shown


def test_verify_restores_with_every_check(saved, tmp_path):
    first, _, _ = saved
    assert result_of("snapshot", "verify", first)["verified"] is True
    assert "every check holds; ready" in run("snapshot", "verify", first).stdout
    copied(first, tmp_path / "copy")
    (tmp_path / "copy/state.bin").write_bytes(b"")
    refused = run("snapshot", "verify", tmp_path / "copy")
    assert refused.exit_code == 2
    assert "state.bin: expected" in refused.stderr
    missing = run("snapshot", "verify", tmp_path / "missing")
    assert missing.exit_code == 2 and "No such file" in missing.stderr


def test_a_sound_model_that_is_not_ready_exits_with_1(tmp_path):
    ForwardPassPerfModel.best_available(sample.MODEL).save_state_snapshot(tmp_path / "untuned")
    ran = run("snapshot", "verify", tmp_path / "untuned")
    assert (ran.exit_code, "not ready" in ran.stdout) == (1, True)


def test_diff_says_which_stores_changed_and_by_how_much(saved):
    first, second, _ = saved
    assert result_of("snapshot", "diff", first, first)["equal"] is True
    assert run("snapshot", "diff", first, first).stdout == "the states are equal, byte for byte\n"
    found = result_of("snapshot", "diff", first, second, code=1)
    stores = {store["store"]: store for store in found["stores"]}
    assert (found["equal"], found["identity"], found["kind"]) == (False, None, ["regression_linear"] * 2)
    assert stores["pure_decode"]["changed"] is True
    assert stores["cross_rank_aggregated"] == {
        "store": "cross_rank_aggregated",
        "layout": "linear_store",
        "rows": [0, 0],
        "only": None,
        "changed": False,
        "fields": [],
    }
    clock = next(field for field in stores["pure_decode"]["fields"] if field["field"] == "clock")
    assert clock["elements"] == [7, 7] and clock["changed_elements"] > 0 and clock["largest_change"] > 0
    shown = run("snapshot", "diff", first, second)
    assert shown.exit_code == 1
    assert "pure_decode" in shown.stdout and "unchanged" in shown.stdout


def test_diff_of_two_kinds_names_the_first_difference(saved, tmp_path):
    first, _, _ = saved
    decode = ForwardPassPerfModel.best_available(sample.MODEL | {"worker_type": "decode"})
    decode.save_state_snapshot(tmp_path / "decode")
    found = result_of("snapshot", "diff", first, tmp_path / "decode", code=1)
    assert found["identity"].startswith("identity.model: expected 'unnamed'")
    assert [store["rows"][1] for store in found["stores"]] == [0, None, None, None]
    assert "only before" in run("snapshot", "diff", first, tmp_path / "decode").stdout


def test_diff_reads_only_what_the_digests_vouch_for(saved, tmp_path):
    first, second, _ = saved
    copied(first, tmp_path / "copy")
    (tmp_path / "copy/state.bin").write_bytes(b"x")
    assert run("snapshot", "diff", tmp_path / "copy", second).exit_code == 2
    repinned(tmp_path / "copy", state=b"12345678")
    assert "state.bin, byte 0" in run("snapshot", "diff", tmp_path / "copy", second).stderr


def test_a_replay_is_priced_by_a_saved_model(saved, frames):
    first, _, _ = saved
    common = ("replay", REQUESTS, "--head", "20")
    by_snapshot, by_frames = result_of(*common, "--snapshot", first), result_of(*common, "--frames", frames)
    for report in (by_snapshot, by_frames):
        report.pop("wall_time_ms", None)
    assert by_snapshot["summary"]["mean_ttft_ms"] == by_frames["summary"]["mean_ttft_ms"]
    refused = run(*common, "--snapshot", first, "--frames", frames)
    assert refused.exit_code == 2 and "--frames and --snapshot both price the passes" in refused.stderr
