"""`fpmsdk onboard init` as it is called: exit codes, output, files, and a person at a terminal."""

import json
import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fpmsdk.cli.app import app
from fpmsdk.onboard.request import load_request
from tests.onboard.models import BFLOAT16, LARGE, MIXTRAL, SMALL, WINDOWED, write_config, write_systems

ROOT = Path(__file__).parent.parent.parent
IDENTITY = ["--model", "org/model", "--model-revision", "0" * 40, "--gpu", "h200_sxm", "--interconnect", "nvswitch"]
LABEL = ["--framework-version", "0.27.0"]
TEP4 = ["--tensor-parallel", "4", "--moe-tensor-parallel", "1", "--moe-expert-parallel", "4"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(write_systems(tmp_path / "systems")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def given(place, config=SMALL, overrides=BFLOAT16, label=LABEL):
    (place / "overrides.yaml").write_text(json.dumps(overrides))
    path = write_config(place / "model", config)
    return [*IDENTITY, *label, "--model-config", str(path), "--resource-overrides", str(place / "overrides.yaml")]


def init(*arguments):
    return CliRunner().invoke(app, ["onboard", "init", *arguments])


def test_a_request_is_saved_with_its_profile_and_the_next_command(place):
    result = init(*given(place), "--output", "small.yaml")
    assert result.exit_code == 0, result.output
    request = load_request(place / "small.yaml")
    assert request.fpm_profile is not None and request.search.tensor_parallel == 1
    assert f"next: fpmsdk onboard plan --config {place / 'small.yaml'}" in result.stdout
    assert "weights_bytes: 13472 (source: estimate" in result.stdout and "memory: pending" in result.stdout
    assert "launched" in result.stdout


def test_the_journey_of_the_specification_begins_with_a_small_config(place):
    config = SMALL | {"max_position_embeddings": 128}
    overrides = BFLOAT16 | {"comm_quant_mode": "half", "max_num_tokens": 64, "max_batch_size": 4}
    options = ["--tensor-parallel", "1", "--context-length", "128", "--input-tokens", "16", "--output-tokens", "4",
               "--request-count", "1"]  # fmt: skip
    assert init(*given(place, config, overrides), *options).exit_code == 0
    request = load_request(place / "support-request.yaml")
    assert request.scheduler_limits() == {"max_batched_tokens": 64, "max_sequences": 4}
    assert request.profile_deployment().resources.memory_source == "pending"


def test_suggestions_are_one_json_object_and_write_nothing(place):
    before = sorted(place.iterdir())
    arguments = given(place, LARGE)
    expected = {*before, place / "overrides.yaml", place / "model"}
    result = init(*arguments, "--suggest-parallel")
    document = json.loads(result.stdout)
    assert set(document) == {
        "assumptions",
        "candidates",
        "collection",
        "config_sha256",
        "context_length",
        "default",
        "hardware",
        "identity",
        "overrides",
        "rejected_candidates",
    }
    assert document["default"]["cli_flags"][:2] == ["--tensor-parallel", "2"]
    assert set(place.iterdir()) == expected


def test_capture_sizes_may_follow_their_option(place):
    sizes = ["--cudagraph-capture-sizes", "1", "2", "4", "8", "16"]
    role = ["--worker-type", "decode", "--cudagraph-mode", "FULL_DECODE_ONLY"]
    assert init(*given(place, MIXTRAL), *TEP4, *role, *sizes, "--seed", "7").exit_code == 0
    request = load_request(place / "support-request.yaml")
    assert request.collection.cudagraph_capture_sizes == [1, 2, 4, 8, 16]
    assert (request.search.seed, request.collection_phases) == (7, ("decode",))
    assert init(*given(place, MIXTRAL), *TEP4, *role, "--cudagraph-capture-sizes", "--overwrite").exit_code == 2


def test_a_list_of_workers_fills_a_directory(place):
    workers = [{"tensor_parallel": 1, "worker_type": role} for role in ("prefill", "decode")]
    (place / "list.json").write_text(json.dumps(workers))
    result = init(*given(place), "--parallel-configs", "list.json", "--output-dir", "out")
    assert result.exit_code == 0, result.output
    index = json.loads((place / "out" / "onboarding.json").read_text())
    assert [entry["worker_type"] for entry in index["configurations"]] == ["prefill", "decode"]
    assert all((place / "out").joinpath(name).is_dir() for name in ("prefill-tp1-dp1-moe-tp1-moe-ep1",))


def test_a_version_may_be_left_to_the_image(place):
    assert init(*given(place, label=[])).exit_code == 0
    request = load_request(place / "support-request.yaml")
    assert request.identity.framework_version is None
    assert request.profile_deployment().backend_version is None


def test_a_system_without_description_is_accepted_with_a_topology(place):
    arguments = [*given(place), "--gpu", "unheard_of", "--tensor-parallel", "1"]
    assert init(*arguments).exit_code == 0
    assert init(*arguments[:-2], "--overwrite").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--gpu", "h200_sxm"], ("--model:", "--model-revision:", "--model-kind:", "--interconnect:")),
        ([*IDENTITY, "--model-kind", "dense", "--context-length", "4096", "--model-revision", "main"], ("moving",)),
        ([*IDENTITY, "--model-kind", "dense"], ("--context-length",)),
        ([*IDENTITY, "--model-kind", "sparse"], ("--model-kind",)),
        ([*IDENTITY, "--profile", "other"], ("--profile must be onboarding",)),
        ([*IDENTITY, "--interactive"], ("needs a terminal",)),
        ([*IDENTITY, "--model-config", "none/config.json"], ("No such file",)),
    ],
)
def test_bad_options_exit_with_2_and_write_nothing(place, arguments, found):
    before = sorted(place.iterdir())
    result = init(*arguments)
    assert result.exit_code == 2
    assert all(text in result.output for text in found)
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize(
    ("config", "overrides", "arguments", "found"),
    [
        (SMALL, {}, ["--tensor-parallel", "1"], "fmha_quant_mode"),
        (SMALL, BFLOAT16, ["--tensor-parallel", "3"], "num_attention_heads"),
        (SMALL, BFLOAT16, ["--context-length", "100000"], "exceeds the 8192 tokens"),
        (SMALL, BFLOAT16, ["--prefill-cudagraph-policy", "runtime", "--max-prefill-cudagraph-size", "64"], "runtime"),
        (SMALL, BFLOAT16, ["--cudagraph-mode", "FULL"], "worker_type"),
        (SMALL, BFLOAT16, ["--gpu-memory-utilization", "1.5"], "less than or equal to 1"),
        (SMALL, BFLOAT16, ["--max-num-tokens", "128"], "must be at least max_batch_size"),
        (SMALL, BFLOAT16, ["--suggest-parallel", "--tensor-parallel", "2"], "does not go with --tensor-parallel"),
        (SMALL, BFLOAT16, ["--fpm-profile", "p.json"], "does not go with --fpm-profile"),
        (SMALL, BFLOAT16 | {"nope": 1}, [], "unknown override fields: nope"),
        (SMALL, BFLOAT16 | {"cache_block_sizes": {"full_attention": 16}}, [], "has no groups"),
        (SMALL, BFLOAT16, ["--output-dir", "out", "--overwrite"], "--overwrite"),
        (LARGE, BFLOAT16, ["--interconnect", "none"], "no eligible topology"),
        (WINDOWED, BFLOAT16, [], "no fully assessed default"),
        *((SMALL, BFLOAT16, ["--framework-version", label], "--framework-version")
          for label in ("../outside", "a/b", "a\\b", ".", "..", "two words")),
    ],
)  # fmt: skip
def test_what_a_config_contradicts_exits_with_2_and_writes_nothing(place, config, overrides, arguments, found):
    options = given(place, config, overrides)
    before = sorted(place.iterdir())
    result = init(*options, *arguments)
    assert result.exit_code == 2
    assert found in result.output and "Traceback" not in result.output
    assert sorted(place.iterdir()) == before


def test_an_existing_request_is_replaced_only_when_asked(place):
    (place / "support-request.yaml").write_text("kept")
    result = init(*given(place))
    assert result.exit_code == 2 and "--overwrite" in result.output
    assert (place / "support-request.yaml").read_text() == "kept"
    assert init(*given(place), "--overwrite").exit_code == 0


# Its terminal has to be the one that sends the signals of its keys.
PROGRAM = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from fpmsdk.cli import main
main()
"""


def at_terminal(arguments, answers):
    """Run the command in a terminal of its own; exit code and what it showed since the last answer."""
    terminal, side = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, "onboard", "init", *arguments]
    streams = {"stdin": side, "stdout": side, "stderr": side}
    # From where the package is, when it is not installed.
    process = subprocess.Popen(command, **streams, cwd=ROOT, start_new_session=True)
    os.close(side)
    shown = bytearray()

    def listen():
        while True:
            try:
                shown.extend(os.read(terminal, 65536))
            except OSError:  # the other side is gone
                return

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        for question, answer in answers:
            while question not in shown:
                assert listener.is_alive(), bytes(shown).decode()
                time.sleep(0.01)
            del shown[: shown.index(question) + len(question)]
            os.write(terminal, answer)
        code = process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
        listener.join()
        os.close(terminal)
    return code, shown.decode()


def test_a_person_reviews_edits_and_accepts(place):
    answers = [
        (b"or cancel", b"2\n"),
        (b"accept, edit or cancel", b"edit\n"),
        (b"Field to edit", b"weights_bytes\n"),
        (b"weights_bytes", b"1.5 KiB\n"),
        (b"accept, edit or cancel", b"accept\n"),
    ]
    target = place / "request.yaml"
    code, shown = at_terminal([*given(place), "--interactive", "--output", str(target)], answers)
    assert code == 0, shown
    request = load_request(target)
    assert request.search.tensor_parallel == 2
    assert json.loads(request.fpm_profile.provenance)["fields"]["weights_bytes"]["value"] == 1536


@pytest.mark.parametrize("end", [b"\x03", b"\x04", b"cancel\n"], ids=["ctrl-c", "end of input", "cancel"])
def test_a_person_who_gives_up_leaves_nothing(place, end):
    answers = [(b"or cancel", b"\n"), (b"accept, edit or cancel", end)]
    target = place / "request.yaml"
    code, shown = at_terminal([*given(place), "--interactive", "--output", str(target)], answers)
    assert code == 130 and "nothing was written" in shown
    assert not target.exists()
