"""The folder of a plan: what may be written into it, what it is compared with, and what interruptions leave."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fpmsdk
from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.onboard import plan as planning
from fpmsdk.onboard.plan import create_plan, plan_lock
from fpmsdk.onboard.plan_check import check_plan
from fpmsdk.onboard.request import load_request
from fpmsdk.recommendation.config import read_recommend_config


def environment():
    """That of a process which imports the package from where this one did."""
    return os.environ | {"PYTHONPATH": str(Path(fpmsdk.__file__).parents[1])}


ANOTHER_EXAMPLE = {"workload": {"input_tokens": 77}, "search": {"seed": 5, "objective": "goodput"}}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "plan"


@pytest.fixture
def planned(request_of, folder):
    """The request of a plan that is written."""
    create_plan(request_of(), folder)
    return request_of()


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_lock_stays_private_and_empty(planned, folder):
    assert (folder / ".support.lock").stat().st_mode & 0o777 == 0o600
    assert (folder / ".support.lock").read_bytes() == b""
    assert list((folder / "systems" / "data").iterdir()) == []


def test_a_plan_without_a_version_has_no_systems(request_of, folder):
    create_plan(request_of("no version"), folder)
    assert content(folder).keys() == {
        ".support.lock",
        "request.yaml",
        "commands.json",
        "fpm-model-profile.json",
        "support-plan.json",
    }
    check_plan(request_of("no version"), folder)


def test_a_folder_that_is_not_empty_is_not_planned_in(planned, folder):
    before = content(folder)
    with pytest.raises(OnboardError, match="not empty; pass --overwrite"):
        create_plan(planned, folder)
    assert content(folder) == before


def test_a_foreign_folder_is_not_planned_in_even_with_overwrite(request_of, folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(OnboardError, match="saved request was modified or cannot be read"):
        create_plan(request_of(), folder, overwrite=True)


def test_another_example_is_refreshed_and_keeps_the_collection(planned, folder):
    before = content(folder)
    request = planned.replaced(ANOTHER_EXAMPLE)
    create_plan(request, folder, overwrite=True)
    after = content(folder)
    assert {path for path in after if after[path] != before[path]} == {
        "request.yaml",
        "support-plan.json",
        "predict/pilot.yaml",
        "recommend/pilot.yaml",
    }
    ids = [json.loads(files["support-plan.json"]) for files in (before, after)]
    assert ids[0]["request_id"] == ids[1]["request_id"] and ids[0]["validation_id"] != ids[1]["validation_id"]
    # Either example is a view of the same collection.
    check_plan(request, folder)
    check_plan(planned, folder)


@pytest.mark.parametrize(
    "name",
    [
        "legacy without a profile",
        "declared linear",
        "declared linear aggregated with one graph policy",
        "prefill DEP4",
        "decode TEP4 with graphs",
        "no version",
    ],
)
def test_a_saved_plan_of_any_role_goes_on_with_the_same_bytes(request_of, folder, name):
    create_plan(request_of(name), folder)
    before = content(folder)
    # What was saved is the request now, as in a session that goes on.
    saved = load_request(folder / "request.yaml")
    create_plan(saved, folder, overwrite=True)
    check_plan(saved, folder)
    assert content(folder) == before


def test_another_collection_is_refused(planned, folder):
    before = content(folder)
    request = planned.replaced({"collection": {"gpu_memory_utilization": 0.8}})
    for use in (lambda: check_plan(request, folder), lambda: create_plan(request, folder, overwrite=True)):
        with pytest.raises(OnboardError, match="another request identity"):
            use()
    assert content(folder) == before


def test_a_refresh_leaves_collected_files_alone(planned, folder):
    data = folder / "systems" / "data" / "h200_sxm" / "table.parquet"
    data.parent.mkdir(parents=True)
    data.write_bytes(b"rows")
    create_plan(planned.replaced(ANOTHER_EXAMPLE), folder, overwrite=True)
    assert data.read_bytes() == b"rows"


GENERATED = [
    "request.yaml",
    "support-plan.json",
    "commands.json",
    "fpm-model-profile.json",
    "predict/pilot.yaml",
    "recommend/pilot.yaml",
    "systems/h200_sxm.yaml",
]


@pytest.mark.parametrize("path", GENERATED)
def test_a_generated_file_that_changed_is_refused(planned, folder, path):
    place = folder / path
    # A change that the file's own reader would not notice.
    place.write_bytes(place.read_bytes() + b"\n")
    with pytest.raises(OnboardError, match=rf"{path}.*was modified"):
        check_plan(planned, folder)


@pytest.mark.parametrize("path", GENERATED)
def test_a_generated_file_that_is_gone_is_refused(planned, folder, path):
    (folder / path).unlink()
    with pytest.raises(OnboardError, match=path):
        check_plan(planned, folder)


@pytest.mark.parametrize("path", [path for path in GENERATED if path != "support-plan.json"])
def test_a_refresh_does_not_bless_a_modified_file(planned, folder, path):
    place = folder / path
    place.write_bytes(place.read_bytes() + b"\n")
    with pytest.raises(OnboardError, match="was modified"):
        create_plan(planned.replaced(ANOTHER_EXAMPLE), folder, overwrite=True)


def test_digests_in_an_edited_plan_are_not_trusted(planned, folder):
    plan = json.loads((folder / "support-plan.json").read_text())
    plan["fpm"]["plan_command"].append("--smoke")
    (folder / "support-plan.json").write_text(json.dumps(plan))
    for use in (lambda: check_plan(planned, folder), lambda: create_plan(planned, folder, overwrite=True)):
        with pytest.raises(OnboardError, match=r"support-plan\.json.*was modified"):
            use()


def test_a_copied_or_moved_plan_is_refused(planned, folder):
    moved = folder.with_name("moved")
    folder.rename(moved)
    with pytest.raises(OnboardError, match="the folder was moved"):
        check_plan(planned, moved)


@pytest.mark.parametrize("schema", ["aisimulate-support-plan/v1", None])
def test_an_older_plan_is_made_anew_elsewhere(planned, folder, schema):
    plan = json.loads((folder / "support-plan.json").read_text()) | {"schema_version": schema}
    (folder / "support-plan.json").write_text(json.dumps(plan))
    with pytest.raises(OnboardError, match="plan again in a new output directory"):
        check_plan(planned, folder)


@pytest.mark.parametrize(
    "path",
    [
        "support-plan.json",
        "request.yaml",
        "commands.json",
        "predict",
        "predict/pilot.yaml",
        "systems",
        "systems/data",
        "systems/data/h200_sxm",
        "fpm-checkpoint",
        "fpm-checkpoint/fpm_forward.json",
        "fpm-artifacts/0123456789abcdef/cells/fpm-1/raw",
    ],
)
def test_links_in_a_plan_are_refused(planned, folder, tmp_path, path):
    place, target = folder / path, tmp_path / "elsewhere"
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        place.rename(target)
    else:
        target.mkdir()
    place.symlink_to(target)
    with pytest.raises(EvidenceError, match="link"):
        check_plan(planned, folder)


def test_two_processes_do_not_plan_in_one_folder(planned, folder):
    script = "import sys, pathlib; from fpmsdk.onboard.plan import plan_lock\n"
    script += "with plan_lock(pathlib.Path(sys.argv[1])): print('held', flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(OnboardError, match="another process works on the plan"):
            create_plan(planned, folder, overwrite=True)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    # The lock died with its process.
    with plan_lock(folder):
        pass


# The order in which a first plan is written.
GENERATED_IN_ORDER = {0: "request.yaml", 3: "fpm-model-profile.json", 6: "support-plan.json"}


class Killed(BaseException):
    """What stands for SIGKILL: nothing after it runs in the writer."""


def killed_at(monkeypatch, write, request, folder, overwrite):
    """Plan until the given write, counted from 0; a kill leaves the draft of the file that was being written."""
    count = iter(range(100))
    real = planning._write

    def stop(place, content):
        if next(count) == write:
            place.parent.mkdir(parents=True, exist_ok=True)
            (place.parent / ".fpmsdk-0123456789abcdef").write_bytes(content[:7])
            raise Killed
        real(place, content)

    monkeypatch.setattr(planning, "_write", stop)
    with pytest.raises(Killed):
        create_plan(request, folder, overwrite=overwrite)
    monkeypatch.setattr(planning, "_write", real)


def without_drafts(folder):
    return {path: data for path, data in content(folder).items() if ".fpmsdk-" not in path}


@pytest.mark.parametrize("write", range(len(GENERATED)))
def test_a_first_write_that_was_killed_is_completed(request_of, folder, tmp_path, monkeypatch, write):
    request = request_of()
    killed_at(monkeypatch, write, request, folder, overwrite=False)
    if write:
        with pytest.raises(OnboardError, match="run `fpmsdk onboard plan`|modified"):
            check_plan(request, folder)
        with pytest.raises(OnboardError, match="pass --overwrite"):
            create_plan(request, folder)
    create_plan(request, folder, overwrite=True)
    check_plan(request, folder)
    # As if it had never been interrupted.
    folder.rename(tmp_path / "completed")
    create_plan(request, folder)
    assert without_drafts(tmp_path / "completed") == content(folder)


@pytest.mark.parametrize("write", range(4))
def test_a_refresh_that_was_killed_is_completed(planned, folder, monkeypatch, write):
    request = planned.replaced(ANOTHER_EXAMPLE)
    killed_at(monkeypatch, write, request, folder, overwrite=True)
    create_plan(request, folder, overwrite=True)
    check_plan(request, folder)
    assert b"input_tokens: 77" in (folder / "predict" / "pilot.yaml").read_bytes()


@pytest.mark.parametrize("write", [0, 3, 6])
def test_a_full_disk_names_the_file_and_is_completed_later(request_of, folder, monkeypatch, write):
    count, real = iter(range(100)), os.fsync

    def full(descriptor):
        if next(count) == write:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(planning.os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device.*{GENERATED_IN_ORDER[write]}"):
        create_plan(request_of(), folder)
    assert not list(folder.rglob(".fpmsdk-*"))
    create_plan(request_of(), folder, overwrite=True)
    check_plan(request_of(), folder)


def test_a_completion_compares_what_is_there(request_of, folder, monkeypatch):
    request = request_of()
    killed_at(monkeypatch, 5, request, folder, overwrite=False)
    (folder / "predict" / "pilot.yaml").write_text("traffic: {}\n")
    with pytest.raises(OnboardError, match=r"pilot\.yaml.*was modified"):
        create_plan(request, folder, overwrite=True)


def test_a_completion_needs_the_same_request(request_of, folder, monkeypatch):
    killed_at(monkeypatch, 3, request_of(), folder, overwrite=False)
    with pytest.raises(OnboardError, match=r"request\.yaml: differs from the requested plan"):
        create_plan(request_of().replaced(ANOTHER_EXAMPLE), folder, overwrite=True)


def test_a_real_kill_between_writes_leaves_what_the_next_plan_completes(request_of, folder):
    request = request_of()
    script = (
        "import os, pathlib, signal, sys\n"
        "from fpmsdk.onboard import plan\n"
        "from fpmsdk.onboard.request import load_request\n"
        "write, count = plan._write, iter(range(9))\n"
        "def stop(place, content):\n"
        "    if next(count) == 4: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    write(place, content)\n"
        "plan._write = stop\n"
        "plan.create_plan(load_request('request.yaml'), sys.argv[1])\n"
    )
    with open("request.yaml", "wb") as file:
        file.write(request.yaml_bytes())
    ended = subprocess.run([sys.executable, "-c", script, str(folder)], env=environment(), check=False)
    assert ended.returncode == -signal.SIGKILL and not (folder / "support-plan.json").exists()
    create_plan(request, folder, overwrite=True)
    check_plan(request, folder)


def finalized(request, manifest, quality=None):
    """The request of a finalisation with this manifest."""
    profile = request.fpm_profile.model_dump(mode="json")
    if quality is not None:
        manifest = manifest | {"collection_quality": quality}
        profile["provenance"] = json.dumps({"collection_quality": quality})
    profile["deployments"][0]["resources"]["runtime_memory"]["provenance"] = json.dumps(manifest)
    return request.replaced({"fpm_profile": profile})


@pytest.fixture
def manifest(folder):
    """A finalisation whose pair is in the plan folder."""
    paths = ["systems/data/h200_sxm/vllm/0.27.0/table.parquet", "systems/data/h200_sxm/vllm/0.27.0/table.json"]
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"rows")
    digest = "bc51e9e65d79e1c90ba544ab2eae1044ccdf8c1af7a559ba375cba4276f7d99e"
    return {
        "schema_version": "aisimulate-onboarding-finalization/v1",
        "formal_data": [{"relative_path": path, "sha256": digest} for path in paths],
    }


def planned_beside_data(request, folder):
    """Plan where the pair of a finalisation is already."""
    data = folder.with_name("data")
    (folder / "systems" / "data").rename(data)
    (folder / "systems").rmdir()
    create_plan(request, folder)
    (folder / "systems" / "data").rmdir()
    data.rename(folder / "systems" / "data")


UNASSESSED = {"status": "not_assessed", "accuracy": "not_assessed"}


@pytest.mark.parametrize("quality", [None, UNASSESSED])
def test_a_finalisation_without_an_assessment_is_used(request_of, folder, manifest, quality):
    request = finalized(request_of("runtime linear"), manifest, quality)
    planned_beside_data(request, folder)
    check_plan(request, folder)


def test_a_quality_marker_is_recomputed_without_a_probe(request_of, folder, manifest):
    request = finalized(request_of("runtime linear"), manifest, {"status": "passed", "accuracy": "not_assessed"})
    planned_beside_data(request, folder)
    with pytest.raises(EvidenceError, match="collection_quality: is not what its evidence gives now"):
        check_plan(request, folder)


def test_a_marker_that_the_profile_does_not_have_is_refused(request_of, folder, manifest):
    request = finalized(request_of("runtime linear"), manifest | {"collection_quality": {"status": "passed"}})
    with pytest.raises(OnboardError, match="collection_quality differs from that of the finalisation"):
        create_plan(request, folder)


def test_finalised_data_are_compared_with_their_digests(request_of, folder):
    request = request_of("runtime linear")
    paths = ["systems/data/h200_sxm/vllm/0.27.0/table.parquet", "systems/data/h200_sxm/vllm/0.27.0/table.json"]
    manifest = {
        "schema_version": "aisimulate-onboarding-finalization/v1",
        # SHA-256 of "rows".
        "formal_data": [
            {
                "relative_path": path,
                "sha256": "bc51e9e65d79e1c90ba544ab2eae1044ccdf8c1af7a559ba375cba4276f7d99e",
            }
            for path in paths
        ],
    }
    profile = request.fpm_profile.model_dump(mode="json")
    profile["deployments"][0]["resources"]["runtime_memory"]["provenance"] = json.dumps(manifest)
    request = request.replaced({"fpm_profile": profile})
    create_plan(request, folder)
    with pytest.raises(EvidenceError, match=r"table\.parquet: this evidence is gone"):
        check_plan(request, folder)
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"other rows")
    with pytest.raises(EvidenceError, match="changed since it was recorded"):
        check_plan(request, folder)
    for path in paths:
        (folder / path).write_bytes(b"rows")
    check_plan(request, folder)
    assert json.loads((folder / "finalization.json").read_text()) == manifest


def test_the_search_of_a_plan_is_one_deployment_that_recommend_reads(planned, folder):
    config = read_recommend_config(folder / "recommend" / "pilot.yaml")
    assert config.modes == ("aggregated",)
    assert config.knobs("aggregated") == ()
    (sizes,) = config.layouts("aggregated").entries
    assert sizes.worker_gpus == planned.worker_gpus == config.optimization.constraints.max_candidate_gpus
