"""Validation of a collection: gates, files, exit codes, resumption, and what is refused.

The engine replays recorded launches, which have no measurement protocol: repetitions cannot qualify them.
Source: onboarding.md section 8.2, onboarding-transcripts.md section 5 (7, 8).
"""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from fpmsdk.cli.app import app
from fpmsdk.collect import repeatability_run
from fpmsdk.documents.canonical import read_document
from fpmsdk.documents.evidence import file_evidence, manifest
from fpmsdk.documents.lock import exclusive
from fpmsdk.errors import CollectionError, EvidenceError, OnboardError
from fpmsdk.onboard.collection_gates import overall, repeatability_status, run_holdout
from fpmsdk.onboard.policy import POLICY_V1, ValidationPolicy
from fpmsdk.onboard.validate_collection import CollectionValidation, exit_code, validate_collection
from tests.onboard.collected import systems
from tests.onboard.measured import Replays, measured

# Of each sweep, so that tests are quick.
POINTS = 16
LOOSE = {
    "interpolation": {"max_p95_relative_error": 1.0, "max_unsupported_fraction": 1.0},
    "repeatability": {"samples": 2},
}


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    """A published collection, its request, and a place beside it that stays as it is."""
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("campaign")
        systems(place, patch)
        yield measured(place, points=POINTS)


@pytest.fixture(autouse=True)
def surroundings(collection, monkeypatch):
    monkeypatch.setenv("FPMSDK_SYSTEMS_PATH", str(collection[0].parent / "installed-systems"))


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A collection that a test may damage."""
    systems(tmp_path, monkeypatch)
    return measured(tmp_path, points=POINTS)


def validation(collection, output, **options):
    folder, file = collection
    return CollectionValidation(config=file, folder=folder, output=output, **options)


def validate(collection, output, **options):
    return validate_collection(validation(collection, output, **options))


def statuses(report):
    return {name: gate["status"] for name, gate in report["gates"].items()}


def policy(tmp_path, **changes):
    path = tmp_path / "loose.json"
    path.write_text(json.dumps(LOOSE | changes))
    return path


# --- the recorded outcomes ---


def test_recorded_cpu_data_fail_the_default_interpolation_gate(tmp_path, monkeypatch):
    systems(tmp_path, monkeypatch)
    collection = measured(tmp_path)
    report = validate(collection, tmp_path / "quality")
    assert statuses(report) == {
        "point_validity": "passed",
        "execution": "incomplete",
        "repeatability": "incomplete",
        "interpolation": "failed",
    }
    assert (report["status"], report["accuracy"]) == ("failed", "not_assessed")
    assert exit_code(validation(collection, tmp_path), report) == 1


def test_a_looser_policy_and_repetitions_leave_recorded_data_incomplete(collection, tmp_path):
    executor, output = Replays(POINTS, run=2), tmp_path / "quality"
    asked = validation(collection, output, policy=policy(tmp_path), execute=True, executors=lambda name: executor)
    report = validate_collection(asked)
    assert statuses(report) == {
        "point_validity": "passed",
        "execution": "incomplete",
        "repeatability": "incomplete",
        "interpolation": "passed",
    }
    assert exit_code(asked, report) == 1
    assert executor.count == 4
    assessment = read_document(output / "repeatability-assessment.json")
    assert set(assessment["repeatability"]["point_counts"]) == {"unestablished"}
    assert {place.name for place in (output / "repeatability").iterdir() if not place.name.startswith(".")} >= {
        "repeatability-plan.json",
        "repeatability.json",
        "samples",
    }


def test_a_look_at_sound_data_that_launches_nothing_exits_0(collection, tmp_path):
    asked = validation(collection, tmp_path / "quality", policy=policy(tmp_path))
    report = validate_collection(asked)
    assert report["status"] == "incomplete"
    assert exit_code(asked, report) == 0


def test_files_of_an_assessment_and_what_they_refer_to(collection, tmp_path):
    folder, file = collection
    output = tmp_path / "quality"
    report = validate(collection, output, policy=policy(tmp_path))
    assert read_document(output / "collection-validation.json") == report
    assert {place.name for place in output.iterdir()} == {
        ".validation.lock",
        "policy.json",
        "campaign.json",
        "repeatability-selection.json",
        "collection-validation.json",
        "holdout",
    }
    assert report["inputs"] == read_document(output / "campaign.json")
    assert report["inputs"]["request"] == file_evidence(file)
    assert report["inputs"]["collection_directory"] == str(folder)
    assert [entry["path"].rpartition(".")[2] for entry in report["inputs"]["formal_data"]] == ["parquet", "json"]
    assert report["policy"] == file_evidence(output / "policy.json")
    assert report["selection"] == file_evidence(output / "repeatability-selection.json")
    assert report["gates"]["interpolation"]["report"] == file_evidence(output / "holdout/interpolation-validation.json")


def test_a_collection_is_not_changed_by_its_validation(collection, tmp_path):
    before = manifest(collection[0])
    validate(
        collection,
        tmp_path / "quality",
        policy=policy(tmp_path),
        execute=True,
        executors=lambda name: Replays(POINTS, run=3),
    )
    assert manifest(collection[0]) == before


# --- resumption ---


def test_a_resumed_assessment_takes_its_saved_policy_and_reproduces_its_holdout(collection, tmp_path):
    output = tmp_path / "quality"
    first = validate(collection, output, policy=policy(tmp_path))
    files = manifest(output)
    assert validate(collection, output, resume=True) == first
    assert manifest(output) == files


def test_repetitions_can_be_launched_by_a_resumed_assessment(collection, tmp_path):
    output, executor = tmp_path / "quality", Replays(POINTS, run=2)
    validate(collection, output, policy=policy(tmp_path))
    report = validate(collection, output, resume=True, execute=True, executors=lambda name: executor)
    assert executor.count == 4
    assert report["gates"]["repeatability"]["directory"] == str(output / "repeatability")
    assert validate(collection, output, resume=True, execute=True, executors=lambda name: executor) == report
    assert executor.count == 4


def test_failed_samples_are_launched_again_when_asked(collection, tmp_path):
    output, executor = tmp_path / "quality", Replays(POINTS, run=2)
    executor.changes = [lambda document: document.update(status="partial")]
    validate(collection, output, policy=policy(tmp_path), execute=True, executors=lambda name: executor)
    assert executor.count == 1
    report = validate(collection, output, resume=True, execute=True, retry_failed=True, executors=lambda name: executor)
    assert statuses(report)["repeatability"] == "incomplete"
    samples = read_document(output / "repeatability" / "repeatability.json")["samples"]
    assert sorted(len(slot["attempts"]) for slots in samples.values() for slot in slots) == [1, 1, 1, 2]


def test_an_interrupted_holdout_is_made_again(collection, tmp_path):
    output = tmp_path / "quality"
    first = validate(collection, output, policy=policy(tmp_path))
    (output / "holdout" / "interpolation-validation.json").unlink()
    assert validate(collection, output, resume=True)["gates"] == first["gates"]


def test_an_interrupted_repetition_is_gone_on_with(collection, tmp_path, monkeypatch):
    output, executor = tmp_path / "quality", Replays(POINTS, run=2)
    record = repeatability_run._Run._record

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(repeatability_run._Run, "_record", interrupt)
    with pytest.raises(KeyboardInterrupt):
        validate(collection, output, policy=policy(tmp_path), execute=True, executors=lambda name: executor)
    monkeypatch.setattr(repeatability_run._Run, "_record", record)
    validate(collection, output, resume=True, execute=True, executors=lambda name: executor)
    assert executor.count == 4


@pytest.mark.parametrize("name", ["policy.json", "campaign.json", "repeatability-selection.json"])
def test_what_an_assessment_began_with_may_not_change(collection, tmp_path, name):
    output = tmp_path / "quality"
    path = policy(tmp_path)
    validate(collection, output, policy=path)
    document = read_document(output / name)
    (output / name).write_text(json.dumps(document))  # the same values in other bytes
    with pytest.raises(EvidenceError, match=f"{name}.*changed since the assessment began"):
        validate(collection, output, policy=path, resume=True)


def test_another_policy_needs_a_fresh_directory(collection, tmp_path):
    output = tmp_path / "quality"
    validate(collection, output, policy=policy(tmp_path))
    with pytest.raises(EvidenceError, match="the policy changed"):
        validate(collection, output, policy=policy(tmp_path, repeatability={"samples": 3}), resume=True)


def test_a_changed_holdout_cannot_be_gone_on_with(collection, tmp_path):
    output = tmp_path / "quality"
    validate(collection, output, policy=policy(tmp_path))
    path = output / "holdout" / "interpolation-validation.json"
    path.write_text(json.dumps(read_document(path) | {"status": "failed"}))
    with pytest.raises(EvidenceError, match="status differs"):
        validate(collection, output, resume=True)


# --- other thresholds ---


def test_other_thresholds_judge_an_earlier_repetition_in_a_fresh_output(collection, tmp_path):
    validate(
        collection,
        tmp_path / "first",
        policy=policy(tmp_path),
        execute=True,
        executors=lambda name: Replays(POINTS, run=2),
    )
    repeats = tmp_path / "first" / "repeatability"
    before = manifest(repeats)
    looser = policy(tmp_path, repeatability={"samples": 2, "max_cv": 0.5})
    asked = validation(collection, tmp_path / "second", policy=looser, repeats=repeats)
    report = validate_collection(asked)
    assessment = read_document(tmp_path / "second" / "repeatability-assessment.json")
    assert assessment["assessment"]["cv_threshold"] == 0.5
    assert report["gates"]["repeatability"]["directory"] == str(repeats)
    assert manifest(repeats) == before
    assert exit_code(asked, report) == 1  # incomplete, and more was asked for than a look


def test_another_number_of_samples_needs_other_launches(collection, tmp_path):
    validate(
        collection,
        tmp_path / "first",
        policy=policy(tmp_path),
        execute=True,
        executors=lambda name: Replays(POINTS, run=2),
    )
    more = policy(tmp_path, repeatability={"samples": 3})
    with pytest.raises(EvidenceError, match="samples 2, the policy asks for 3"):
        validate(collection, tmp_path / "second", policy=more, repeats=tmp_path / "first" / "repeatability")


# --- the gate of repetitions ---

QUALIFIED = {
    "schema_version": 2,
    "status": "passed",
    "policy": {"comparison_mode": "full_grid"},
    "source_qualification": {"status": "qualified"},
    "new_population": {"status": "qualified"},
}


@pytest.mark.parametrize(
    ("assessment", "asked", "status"),
    [
        ({}, {}, "passed"),
        ({}, {"schema_version": POLICY_V1}, "incomplete"),
        ({}, {"repeatability": {"comparison_mode": "bounded"}}, "incomplete"),
        ({"schema_version": 1}, {}, "incomplete"),
        ({"policy": {"comparison_mode": "bounded"}}, {}, "incomplete"),
        ({"source_qualification": {"status": "unestablished"}, "status": "incomplete"}, {}, "incomplete"),
        ({"new_population": {"status": "incomplete"}, "status": "incomplete"}, {}, "incomplete"),
        ({"new_population": {"status": "unstable"}}, {}, "failed"),
        ({"new_population": {"status": "failed"}}, {}, "failed"),
        ({"source_qualification": {"status": "failed"}}, {}, "failed"),
        ({"status": "failed"}, {}, "failed"),
    ],
)
def test_only_a_qualified_source_with_a_qualified_full_repetition_passes(assessment, asked, status):
    assert repeatability_status(QUALIFIED | assessment, ValidationPolicy.model_validate(asked)) == status


@pytest.mark.parametrize(
    ("gates", "status"),
    [
        (["passed", "passed"], "passed"),
        (["passed", "incomplete"], "incomplete"),
        (["failed", "incomplete"], "failed"),
        (["passed", "not_assessed"], "incomplete"),
    ],
)
def test_one_failed_gate_fails_and_all_must_pass(gates, status):
    assert overall(gates) == status


# --- refusals ---


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"retry_failed": True}, "--retry-failed"),
        ({"retry_failed": True, "resume": True}, "--retry-failed"),
        ({"repeats": "r", "resume": True}, "--repeatability-dir"),
        ({"repeats": "r", "execute": True}, "--repeatability-dir"),
    ],
)
def test_options_that_contradict_each_other_are_refused(collection, tmp_path, options, reason):
    with pytest.raises(OnboardError, match=reason):
        validation(collection, tmp_path / "quality", **options)


def test_the_output_is_apart_from_everything_that_is_read(collection, tmp_path):
    folder, file = collection
    for place in (folder / "quality", folder, folder.parent, file):
        with pytest.raises(OnboardError, match="apart"):
            validate(collection, place)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "note").write_text("")
    with pytest.raises(OnboardError, match="not empty"):
        validate(collection, tmp_path / "used")
    with pytest.raises(OnboardError, match=r"policy\.json"):
        validate(collection, tmp_path / "nothing", resume=True)


def test_one_process_works_on_an_assessment_at_a_time(collection, tmp_path):
    output = tmp_path / "quality"
    validate(collection, output, policy=policy(tmp_path))
    with (
        exclusive(output / ".validation.lock", "the assessment"),
        pytest.raises(OnboardError, match="another process works on the assessment"),
    ):
        validate(collection, output, resume=True)


# --- the command ---


def command(collection, output, *options):
    folder, file = collection
    words = ("-c", str(file), "--output-dir", str(folder), "--validation-output-dir", str(output), *map(str, options))
    return CliRunner().invoke(app, ["onboard", "validate-collection", *words])


def test_the_command_prints_every_gate_and_exits_as_specified(collection, tmp_path):
    looked = command(collection, tmp_path / "quality", "--policy", policy(tmp_path))
    assert looked.exit_code == 0
    assert [line.strip() for line in looked.stdout.splitlines()[:4]] == [
        "point_validity: passed",
        "execution: incomplete",
        "repeatability: incomplete",
        "interpolation: passed",
    ]
    assert "Collection validation: incomplete; serving accuracy: not assessed. Saved" in looked.stdout
    strict = policy(tmp_path, interpolation={"max_p95_relative_error": 0.0})
    assert command(collection, tmp_path / "strict", "--policy", strict).exit_code == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--retry-failed"], "--retry-failed"),
        (["--resume"], "no such policy file"),
        (["--policy", "none.json"], "none.json"),
        (["--repeatability-dir", "none"], "there is no assessment to go on with|missing"),
        (["--execute"], "executor kubernetes"),
    ],
)
def test_the_command_exits_with_2_for_rejected_input(collection, tmp_path, options, reason):
    ran = command(collection, tmp_path / "quality", "--policy", policy(tmp_path), *options)
    if "--resume" in options or "none.json" in options:
        ran = command(collection, tmp_path / "quality", *options)
    assert ran.exit_code == 2
    assert re.search(reason, ran.stderr)


def test_an_interrupted_command_exits_with_130(collection, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fpmsdk.onboard.validate_collection.run_holdout", interrupt)
    assert command(collection, tmp_path / "quality").exit_code == 130
    monkeypatch.setattr("fpmsdk.onboard.validate_collection.run_holdout", run_holdout)
    resumed = command(collection, tmp_path / "quality", "--resume")
    assert "interpolation: passed" in resumed.stdout


def change_json(name, change):
    def damage(folder):
        [path] = folder.rglob(name)
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return damage


def remove_checkpoint(folder):
    (folder / "fpm-checkpoint" / "fpm_forward.json").unlink()


def second_checkpoint(folder):
    (folder / "fpm-checkpoint" / "old").mkdir()
    shutil.copy(folder / "fpm-checkpoint" / "fpm_forward.json", folder / "fpm-checkpoint" / "old")


def first_cell(document):
    return next(iter(document["cells"].values()))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (remove_checkpoint, "exactly one formal"),
        (second_checkpoint, "exactly one formal"),
        (change_json("fpm_forward.json", lambda d: d.update(plan_sha256="abc")), "plan_sha256"),
        (change_json("fpm_forward.json", lambda d: d["database"].update(status="failed")), "database.status"),
        (change_json("fpm_forward.json", lambda d: d["database"].update(missing_cells=["x"])), "missing_cells"),
        (
            change_json("fpm_forward.json", lambda d: d["database"].update(skipped_first_publisher_wins=["x"])),
            "skipped_first_publisher_wins",
        ),
        (change_json("fpm_forward.json", lambda d: d["database"].update(parquet="/elsewhere/t.parquet")), "below"),
        (change_json("fpm_forward.json", lambda d: first_cell(d).update(status="failed")), "has not passed"),
        (change_json("collection-plan.json", lambda d: d["options"].update(max_num_seqs=8)), "sha256"),
        (change_json("support-plan.json", lambda d: d.update(accuracy={})), "support-plan.json"),
        (change_json("fpm_forward_perf.metadata.json", lambda d: d.update(row_count=1)), "row_count"),
    ],
)
def test_a_collection_that_is_not_complete_and_unchanged_is_refused(own, tmp_path, damage, reason):
    damage(own[0])
    with pytest.raises((OnboardError, CollectionError), match=reason):
        validate(own, tmp_path / "quality")
    assert not (tmp_path / "quality").exists()


def test_changed_raw_artifacts_are_told_from_the_published_rows(own, tmp_path):
    path = sorted(own[0].rglob("benchmark.json"))[0]
    document = json.loads(path.read_text())
    for entries in (document["results"], [g["rank_results"][0] for g in document["iteration_groups"]]):
        for entry in entries:
            entry["fpms"][0]["wall_time"] *= 2
    for group in document["iteration_groups"]:
        group["wall_time"] *= 2
    document["timing"]["measured_iteration_seconds"] *= 2
    document["timing"]["benchmark_elapsed_seconds"] *= 2
    path.write_text(json.dumps(document))
    with pytest.raises(EvidenceError, match="not those of the raw artifacts"):
        validate(own, tmp_path / "quality")


def test_a_request_with_other_limits_than_were_collected_is_refused(own, tmp_path):
    _, file = own
    file.write_text(file.read_text().replace("context_length: 2048\n", "context_length: 1024\n", 1))
    with pytest.raises(OnboardError, match="another request identity"):
        validate(own, tmp_path / "quality")
