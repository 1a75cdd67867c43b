"""`fpmsdk learn compare`: its table, its files, and inputs that it refuses."""

import json
import re

import msgspec
import pyarrow.parquet as pq
import pytest

from fpmsdk import FpmBatch, sample
from fpmsdk.metrics import write_frames
from tests.cli.test_commands import rejection_of, run


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    path = tmp_path_factory.mktemp("frames") / "some.bin.gz"
    write_frames(path, sample.burst_frames())
    return str(path)


def compared(*arguments):
    ran = run("learn", "compare", *arguments, "--json", "-")
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


def test_every_estimator_is_shown_for_every_kind(stream):
    told = run("learn", "compare", stream)
    assert told.exit_code == 0
    for text in ("prefill", "decode", "mixed", "all", "linear", "linear-1024", "spline", "spline-1024", "1,654"):
        assert text in told.stdout


def test_the_json_file_holds_what_was_compared(stream, tmp_path):
    ran = run(
        "learn", "compare", stream, "--train", stream, "--estimator", "spline", "--json", str(tmp_path / "a.json")
    )
    assert ran.exit_code == 0
    told = json.loads((tmp_path / "a.json").read_text())
    assert (told["train_iterations"], told["iterations"], list(told["estimators"])) == (1654, 1654, ["spline"])
    assert told["estimators"]["spline"]["error"]["decode"]["cold_start_iterations"] == 0


def test_a_configuration_file_joins_under_its_name(stream, tmp_path):
    config = tmp_path / "mine.json"
    config.write_text(json.dumps(sample.MODEL))
    assert list(compared(stream, "--config", str(config))["estimators"]) == ["mine"]
    told = compared(stream, "--config", str(config), "--estimator", "linear")["estimators"]
    assert list(told) == ["linear", "mine"]
    assert told["mine"]["series"] == told["linear"]["series"]


def test_a_parquet_stream_is_the_same_stream(stream, tmp_path):
    path = tmp_path / "run.parquet"
    pq.write_table(FpmBatch.from_frames(sample.burst_frames()).to_arrow(), path)
    one, other = (compared(str(name), "--estimator", "linear")["estimators"]["linear"] for name in (stream, path))
    assert one["series"] == other["series"]


def test_the_plot_is_a_page_with_every_estimator(stream, tmp_path):
    page = tmp_path / "errors.html"
    assert run("learn", "compare", stream, "--plot", str(page)).exit_code == 0
    text = page.read_text()
    assert text.rstrip().endswith("</html>")
    for name in ("linear-1024", "spline-1024", "along the stream", "by kind"):
        assert name in text


def test_a_failed_comparison_writes_nothing(stream, tmp_path):
    page, figures = tmp_path / "errors.html", tmp_path / "a.json"
    rejection_of("learn", "compare", stream, "--worker-type", "decode", "--plot", str(page), "--json", str(figures))
    assert not page.exists()
    assert not figures.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.bin",), "none.bin"),
        (("STREAM", "--train", "none.bin"), "none.bin"),
        (("STREAM", "--estimator", "nope"), "expected one of 'linear', .*found 'nope'"),
        (("STREAM", "--plot", "page.png"), "page.png: the plot is an .html file"),
        (("STREAM", "--worker-type", "nope"), "worker_type"),
        (("STREAM", "--attention-dp", "2"), "rank"),
        (("STREAM", "--attention-dp", "0"), "attention_dp must be positive"),
        (("STREAM", "--config", "none.json"), "none.json"),
    ],
)
def test_what_cannot_be_compared_is_refused(stream, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = rejection_of("learn", "compare", *(stream if one == "STREAM" else one for one in arguments))
    assert re.search(message, told)


def test_an_output_never_replaces_a_stream_or_another_output(stream, tmp_path):
    for options in (["--json", stream], ["--plot", stream], ["--plot", tmp_path / "x", "--json", tmp_path / "x"]):
        assert "would replace" in " ".join(rejection_of("learn", "compare", stream, *map(str, options)).split())


def test_the_deployment_of_configurations_alone_is_their_own(stream, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(sample.MODEL))
    refused = rejection_of("learn", "compare", stream, "--config", str(path), "--worker-type", "decode")
    assert "part of the --config files" in " ".join(refused.split())


@pytest.fixture
def two_ranks(tmp_path):
    """A table of iterations of two ranks."""
    frames = [msgspec.msgpack.decode(frame) for frame in sample.burst_frames()[:200]]
    pairs = [
        [one | {"dp_rank": 0}, other | {"dp_rank": 1}] for one, other in zip(frames[::2], frames[1::2], strict=True)
    ]
    path = tmp_path / "two.parquet"
    pq.write_table(FpmBatch.from_dicts(pairs).to_arrow(), path)
    return str(path)


def written(path, **changes):
    path.write_text(json.dumps(sample.MODEL | changes))
    return str(path)


def test_a_configuration_says_how_many_ranks_report_an_iteration(two_ranks, tmp_path):
    config = written(tmp_path / "mine.json", attention_dp=2)
    assert compared(two_ranks, "--config", config)["iterations"] == 100


@pytest.mark.parametrize("ranks", [1, 3])
def test_iterations_of_other_ranks_than_the_configuration_has_are_refused(ranks, two_ranks, tmp_path):
    config = written(tmp_path / "mine.json", attention_dp=ranks)
    told = " ".join(rejection_of("learn", "compare", two_ranks, "--config", config).split())
    assert f"two.parquet: expected iterations of {ranks} ranks, as attention_dp says, found 2" in told


def test_configurations_of_different_ranks_are_not_compared(two_ranks, tmp_path):
    configs = [written(tmp_path / f"{ranks}.json", attention_dp=ranks) for ranks in (1, 2)]
    told = " ".join(rejection_of("learn", "compare", two_ranks, "--config", configs[0], "--config", configs[1]).split())
    assert "attention_dp: expected the same of all that are compared, found 1 1, 2 2" in told


def test_errors_beyond_all_numbers_are_shown_as_numbers(tmp_path):
    work = [{"num_decode_requests": n % 5 + 1, "sum_decode_kv_tokens": 100 * n} for n in range(60)]
    times = [0.01 * one["num_decode_requests"] for one in work[:40]] + [1e300, 1e-300] * 10
    path = tmp_path / "run.bin"
    frames = [{"wall_time": time, "scheduled_requests": one} for time, one in zip(times, work, strict=True)]
    write_frames(path, [msgspec.msgpack.encode(frame) for frame in frames])
    for row in compared(str(path))["estimators"].values():
        figures = row["error"]["decode"]
        assert all(figures[name] is not None for name in ("mape_percent", "median_error_ms", "p95_error_ms"))
    shown = run("learn", "compare", str(path)).stdout
    assert not re.search(r"\b(nan|inf)\b", shown)
