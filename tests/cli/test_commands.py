"""The command line: results, JSON, exit codes 0, 1 and 2, and one message instead of a traceback."""

import gzip
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import fpmsdk.cli.doctor
import fpmsdk.sample
from fpmsdk.cli.app import app
from fpmsdk.metrics import write_frames
from tests.perfdb.pairs import decode, prefill, write_pair
from tests.perfdb.synthetic import GEMM, Systems

SAMPLE = Path(fpmsdk.sample.__file__).parent
REQUESTS = str(SAMPLE / "requests_eval.json.gz")
DECODE = {"scheduled_requests": {"num_decode_requests": 2, "sum_decode_kv_tokens": 900}}


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    path = tmp_path_factory.mktemp("frames") / "some.bin.gz"
    write_frames(path, fpmsdk.sample.train_frames()[:3000])
    return str(path)


@pytest.fixture
def write(tmp_path):
    def write_json(name, document):
        path = tmp_path / name
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return str(path)

    return write_json


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, arguments, input=stdin)


def result_of(*arguments, stdin=None, code=0):
    ran = run(*arguments, "--json", stdin=stdin)
    assert ran.exit_code == code, ran.output
    return json.loads(ran.stdout)


def rejection_of(*arguments, code=2):
    ran = run(*arguments)
    assert ran.exit_code == code, ran.output
    assert "Traceback" not in ran.output
    assert ran.stdout == ""
    return ran.stderr


def test_the_installed_command_exits_with_the_code_of_its_subcommand():
    code = "import sys; sys.argv = ['fpmsdk', 'replay', 'none.csv']; from fpmsdk.cli import main; main()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "error: none.csv: cannot read the trace: No such file or directory\n"


@pytest.mark.parametrize("arguments", [(), ("--help",), ("demo", "--help"), ("replay", "--help")])
def test_help_is_shown(arguments):
    assert "Usage" in run(*arguments).output


@pytest.mark.parametrize("arguments", [("nope",), ("tune",), ("replay", "x.csv", "--fixed", "1")])
def test_wrong_usage_is_rejected(arguments):
    assert run(*arguments).exit_code == 2


def test_demo_prints_predicted_next_to_measured():
    ran = run("demo")
    assert ran.exit_code == 0
    for text in (
        "prefill",
        "decode",
        "mixed",
        "TTFT, ms, p90",
        "measured",
        "replayed",
        "output tokens/s per user, p50",
    ):
        assert text in ran.stdout


def test_demo_as_json_has_every_figure():
    result = result_of("demo")
    for error in (result["error_after_training"], result["error_while_learning"]):
        assert error["all"]["iterations"] == sum(error[kind]["iterations"] for kind in ("prefill", "decode", "mixed"))
        assert 0 < error["all"]["mape_percent"] < 20
    for figures in (result["replay"][name] for name in ("ttft_ms", "itl_ms", "e2e_ms")):
        assert {"measured", "replayed", "error_percent"} == set(figures["p50"]) == set(figures["p90"])
    assert abs(result["replay"]["duration_ms"]["total"]["error_percent"]) < 2


def test_tune_reports_errors_skips_and_readiness(frames):
    result = result_of("tune", frames)
    assert result["iterations"] == 3000
    assert result["diagnostics"]["readiness"] == "ready"
    assert result["error"]["decode"]["mape_percent"] > 0
    assert set(result["skipped"]) >= {"idle", "zero_wall_time", "negative_wall_time"}
    assert "readiness: ready" in run("tune", frames).stdout


def test_tune_reads_recorder_files_and_several_streams(frames, write):
    record = {"received_at_ns": 1, "metrics": DECODE | {"wall_time": 0.005}}
    recorded = write("recorded.jsonl", "\n".join(json.dumps(record) for _ in range(3)))
    assert result_of("tune", frames, recorded)["iterations"] == 3003


def test_tune_takes_the_model_of_a_configuration_file(frames, write):
    config = {"model": "m", "system": "s", "backend": "vllm", "worker_type": "aggregated"} | {
        "estimation_mode": "fpm_regression",
        "estimator_config": {"fpm_regression": {"sampling": {"max_observations": 32}}},
    }
    result = result_of("tune", frames, "--config", write("config.json", config))
    assert result["diagnostics"]["provenance"]["config"]["model"] == "m"
    assert max(store["retained_observations"] for store in result["stores"]) <= 32


def test_tune_counts_iterations_that_no_forest_was_trained_for(frames, write):
    leaf = {"left": [-1], "right": [-1], "feature": [0], "threshold": [0.0], "value": [0.0]}
    artifact = {
        "schema": "aic_fpm_learned_forward_perf",
        "schema_version": 1,
        "worker_type": "aggregated",
        "target": "log_ms",
        "features": ["num_decode_requests"],
        "stores": {"pure_decode": {"baseline": 1.0, "trees": [leaf]}},
        "metadata": {},
    }
    learned = {"artifact_path": write("artifact.json", artifact), "adaptation": "frozen"}
    config = {"model": "m", "system": "s", "backend": "vllm", "worker_type": "aggregated"} | {
        "estimation_mode": "fpm_learned",
        "estimator_config": {"fpm_learned": learned},
    }
    result = result_of("tune", frames, "--config", write("config.json", config))
    decode = result["error"]["decode"]["iterations"]
    assert result["skipped"]["untrained"] == result["error"]["all"]["not_ready"] > 0
    assert result["error"]["all"]["iterations"] == decode > 0


def test_tune_groups_the_ranks_of_an_iteration(tmp_path):
    from fpmsdk.metrics import ForwardPassMetrics, ScheduledRequestMetrics, encode_frame

    path = tmp_path / "ranks.bin"
    write_frames(
        path,
        [
            encode_frame(
                ForwardPassMetrics(
                    dp_rank=rank,
                    counter_id=counter,
                    wall_time=0.01 * counter,
                    scheduled_requests=ScheduledRequestMetrics(
                        num_decode_requests=counter, sum_decode_kv_tokens=900 * counter
                    ),
                )
            )
            for counter in range(1, 9)
            for rank in (1, 0)
        ],
    )
    assert result_of("tune", str(path), "--attention-dp", "2")["iterations"] == 8


def test_a_model_that_is_not_ready_afterwards_is_a_negative_result(write):
    recorded = write("one.jsonl", json.dumps({"received_at_ns": 1, "metrics": DECODE | {"wall_time": 0.005}}))
    assert result_of("tune", recorded, code=1)["diagnostics"]["readiness"] == "insufficient_data"


def test_estimate_answers_from_a_file_and_from_stdin(frames, write):
    from_file = result_of("estimate", write("fpm.json", DECODE), "--frames", frames)
    from_stdin = result_of("estimate", "-", "--frames", frames, stdin=json.dumps([DECODE]))
    assert from_file == from_stdin
    assert from_file["latency_ms"] > 0
    assert run("estimate", write("fpm.json", DECODE), "--frames", frames).stdout.endswith(" ms\n")


def test_an_estimate_that_is_not_ready_is_a_negative_result(write):
    assert result_of("estimate", write("fpm.json", DECODE), code=1)["latency_ms"] is None
    ran = run("estimate", write("fpm.json", DECODE))
    assert ran.exit_code == 1
    assert "tune the model with --frames first" in ran.stdout


def test_replay_reports_and_writes_the_records(tmp_path):
    output = tmp_path / "report.json"
    result = result_of("replay", REQUESTS, "--fixed", "50", "5", "--head", "20", "--output", str(output))
    assert result["trace"]["num_requests"] == 20
    assert result["summary"]["completed_requests"] == 20
    assert result["options"]["scheduler_rules"] == "vllm"
    written = json.loads(output.read_text())
    assert written["summary"] == result["summary"]
    assert len(written["per_request"]) == 20
    assert "20 of 20 requests completed" in run("replay", REQUESTS, "--fixed", "50", "5", "--head", "20").stdout


def test_replay_prices_with_a_model_tuned_on_frames_and_takes_options(frames, write):
    launch = write("launch.json", {"engine": {"block_size": 32, "num_gpu_blocks": 400, "max_num_seqs": 16}})
    options = ("--scheduler-rules", "simulator", "--mixed-pass-pricing", "separate", "--concurrency", "2")
    result = result_of(
        "replay",
        REQUESTS,
        "--head",
        "5",
        "--frames",
        frames,
        "--launch",
        launch,
        "--ttft-ms",
        "900",
        *options,
    )
    assert result["options"]["concurrency"] == 2
    assert result["options"]["mixed_pass_pricing"] == "separate"
    assert result["summary"]["goodput_completed_requests"] <= 5


def test_a_replay_in_which_nothing_completes_is_a_negative_result(write):
    launch = write("launch.json", {"engine": {"block_size": 32, "num_gpu_blocks": 2}})
    said = rejection_of("replay", REQUESTS, "--head", "3", "--launch", launch, code=1)
    assert "no request completed: 3 of 3 were rejected" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("replay", "none.txt"), "the ending does not tell the trace format"),
        (("replay", REQUESTS, "--format", "pcap"), "unknown trace format 'pcap'"),
        (("replay", REQUESTS, "--head", "0"), "head(0) selects no requests"),
        (("replay", REQUESTS, "--fixed", "-1", "5"), "prefill_ms"),
        (("replay", REQUESTS, "--workers", "0"), "num_workers is 0"),
        (("replay", REQUESTS, "--ttft-ms", "0"), "sla.ttft_ms"),
        (("replay", REQUESTS, "--fixed", "1", "1", "--frames", "x.bin"), "give one of them"),
        (("replay", REQUESTS, "--config", "x.json"), "give --frames"),
        (("tune", "x.bin", "--config", "x.json", "--attention-dp", "2"), "give them there"),
        (("tune", "x.bin", "--worker-type", "agg"), "worker_type"),
        (("replay", REQUESTS, "--launch", "none.json"), "none.json"),
        (("tune", "none.bin"), "none.bin"),
        (("tune", "none.parquet"), "telemetry is a frame file"),
        (("estimate", "none.json"), "none.json"),
    ],
)
def test_rejected_input_is_one_message_and_exit_code_2(arguments, said):
    message = rejection_of(*arguments)
    assert said in message
    assert message.startswith("error: ")
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("{", "is not JSON"),
        ({"scheduled_requests": {"num_decode_requests": -1}}, "num_decode_requests"),
        ({"version": 2}, "version"),
        ('{"version": 1, "version": 1}', "duplicate field `version`"),
        pytest.param('{"x": ' + "[" * 100_000, "nested too deeply", id="deep"),
        pytest.param('{"x": ' + "[" * 500 + "]" * 500 + "}", "nested too deeply", id="rather deep"),
        ([], "at least one rank"),
    ],
)
def test_malformed_metrics_are_rejected(write, document, said):
    assert said in rejection_of("estimate", write("fpm.json", document))


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("[]", "is a JSON object, found list"),
        ('{"model": "m", "model": "n"}', "config.json: the model configuration is not JSON: duplicate field `model`"),
        pytest.param("[" * 100_000, "config.json: the model configuration is not JSON: nested too deeply", id="deep"),
        ({"model": "m", "system": "s", "backend": "vllm", "worker_type": "agg"}, "worker_type"),
        ({"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode", "typo": 1}, "typo"),
    ],
)
def test_a_malformed_configuration_is_rejected(write, frames, document, said):
    assert said in rejection_of("tune", frames, "--config", write("config.json", document))


def test_a_cut_frame_file_is_rejected(tmp_path):
    path = tmp_path / "cut.bin"
    write_frames(path, fpmsdk.sample.eval_frames()[:3])
    path.write_bytes(path.read_bytes()[:-5])
    assert "truncated in frame 2" in rejection_of("tune", str(path))


def test_doctor_reports_the_installation(monkeypatch, tmp_path):
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(tmp_path / "none"))
    result = result_of("doctor")
    assert result["healthy"] is True
    assert result["versions"]["fpmsdk"] == fpmsdk.__version__
    assert set(result["compiled_extensions"].values()) == {"ok"}
    assert "no such directory" in result["data_roots"]["FPMSDK_SYSTEMS_PATH"]
    assert all(value > 0 for value in result["timing"].values())
    assert "compiled extensions" in run("doctor").stdout


def test_doctor_names_what_is_broken(monkeypatch):
    real = fpmsdk.cli.doctor.importlib.import_module

    def import_module(name):
        if name == "fpmsdk._ext.replay":
            raise ImportError("undefined symbol")
        return real(name)

    monkeypatch.setattr("importlib.import_module", import_module)
    ran = run("doctor", "--json")
    assert ran.exit_code == 1
    assert json.loads(ran.stdout)["compiled_extensions"]["replay"] == "does not load: undefined symbol"
    assert "broken: replay" in ran.stderr


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    from fpmsdk.paths import cache_dir

    monkeypatch.setenv("FPMSDK_CACHE_DIR", str(tmp_path / "cache"))
    cache_dir.cache_clear()
    yield tmp_path / "cache"
    cache_dir.cache_clear()


def test_warmup_fills_every_cache(own_cache):
    result = result_of("warmup")
    assert result["caches"]["cache directory"] == str(own_cache)
    assert result["caches"]["bytecode"] == "compiled"
    assert own_cache.is_dir()


def test_warmup_compiles_the_tables_of_a_system(monkeypatch, tmp_path, own_cache):
    built = Systems(tmp_path / "systems")
    built.hardware()
    built.table("gemm/vllm/1.0", "gemm_perf", [GEMM])
    built.table("gemm/sglang/0.5", "gemm_perf", [GEMM | {"latency": 2.0}])
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(built.path))
    assert result_of("warmup", "--system", "x100")["caches"]["tables of x100"] == "2 compiled"
    assert len(list((own_cache / "perfdb").glob("table-*"))) == 2


def test_warmup_of_an_unknown_system_says_so(monkeypatch, tmp_path, own_cache):
    built = Systems(tmp_path / "systems")
    built.hardware()
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(built.path))
    assert "nearest: x100" in rejection_of("warmup", "--system", "x101")


def test_an_output_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "report.json"
    assert str(output) in rejection_of("replay", REQUESTS, "--head", "1", "--output", str(output))


@pytest.mark.parametrize("name", ["cut.jsonl.gz", "cut.bin.gz"])
@pytest.mark.parametrize("command", [("tune",), ("estimate", "fpm.json", "--frames"), ("replay", REQUESTS, "--frames")])
def test_damaged_telemetry_is_one_message_and_exit_code_2(tmp_path, write, name, command):
    (tmp_path / name).write_bytes(gzip.compress(json.dumps({"received_at_ns": 1, "metrics": {}}).encode())[:-9])
    command = [write(part, DECODE) if part == "fpm.json" else part for part in command]
    message = rejection_of(*command, str(tmp_path / name))
    assert message.startswith("error: ") and name in message


@pytest.mark.parametrize("name", ["empty.bin", "empty.jsonl", "empty.bin.gz"])
def test_telemetry_without_an_iteration_is_rejected(tmp_path, frames, name):
    (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    for others in ((), (frames,)):
        assert f"{name}: holds no iteration" in rejection_of("tune", *others, str(tmp_path / name))


@pytest.mark.parametrize("command", [("tune",), ("estimate", "fpm.json", "--frames")])
@pytest.mark.parametrize(
    ("metrics", "options"),
    [
        ({"version": 2}, ()),
        ({"scheduled_requests": {"num_prefill_requests": -1}}, ()),
        (
            {"wall_time": 1, "scheduled_requests": {"num_prefill_requests": 1, "sum_prefill_tokens": 8}},
            ("--worker-type", "decode"),
        ),
    ],
)
def test_an_error_in_one_of_several_files_names_it(write, command, metrics, options):
    good = write("good.jsonl", json.dumps({"received_at_ns": 1, "metrics": DECODE | {"wall_time": 1}}))
    bad = write("bad.jsonl", json.dumps({"received_at_ns": 1, "metrics": metrics}))
    first, *more = [write(part, DECODE) if part == "fpm.json" else part for part in command]
    given = ["--frames", bad] if "--frames" in more else [bad]
    message = rejection_of(first, *more, good, *given, *options)
    assert bad in message and good not in message


@pytest.mark.parametrize(
    "options",
    [
        ("--workers", "100000000000"),
        ("--speedup", "1e-300"),
        ("--fixed", "1e308", "1e308"),
        ("--fixed", "1e400", "1"),
        ("--ttft-ms", "1e400"),
    ],
)
def test_options_beyond_what_a_replay_can_hold_are_rejected(options):
    assert rejection_of("replay", REQUESTS, *options).startswith("error: ")


def test_huge_limits_that_limit_nothing_are_accepted():
    assert run("replay", REQUESTS, "--head", str(10**30), "--concurrency", str(10**30)).exit_code == 0


def test_doctor_asks_for_the_declared_dependencies_and_the_package_uses_each():
    root = Path(__file__).parents[2]
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    names = [requirement.partition(">=")[0] for requirement in declared]
    assert sorted(fpmsdk.cli.doctor._DEPENDENCIES) == sorted(names)
    source = "\n".join(path.read_text() for path in (root / "fpmsdk").rglob("*.py"))
    modules = [{"pyyaml": "yaml"}.get(name, name) for name in names]
    assert [name for name in modules if f"import {name}" not in source and f"from {name}" not in source] == []


class TestTable:
    @pytest.fixture
    def pair(self, tmp_path):
        rows = [prefill(1, tokens, 0, tokens / 10) for tokens in (100, 200, 400)]
        return str(write_pair(tmp_path / "pair", [*rows, *(decode(1, kv, 3.0) for kv in (2, 64, 128))]))

    def test_check_lists_the_cells(self, pair):
        (cell,) = result_of("table", "check", pair)["cells"]
        assert (cell["model_path"], cell["prefill_points"], cell["decode_points"]) == ("org/tiny", 3, 3)
        assert cell["domain"]["total_kv_read_tokens"] == [0, 128]
        assert "org/tiny" in run("table", "check", pair).stdout

    def test_loo_reports_errors_by_phase(self, pair):
        (cell,) = result_of("table", "loo", pair)["cells"]
        assert (cell["decode"]["points"], cell["decode"]["predicted"], cell["decode"]["max_error"]) == (3, 1, 0.0)
        assert "prefill" in run("table", "loo", pair).stdout

    def test_loo_of_the_pair_that_comes_with_the_package(self):
        (cell,) = result_of("table", "loo", fpmsdk.sample.forward_pair())["cells"]
        assert (cell["prefill"]["points"], cell["decode"]["points"]) == (162, 55)
        assert 0.0 < cell["prefill"]["median_error"] < 0.1

    def test_merge_publishes_into_one_pair(self, pair, tmp_path):
        other = write_pair(tmp_path / "other", [decode(2, 4, 3.5, cell_id="other")])
        merged = result_of("table", "merge", str(tmp_path / "t.parquet"), pair, str(other))
        assert (merged["num_rows"], merged["added_rows"]) == (7, 7)
        assert "1 rows" not in run("table", "check", str(tmp_path / "t.parquet")).stderr

    def test_median_publishes_one_pair_of_three_launches(self, tmp_path):
        launches = []
        for at, latency_ms in enumerate((3.0, 5.0, 4.0)):
            facts = {"runtime_run_id": f"run {at}", "collector_attempt_id": f"attempt {at}"}
            single = {"measurement_policy": "dynamo_native_single_sample_v1", "measurement_repeats": 1}
            launches.append(str(write_pair(tmp_path / str(at), [decode(1, 64, latency_ms, **facts, **single)])))
        target = str(tmp_path / "t.parquet")
        assert result_of("table", "median", target, *launches)["num_rows"] == 1
        assert pq.read_table(target).column("latency_ms").to_pylist() == [4.0]
        assert "a median is made of 3 launches, found 2" in rejection_of(
            "table", "median", target, *launches[:2], code=1
        )

    def test_a_faulty_pair_is_one_message(self, pair):
        Path(pair.replace(".parquet", ".metadata.json")).unlink()
        assert "sidecar cannot be read" in rejection_of("table", "check", pair, code=1)

    @pytest.mark.parametrize("kind", ["curves", "heatmap"])
    @pytest.mark.parametrize("phase", ["prefill", "decode"])
    def test_plot_draws_png_and_html(self, pair, tmp_path, kind, phase):
        for name, magic in (("out.png", b"\x89PNG\r\n"), ("out.html", b"<!doctype html>")):
            result = run("table", "plot", str(pair), "-o", str(tmp_path / name), "--phase", phase, "--kind", kind)
            assert result.exit_code == 0, result.output
            assert (tmp_path / name).read_bytes().lower().startswith(magic.lower())
        assert len((tmp_path / "out.html").read_bytes()) > 10**6  # the library is inside

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["-o", "out.svg"], [".png", ".html", "out.svg"]),
            (["-o", "out.png", "--cell", "7"], ["--cell", "7"]),
            (["-o", "out.png", "--batch", "77"], ["batch 77", "it has 1"]),
        ],
    )
    def test_plot_says_what_it_cannot_draw(self, pair, monkeypatch, tmp_path, options, words):
        monkeypatch.chdir(tmp_path)
        result = run("table", "plot", str(pair), *options)
        assert result.exit_code != 0
        assert all(word in result.output for word in words)
        assert not list(tmp_path.glob("out.*"))

    def test_plot_names_the_extra_that_it_needs(self, pair, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
        result = run("table", "plot", str(pair), "-o", str(tmp_path / "out.html"))
        assert result.exit_code != 0
        assert "fpmsdk[plot]" in result.output

    def test_the_table_of_the_pair_is_to_be_named(self, pair):
        assert "*.parquet" in rejection_of("table", "loo", pair.replace(".parquet", ".metadata.json"), code=1)
