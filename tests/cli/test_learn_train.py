"""`fpmsdk learn train`: what it writes and reports, and what it refuses."""

import json
import re

import msgspec
import pytest
from typer.testing import CliRunner

from fpmsdk import ForwardPassPerfModel
from fpmsdk.cli.app import app
from fpmsdk.metrics import write_frames

CONFIG = {"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode", "tp": 2}
QUICK = ["--features", "num_decode_requests", "--max-iter", "5"]


def run(*arguments):
    return CliRunner().invoke(app, ["learn", "train", *map(str, arguments)])


def message(requests):
    return {
        "wall_time": requests / 1000,
        "scheduled_requests": {"num_decode_requests": requests, "sum_decode_kv_tokens": 100 * requests},
    }


@pytest.fixture
def stream(tmp_path):
    path = tmp_path / "run.bin.gz"
    write_frames(path, [msgspec.msgpack.encode(message(n % 8 + 1)) for n in range(100)])
    return path


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_the_artifact_serves_the_deployment_that_it_was_trained_for(stream, config, tmp_path):
    output = tmp_path / "artifact.json"
    result = run(stream, "--output", output, "--config", config, *QUICK, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["training_iterations"], document["validation_iterations"]) == (80, 20)
    assert document["report"]["forest"]["pure_decode"]["iterations"] == 20
    assert document["bytes"] == output.stat().st_size
    learned = {"artifact_path": str(output), "adaptation": "frozen"}
    served = CONFIG | {"estimation_mode": "fpm_learned", "estimator_config": {"fpm_learned": learned}}
    model = ForwardPassPerfModel.best_available(served)
    assert model.learned_online_diagnostics()["identity_verified"] is True
    assert model.estimate_forward_pass_time_ms(message(4)) > 0.0


def test_an_online_learner_goes_on_from_the_checkpoint(stream, config, tmp_path):
    output, checkpoint = tmp_path / "artifact.json", tmp_path / "checkpoint"
    result = run(stream, "--output", output, "--config", config, "--checkpoint", checkpoint, *QUICK)
    assert result.exit_code == 0, result.output
    served = CONFIG | {"estimation_mode": "fpm_learned"}
    learned = {"frozen": {"artifact_path": str(output)}, "online": {"checkpoint_path": str(checkpoint)}}
    frozen, online = (
        ForwardPassPerfModel.best_available(
            served | {"estimator_config": {"fpm_learned": source | {"adaptation": adaptation}}}
        )
        for adaptation, source in learned.items()
    )
    estimates = [model.estimate_forward_pass_time_ms(message(4)) for model in (frozen, online)]
    assert estimates[0] == estimates[1]
    online.tune_with_fpms([[message(4) | {"wall_time": 0.009}]])
    assert online.estimate_forward_pass_time_ms(message(4)) != estimates[0]


@pytest.mark.parametrize("exists", [True, False])
def test_a_checkpoint_is_refused_before_training(exists, stream, config, tmp_path):
    given = ["--config", config] if exists else ["--worker-type", "decode"]
    result = run(
        stream, "--output", tmp_path / "a.json", "--checkpoint", tmp_path if exists else tmp_path / "new", *given
    )
    assert result.exit_code == 2
    assert ("only written where nothing is" if exists else "--checkpoint needs --config") in result.stderr


def test_a_configuration_of_the_learned_mode_need_not_have_its_artifact_yet(stream, config, tmp_path):
    learned = {"artifact_path": str(tmp_path / "artifact.json"), "adaptation": "frozen"}
    config.write_text(
        json.dumps(CONFIG | {"estimation_mode": "fpm_learned", "estimator_config": {"fpm_learned": learned}})
    )
    assert run(stream, "--output", tmp_path / "artifact.json", "--config", config, *QUICK).exit_code == 0
    assert ForwardPassPerfModel.best_available(json.loads(config.read_text())) is not None


def test_without_a_configuration_the_artifact_has_no_identity(stream, tmp_path):
    output = tmp_path / "artifact.json"
    assert run(stream, "--output", output, "--worker-type", "decode", *QUICK).exit_code == 0
    assert "identity" not in json.loads(output.read_bytes())["metadata"]


def test_tables_tell_three_predictors_and_what_was_left_out(stream, tmp_path):
    result = run(stream, "--output", tmp_path / "a.json", "--worker-type", "decode", *QUICK)
    assert result.exit_code == 0
    for said in ("errors on later iterations", "trained on 80 iterations: pure_decode 80", "0 refused", "a.json"):
        assert said in result.stdout
    assert "…" not in result.stdout


def test_iterations_of_training_that_taught_nothing_are_counted_by_reason(tmp_path):
    prefill = {"wall_time": 0.01, "scheduled_requests": {"num_prefill_requests": 1, "sum_prefill_tokens": 9}}
    messages = [message(n % 8 + 1) for n in range(60)] + [prefill] * 3 + [{}] * 2 + [message(2) | {"wall_time": 0}]
    path = tmp_path / "run.bin"
    write_frames(path, [msgspec.msgpack.encode(one) for one in messages])
    options = ("--output", tmp_path / "a.json", "--validation-fraction", "0", *QUICK, "--json")
    left_out = {
        role: json.loads(run(path, "--worker-type", role, *options).stdout)["train_left_out"]
        for role in ("decode", "aggregated")
    }
    assert left_out["decode"] == {"refused": 3, "untimed": 1, "idle": 2, "too_few": 0}
    assert left_out["aggregated"] == {"refused": 0, "untimed": 1, "idle": 2, "too_few": 3}


def test_later_streams_and_a_part_of_the_first_exclude_each_other(stream, tmp_path):
    options = ("--worker-type", "decode", "--validation", stream, "--validation-fraction", "0.5")
    result = run(stream, "--output", tmp_path / "a.json", *options)
    assert result.exit_code == 2
    assert "--validation-fraction has no effect beside --validation" in result.stderr


def test_an_artifact_is_not_stamped_with_ranks_that_it_was_not_trained_on(stream, config, tmp_path):
    config.write_text(json.dumps(CONFIG | {"attention_dp": 2}))
    result = run(stream, "--output", tmp_path / "a.json", "--config", config, *QUICK)
    assert result.exit_code == 2
    assert "expected iterations of 2 ranks, as attention_dp says, found 1" in " ".join(result.stderr.split())
    assert not (tmp_path / "a.json").exists()


def test_later_streams_may_be_given_apart(stream, tmp_path):
    output = tmp_path / "a.json"
    result = run(stream, "--output", output, "--worker-type", "decode", "--validation", stream, *QUICK, "--json")
    document = json.loads(result.stdout)
    assert (document["training_iterations"], document["validation_iterations"]) == (100, 100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "--worker-type: expected one of prefill, decode, aggregated, or --config, found None"),
        (["--worker-type", "agg"], "found 'agg'"),
        (["--worker-type", "decode", "--features", "zzz"], "features: expected one of the presets"),
        (["--worker-type", "decode", "--target", "s"], "target: expected one of log_ms, ms"),
        (["--worker-type", "decode", "--grouping", "zzz"], "grouping: expected one of none, counter"),
        (["--worker-type", "decode", "--grouping", "counter"], "worker_id: grouping by counter needs one"),
        (["--worker-type", "decode", "--validation-fraction", "1"], "--validation-fraction: expected"),
        (["--worker-type", "decode", "--features", "fpm5,num_decode_requests"], "the preset 'fpm5' stands alone"),
        (["--worker-type", "decode", "--output", "-"], "--output: expected a file to write, found '-'"),
        (["--worker-type", "decode", "--min-store-rows", "1000"], "min_store_rows: no workload kind has 1000 rows"),
        (["--worker-type", "decode", "--max-iter", "0"], "max_iter: expected 1 to 100000, found 0"),
    ],
)
def test_bad_input_is_refused_by_name_and_writes_nothing(changes, message, stream, tmp_path):
    output = tmp_path / "artifact.json"
    result = run(stream, "--output", output, *changes)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not output.exists()


def test_role_and_configuration_are_not_given_together(stream, config, tmp_path):
    result = run(stream, "--output", tmp_path / "a.json", "--config", config, "--worker-type", "decode")
    assert result.exit_code == 2
    assert "--worker-type is part of the --config file" in result.stderr


def test_what_was_at_the_output_stays_when_training_fails(stream, tmp_path):
    output = tmp_path / "artifact.json"
    output.write_text("before")
    assert run(stream, "--output", output, "--worker-type", "prefill").exit_code == 2
    assert output.read_text() == "before"


@pytest.mark.parametrize(
    "output, checkpoint, message",
    [
        ("none/x.json", None, "--output: .*none is no directory"),
        (".", None, "--output: expected a file to write, found the directory"),
        ("run.bin.gz", None, "--output: .*would replace the telemetry"),
        ("same", "same", "--checkpoint: .*would replace the file of --output"),
        ("ck/x.json", "ck", "--output: .*ck is no directory"),
    ],
)
def test_what_cannot_be_written_is_refused_before_training_and_nothing_is(
    output, checkpoint, message, stream, config, tmp_path
):
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    options = [] if checkpoint is None else ["--checkpoint", tmp_path / checkpoint]
    ran = run(stream, "--config", config, "--output", tmp_path / output, *options, *QUICK)
    assert ran.exit_code == 2
    assert re.search(message, " ".join(ran.stderr.split()))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_wall_time_beyond_all_milliseconds_is_no_time(tmp_path, config):
    path = tmp_path / "run.bin.gz"
    messages = [message(n % 8 + 1) for n in range(100)] + [message(3) | {"wall_time": 1.7e308}]
    write_frames(path, [msgspec.msgpack.encode(one) for one in messages])
    ran = run(path, "--config", config, "--output", tmp_path / "x.json", "--validation", path, *QUICK, "--json")
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["report"]["untimed"] == 1


def test_refused_rows_name_the_features_that_refuse_none(stream, tmp_path):
    ran = run(stream, "--worker-type", "decode", "--output", tmp_path / "x.json")
    assert ran.exit_code == 2 and "such as fpm5" in " ".join(ran.stderr.split())
