"""Writing a file: whole or not at all, and only what was named."""

import os
import stat
import threading
from pathlib import Path

import pytest

from fpmsdk.files import UnfitFileError, read_large, read_regular, whole_file, write_directory


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


# --- reading a file whose size is looked at first ---

READERS = pytest.mark.parametrize("read", [read_regular, read_large])


@READERS
@pytest.mark.parametrize("size", [0, 1, (5 << 20) + 1])
def test_a_file_of_the_largest_accepted_size_is_read_whole(tmp_path, read, size):
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    assert bytes(read(tmp_path / "file", limit_bytes=size)) == content


@READERS
def test_a_larger_file_is_not_read(tmp_path, read):
    (tmp_path / "file").write_bytes(b"1234")
    with pytest.raises(UnfitFileError, match="expected at most 3 bytes, found 4"):
        read(tmp_path / "file", limit_bytes=3)


@READERS
@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, read, kind):
    (os.mkdir if kind == "directory" else os.mkfifo)(tmp_path / "file")
    with pytest.raises(UnfitFileError, match="expected a regular file"):
        read(tmp_path / "file", limit_bytes=10)


@READERS
def test_a_link_is_followed_unless_that_is_refused(tmp_path, read):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert bytes(read(tmp_path / "link", limit_bytes=10)) == b"content"
    with pytest.raises(UnfitFileError, match="found a symbolic link"):
        read(tmp_path / "link", limit_bytes=10, follow_links=False)


@READERS
@pytest.mark.parametrize(("said", "found"), [(2, 3), (5, 4)])
def test_a_file_of_another_size_than_it_said_is_refused(tmp_path, monkeypatch, read, said, found):
    (tmp_path / "file").write_bytes(b"1234")
    status = os.stat_result((stat.S_IFREG, 0, 0, 1, 0, 0, said, 0, 0, 0))
    monkeypatch.setattr("fpmsdk.files.os.fstat", lambda descriptor: status)
    with pytest.raises(UnfitFileError, match=f"expected {said} bytes, as the file said, found {found}"):
        read(tmp_path / "file", limit_bytes=10)


def test_a_directory_holds_files_below_it_whole_or_not_at_all(tmp_path):
    write_directory(tmp_path / "plan", {"request.yaml": b"a", "systems/data/table": b"b"})
    assert (tmp_path / "plan/systems/data/table").read_bytes() == b"b"

    def refuse():
        raise ValueError("changed meanwhile")

    with pytest.raises(ValueError, match="changed meanwhile"):
        write_directory(tmp_path / "other", {"systems/data/table": b"b"}, refuse)
    assert [place.name for place in tmp_path.iterdir()] == ["plan"]


def test_a_directory_that_appears_meanwhile_is_not_replaced(tmp_path):
    target = tmp_path / "plan"
    with pytest.raises(FileExistsError):
        write_directory(target, {"request.yaml": b"a"}, target.mkdir)
    assert list(target.iterdir()) == [] and [place.name for place in tmp_path.iterdir()] == ["plan"]
