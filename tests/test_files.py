"""Writing a file: whole or not at all, and only what was named."""

import os
import threading
from pathlib import Path

import pytest

from fpmsdk.files import whole_file


def write(path, content=b"new"):
    with whole_file(path) as file:
        file.write(content)


@pytest.mark.parametrize("before", [None, b"old"])
def test_the_content_takes_the_place_of_the_file(tmp_path, before):
    target = tmp_path / "report"
    if before is not None:
        target.write_bytes(before)
    write(target)
    assert target.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_failure_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path):
    target = tmp_path / "report"
    target.write_bytes(b"old")
    with pytest.raises(KeyError), whole_file(target) as file:
        file.write(b"half")
        raise KeyError
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path, exists):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "report", tmp_path / "link"
    if exists:
        target.write_bytes(b"old")
    link.symlink_to(target)
    write(link)
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_a_pipe_is_written_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    write(pipe)
    reader.join()
    assert received == [b"new"]
    assert pipe.is_fifo()


def test_permissions_stay_and_new_files_have_the_usual_ones(tmp_path):
    usual, kept, new = tmp_path / "usual", tmp_path / "kept", tmp_path / "new"
    usual.write_bytes(b"")
    kept.write_bytes(b"")
    kept.chmod(0o640)
    write(kept)
    write(new)
    assert kept.stat().st_mode & 0o777 == 0o640
    assert new.stat().st_mode == usual.stat().st_mode


@pytest.mark.parametrize("name", ["none/report", "file/report", "directory"])
def test_an_error_names_what_was_to_be_written(tmp_path, name):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError) as refused:
        write(tmp_path / name)
    assert refused.value.filename == str(tmp_path / name) or refused.value.filename == tmp_path / name
    assert "fpmsdk-" not in str(refused.value)


def test_an_error_at_the_last_step_names_the_target(tmp_path, monkeypatch):
    def replace(draft, target):
        raise PermissionError(13, "Permission denied", str(draft), None, str(target))

    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(PermissionError) as refused:
        write(tmp_path / "report")
    assert str(refused.value) == f"[Errno 13] Permission denied: '{tmp_path / 'report'}'"
    assert list(tmp_path.iterdir()) == []


def test_a_name_as_long_as_the_system_allows_can_be_written(tmp_path):
    write(tmp_path / ("n" * 255))
    assert len(list(tmp_path.iterdir())) == 1


def test_threads_that_write_one_file_do_not_meet(tmp_path):
    target = tmp_path / "report"
    contents = [bytes([number]) * 100_000 for number in range(8)]
    faults = []

    def writer(content):
        try:
            for _ in range(20):
                write(target, content)
        except OSError as fault:
            faults.append(fault)

    threads = [threading.Thread(target=writer, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert target.read_bytes() in contents
    assert list(Path(tmp_path).iterdir()) == [target]
