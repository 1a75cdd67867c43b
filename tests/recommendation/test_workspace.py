"""The folder of a sweep: one sweep at a time, and never somebody else's files."""

import os
import subprocess
import sys

import pytest

from fpmsdk.documents.lock import exclusive
from fpmsdk.errors import OnboardError
from fpmsdk.recommendation.journal import JournalWriter
from fpmsdk.recommendation.workspace import LOCK, workspace

HEAD = {"shard": "1/1"}


def use(folder, *, overwrite=False, resume=False, head=HEAD):
    with workspace(folder, head=head, overwrite=overwrite, resume=resume) as place:
        if place.journal is None:
            with JournalWriter(place.journal_path, head) as writer:
                writer.add([{"index": 0}])
        return place


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("exists", [False, True])
def test_a_sweep_begins_in_a_new_or_empty_folder(tmp_path, exists, resume):
    folder = tmp_path / "sweeps" / "a"
    if exists:
        folder.mkdir(parents=True)
    assert use(folder, resume=resume).journal is None


def test_a_sweep_is_continued(tmp_path):
    use(tmp_path)
    assert use(tmp_path, resume=True).journal.entries == {0: {"index": 0}}


def test_a_sweep_is_begun_anew_and_only_results_are_removed(tmp_path):
    use(tmp_path)
    ranked = tmp_path / "recommendations"
    (ranked / "0001").mkdir(parents=True)
    for name in (
        "recommendation.json",
        "fpm-coverage.json",
        "recommendations/0001.yaml",
        "recommendations/0001/serve.sh",
    ):
        (tmp_path / name).write_text("old")
    for name in ("notes.txt", "recommendations/mine.yaml"):
        (tmp_path / name).write_text("kept")
    outside = tmp_path.parent / "outside.json"
    outside.write_text("kept")
    (tmp_path / "prediction.json").symlink_to(outside)
    assert use(tmp_path, overwrite=True).journal is None
    left = sorted(place.relative_to(tmp_path).as_posix() for place in tmp_path.rglob("*"))
    assert left == [LOCK, "candidates.jsonl", "notes.txt", "recommendations", "recommendations/mine.yaml"]
    assert outside.read_text() == "kept"


def refused(folder, message, **options):
    before = sorted(os.walk(folder)) if folder.is_dir() else folder.read_bytes()
    with pytest.raises(OnboardError, match=message):
        use(folder, **options)
    assert (sorted(os.walk(folder)) if folder.is_dir() else folder.read_bytes()) == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_foreign_folder_is_refused_and_left_alone(tmp_path, resume):
    (tmp_path / "thesis.tex").write_text("x")
    refused(tmp_path, "is not empty and holds no sweep; name another", resume=resume)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is no directory; name another", overwrite=True)


def test_a_sweep_that_is_there_is_neither_continued_nor_removed_without_being_told(tmp_path):
    use(tmp_path)
    refused(tmp_path, "holds a sweep; pass --resume to go on with it, or --overwrite to begin anew")


def test_another_sweep_is_not_continued(tmp_path):
    use(tmp_path)
    refused(tmp_path, "is of another sweep: shard is 1/1 there, 2/2 here", resume=True, head={"shard": "2/2"})


def test_resume_and_overwrite_exclude_each_other(tmp_path):
    refused(tmp_path, "exclude each other", resume=True, overwrite=True)


def test_two_sweeps_cannot_have_one_folder(tmp_path):
    use(tmp_path)
    script = "import sys; from tests.recommendation.test_workspace import hold; hold(sys.argv[1])"
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout.readline() == b"held\n"
        refused(tmp_path, "another process works on a sweep in this folder", overwrite=True)
    finally:
        other.communicate()
    assert use(tmp_path, resume=True).journal is not None


def hold(folder):
    """Have the folder until standard input ends, in another process."""
    with exclusive(os.path.join(folder, LOCK), "a sweep"):
        print("held", flush=True)
        sys.stdin.read()
