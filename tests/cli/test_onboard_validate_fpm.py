"""`fpmsdk onboard validate-fpm`: exit codes and what is said.

Source: onboarding.md sections 1.2 and 8.4, onboarding-transcripts.md section 4 row 30.
"""

import pytest
from typer.testing import CliRunner

from fpmsdk.cli.app import app
from tests.onboard.collected import PLAY, checkpoint, collected, request_of, systems, trace_file
from tests.onboard.test_validate_fpm import LONG


@pytest.fixture
def run(tmp_path, monkeypatch):
    systems(tmp_path, monkeypatch)

    def run(*plays, role=None, memory=None):
        request = request_of(checkpoint(tmp_path), role=role, **({} if memory is None else {"memory": memory}))
        folder, file = collected(tmp_path, request)
        options = ["--config", file, "--output-dir", folder, "--trace", trace_file(tmp_path, *plays)]
        arguments = ["onboard", "validate-fpm", *options, "--validation-output-dir", tmp_path / "replay"]
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


def test_a_covered_trace_ends_with_0(run):
    result = run(PLAY)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("FPM replay coverage: covered; accuracy: not assessed. Saved ")


def test_a_missing_point_ends_with_4_and_names_it(run):
    result = run(PLAY, LONG)
    assert result.exit_code == 4
    assert "total_prefill_tokens=3" in result.stderr
    assert result.stdout.startswith("FPM replay coverage: incomplete")


@pytest.mark.parametrize(
    ("options", "words"), [({"memory": {}}, "finalize the collection"), ({"role": "decode"}, "only aggregated serving")]
)
def test_what_cannot_be_replayed_ends_with_2(run, options, words):
    result = run(PLAY, **options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr
