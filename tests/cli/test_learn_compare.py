"""`fpmsdk learn compare`: its table, its files, and inputs that it refuses."""

import json

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
        (("STREAM", "--config", "none.json"), "none.json"),
    ],
)
def test_what_cannot_be_compared_is_refused(stream, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = rejection_of("learn", "compare", *(stream if one == "STREAM" else one for one in arguments))
    import re

    assert re.search(message, told)


def test_an_output_never_replaces_a_stream_or_another_output(stream, tmp_path):
    for options in (["--json", stream], ["--plot", stream], ["--plot", tmp_path / "x", "--json", tmp_path / "x"]):
        assert "would replace" in " ".join(rejection_of("learn", "compare", stream, *map(str, options)).split())


def test_the_deployment_of_configurations_alone_is_their_own(stream, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(sample.MODEL))
    refused = rejection_of("learn", "compare", stream, "--config", str(path), "--worker-type", "decode")
    assert "part of the --config files" in " ".join(refused.split())
