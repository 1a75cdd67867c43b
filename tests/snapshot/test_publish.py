"""A snapshot is there whole or not at all, whatever ends the writer. Source: snapshot.md section 5."""

import contextlib
import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from fpmsdk import ForwardPassPerfModel, FpmBatch, errors, inspect_state_snapshot, sample
from fpmsdk.snapshot import publish as module
from fpmsdk.snapshot.digest import BackgroundDigest
from fpmsdk.snapshot.manifest import RecordedFile
from fpmsdk.snapshot.publish import STAGING_PREFIX, publish
from tests.snapshot.processes import run_module


@pytest.fixture(scope="module")
def model():
    built = ForwardPassPerfModel.best_available(sample.MODEL)
    built.tune_with_fpms(FpmBatch.from_frames(sample.train_frames()[:400]))
    return built


def restores(folder):
    return ForwardPassPerfModel.best_available(state_snapshot=folder).readiness_report()["ready"]


# --- crash safety ---


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_writer_killed_at_any_step_leaves_nothing_or_a_whole_snapshot(tmp_path):
    outcomes = run_module("tests.snapshot.killed", str(tmp_path), seed=4)
    *killed, survived = outcomes[:-3]
    assert survived == {"status": 0, "whole": True, "stale": 0, "other": 0}
    # Three files with their bytes made durable, the staging directory, the move, the parent.
    assert len(killed) > 40
    assert {outcome["status"] for outcome in (*killed, *outcomes[-3:])} == {-signal.SIGKILL}
    # First nothing at all, then something stale, then a whole snapshot.
    stages = [(outcome["whole"], outcome["stale"], outcome["other"]) for outcome in killed]
    assert list(dict.fromkeys(stages)) == [(None, 0, 0), (None, 1, 0), (True, 0, 0)]
    assert stages == sorted(stages, key=[(None, 0, 0), (None, 1, 0), (True, 0, 0)].index)
    # Half a file is never taken for one.
    assert [(outcome["whole"], outcome["stale"]) for outcome in outcomes[-3:]] == [(None, 1)] * 3


def test_a_stale_staging_directory_is_told_by_its_name_and_in_nobodys_way(model, tmp_path):
    stale = tmp_path / f"{STAGING_PREFIX}0123456789abcdef"
    stale.mkdir()
    (stale / "state.bin").write_bytes(b"half")
    model.save_state_snapshot(tmp_path / "saved")
    assert restores(tmp_path / "saved")
    assert sorted(os.listdir(tmp_path)) == [stale.name, "saved"]


# --- a disk that takes no more ---


class Failing:
    """Replaces a function; the call of a given number fails."""

    def __init__(self, function, number, fault):
        self.function, self.left, self.fault = function, number, fault

    def __call__(self, *given, **named):
        self.left -= 1
        if self.left < 0:
            raise OSError(self.fault, os.strerror(self.fault))
        return self.function(*given, **named)


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize(("function", "calls"), [("fsync", 4), ("mkdir", 1), ("rename", 1)])
def test_a_failing_call_leaves_nothing_behind(model, tmp_path, monkeypatch, function, calls, fault):
    for number in range(calls):
        with monkeypatch.context() as patched:
            patched.setattr(module.os, function, Failing(getattr(os, function), number, fault))
            with pytest.raises(errors.StateSnapshotIOError, match=os.strerror(fault)) as caught:
                model.save_state_snapshot(tmp_path / "saved")
        assert caught.value.errno == fault
        assert str(tmp_path / "saved") in str(caught.value)
        assert os.listdir(tmp_path) == []


def test_every_file_and_directory_is_made_durable_before_it_is_published(tmp_path, monkeypatch):
    durable, rename = set(), os.rename
    monkeypatch.setattr(module.os, "fsync", lambda descriptor: durable.add(os.fstat(descriptor).st_ino))

    def renamed(source, destination):
        found = {entry.stat().st_ino for entry in [tmp_path.joinpath(source), *tmp_path.joinpath(source).rglob("*")]}
        assert len(found) == 43
        assert found == durable
        rename(source, destination)

    monkeypatch.setattr(module.os, "rename", renamed)

    def write(staging):
        for number in range(40):  # more than are kept open
            staging.write(f"inner/folder/{number}" if number % 2 else str(number), b"content")

    publish(str(tmp_path / "saved"), write)
    assert tmp_path.stat().st_ino in durable


@pytest.mark.parametrize("size", [0, 1, (1 << 20) + 1, (1 << 22) - 1, 1 << 22, (5 << 20) + 3])
def test_a_file_of_any_size_is_written_whole_and_digested(tmp_path, size):
    content = np.random.default_rng(size).bytes(size)
    recorded = []
    publish(str(tmp_path / "saved"), lambda staging: recorded.append(staging.write("file", memoryview(content))))
    assert (tmp_path / "saved" / "file").read_bytes() == content
    assert recorded == [RecordedFile("file", size, hashlib.sha256(content).hexdigest())]


@pytest.mark.parametrize("sizes", [[], [0], [5, 7], [1 << 20], [3, 1 << 20, 0, 4, (2 << 20) + 1, 9]])
def test_a_digest_is_that_of_all_pieces_in_their_order(sizes):
    pieces = [bytes([number]) * size for number, size in enumerate(sizes)]
    digest = BackgroundDigest()
    for piece in pieces:
        digest.update(memoryview(piece))
    assert digest.hexdigest() == hashlib.sha256(b"".join(pieces)).hexdigest()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("fails", [False, True])
def test_no_file_stays_open(tmp_path, fails):
    def write(staging):
        staging.write("a", b"1")
        staging.write("b", b"2")
        if fails:
            raise KeyboardInterrupt

    before = os.listdir("/proc/self/fd")
    with pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
        publish(str(tmp_path / "saved"), write)
    assert os.listdir("/proc/self/fd") == before


def test_the_parent_is_made_durable_as_far_as_it_can(model, tmp_path, monkeypatch):
    monkeypatch.setattr(module.os, "fsync", Failing(os.fsync, 4, errno.EIO))
    model.save_state_snapshot(tmp_path / "saved")
    assert restores(tmp_path / "saved")


def test_whatever_stops_the_writer_leaves_nothing_behind(tmp_path):
    def interrupted(staging):
        staging.write("a", b"1")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(str(tmp_path / "saved"), interrupted)
    assert os.listdir(tmp_path) == []


LIMITED = """
import resource, signal, sys
from fpmsdk import ForwardPassPerfModel, sample
model = ForwardPassPerfModel.best_available(sample.MODEL)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    model.save_state_snapshot(sys.argv[1])
except OSError as fault:
    print(type(fault).__name__, fault.errno)
"""


@pytest.mark.parametrize("limit", [0, 100, 1700])
def test_a_file_that_may_not_grow_is_an_io_error(tmp_path, limit):
    run = [sys.executable, "-c", LIMITED, str(tmp_path / "saved"), str(limit)]
    told = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()
    assert told == ["StateSnapshotIOError", str(errno.EFBIG)]
    assert os.listdir(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs tmpfs")
def test_a_full_disk_is_an_io_error_and_keeps_nothing(model, small_disk):
    (small_disk / "ballast").write_bytes(bytes(8192))
    with pytest.raises(errors.StateSnapshotIOError, match="No space left on device") as caught:
        model.save_state_snapshot(small_disk / "saved")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(small_disk) == ["ballast"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs tmpfs")
def test_a_read_only_file_system_is_an_io_error(model, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(errors.StateSnapshotIOError, match="Read-only file system"):
        model.save_state_snapshot(small_disk / "saved")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_parent_is_a_permission_error(model, tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(PermissionError) as caught:
        model.save_state_snapshot(tmp_path / "saved")
    assert isinstance(caught.value, errors.StateSnapshotIOError)


def test_a_parent_that_may_not_be_written_is_a_permission_error(model, tmp_path, monkeypatch):
    monkeypatch.setattr(module.os, "mkdir", Failing(os.mkdir, 0, errno.EACCES))
    with pytest.raises(PermissionError) as caught:
        model.save_state_snapshot(tmp_path / "saved")
    assert isinstance(caught.value, errors.StateSnapshotIOError)


# --- destinations ---


@pytest.mark.parametrize("kind", ["snapshot", "directory", "file", "dangling link"])
def test_nothing_may_be_at_the_destination(model, tmp_path, kind):
    destination = tmp_path / "saved"
    if kind == "snapshot":
        model.save_state_snapshot(destination)
    elif kind == "directory":
        destination.mkdir()
    elif kind == "file":
        destination.write_bytes(b"")
    else:
        destination.symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="saved") as caught:
        model.save_state_snapshot(destination)
    assert isinstance(caught.value, errors.StateSnapshotIOError)
    assert os.listdir(tmp_path) == ["saved"]


def test_a_destination_below_a_file_is_no_directory(model, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError) as caught:
        model.save_state_snapshot(tmp_path / "file" / "saved")
    assert isinstance(caught.value, errors.StateSnapshotIOError)


def test_the_parent_has_to_exist(model, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        model.save_state_snapshot(tmp_path / "missing" / "saved")
    assert isinstance(caught.value, errors.StateSnapshotIOError)


def test_a_path_that_no_file_can_have(model, tmp_path):
    with pytest.raises(errors.StateSnapshotError, match="null"):
        model.save_state_snapshot(f"{tmp_path}/a\0b")
    with pytest.raises(errors.StateSnapshotError, match="null"):
        inspect_state_snapshot(f"{tmp_path}/a\0b")


NAMES = ["two words", "größe-模型", os.fsdecode(b"not text \xff\xfe"), "long" * 60, "-", "…"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_name_will_do(model, tmp_path, name):
    if sys.platform != "linux" and "\udcff" in name:
        pytest.skip("the file system refuses such names")
    config = model.save_state_snapshot(tmp_path / name)
    assert restores(tmp_path / name)
    assert ForwardPassPerfModel.best_available(config).readiness_report()["ready"]
    assert inspect_state_snapshot(tmp_path / name)["kind"] == "regression_linear"


def test_a_very_long_path_will_do(model, tmp_path):
    folder = tmp_path.joinpath(*["d" * 200] * 15)
    folder.mkdir(parents=True)
    model.save_state_snapshot(folder / "saved")
    assert restores(folder / "saved")
    with pytest.raises(errors.StateSnapshotIOError, match="File name too long"):
        model.save_state_snapshot(folder / ("x" * 300))


def test_links_on_the_way_stay_in_the_path(model, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to("real")
    config = model.save_state_snapshot(tmp_path / "alias" / "saved")
    assert config["estimator_config"]["state_snapshot"]["path"] == str(tmp_path / "alias/saved")
    assert restores(tmp_path / "real/saved")


def test_of_concurrent_saves_one_wins_whole_and_the_others_err(model, tmp_path, monkeypatch):
    barrier = threading.Barrier(4)
    rename = os.rename

    def together(*given):
        barrier.wait()
        rename(*given)

    monkeypatch.setattr(module.os, "rename", together)
    outcomes = []

    def save():
        try:
            outcomes.append(model.save_state_snapshot(tmp_path / "saved"))
        except FileExistsError as fault:
            outcomes.append(fault)

    threads = [threading.Thread(target=save) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(outcome, dict) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, errors.StateSnapshotIOError) for outcome in outcomes) == 3
    assert os.listdir(tmp_path) == ["saved"]
    assert restores(tmp_path / "saved")


def test_a_save_beside_tuning_is_the_state_after_whole_calls(tmp_path):
    model = ForwardPassPerfModel.best_available(sample.MODEL)
    frames = sample.train_frames()
    done = threading.Event()

    def tune():
        for start in range(0, 4000, 8):
            model.tune_with_fpms(FpmBatch.from_frames(frames[start : start + 8]))
        done.set()

    thread = threading.Thread(target=tune)
    thread.start()
    number = 0
    while not done.is_set() and number < 40:
        model.save_state_snapshot(tmp_path / str(number))
        # Every check of the restore holds for what was saved in between.
        ForwardPassPerfModel.best_available(state_snapshot=tmp_path / str(number))
        number += 1
    thread.join()
    assert number > 0
