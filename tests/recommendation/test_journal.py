"""The journal of a sweep: whole lines survive, torn ones are dropped, and another sweep's are refused."""

import json

import pytest

from fpmsdk.errors import EvidenceError, OnboardError
from fpmsdk.recommendation.journal import JournalWriter, read_journal, same_sweep

HEAD = {"config": {"engine": {"model": "org/m"}, "optimizer": {"seed": 1}}, "shard": "1/1"}
ENTRIES = [{"index": index, "outcome": {"status": "feasible"}} for index in range(3)]


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "candidates.jsonl"
    with JournalWriter(path, HEAD) as writer:
        writer.add(ENTRIES[:2])
        writer.add(ENTRIES[2:])
    return path


def test_what_was_added_is_read(written):
    journal = read_journal(written)
    assert journal.entries == dict(enumerate(ENTRIES))
    assert {name: journal.head[name] for name in HEAD} == HEAD
    assert journal.end is None


@pytest.mark.parametrize("kept_bytes_of_the_last_line", [1, 10, -1])
def test_a_torn_last_line_is_dropped_and_overwritten(written, kept_bytes_of_the_last_line):
    *whole, last = written.read_bytes().splitlines(keepends=True)
    written.write_bytes(b"".join(whole) + last[:kept_bytes_of_the_last_line])
    journal = read_journal(written)
    assert sorted(journal.entries) == [0, 1]
    with JournalWriter(written, HEAD, journal) as writer:
        writer.add(ENTRIES[2:])
    assert read_journal(written).entries == dict(enumerate(ENTRIES))


@pytest.mark.parametrize("damaged", [b"{", b"[]", b"{}", b'{"index": "1"}', b"\x00"])
def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(written, damaged):
    lines = written.read_bytes().splitlines()
    written.write_bytes(b"\n".join([*lines[:2], damaged, *lines[3:]]) + b"\n")
    with pytest.raises(EvidenceError, match=r"candidates.jsonl:3: "):
        read_journal(written)


@pytest.mark.parametrize("content", [b"", b'{"schema": "fpmsdk-cand'])
def test_a_file_without_a_whole_line_is_no_journal(tmp_path, content):
    path = tmp_path / "candidates.jsonl"
    path.write_bytes(content)
    with pytest.raises(EvidenceError, match="holds no line; pass --overwrite"):
        read_journal(path)


def test_the_journal_of_another_version_is_refused(tmp_path):
    path = tmp_path / "candidates.jsonl"
    path.write_text(json.dumps({"schema": "fpmsdk-candidates/9"}) + "\n")
    with pytest.raises(EvidenceError, match="found schema 'fpmsdk-candidates/9', accepted is 'fpmsdk-candidates/1'"):
        read_journal(path)


def test_the_last_try_of_a_candidate_counts(written):
    with JournalWriter(written, HEAD, read_journal(written)) as writer:
        writer.add([{"index": 1, "outcome": {"status": "timed_out"}}])
    assert read_journal(written).entries[1]["outcome"] == {"status": "timed_out"}


def test_a_journal_that_is_continued_after_its_end_has_no_end(written):
    with JournalWriter(written, HEAD, read_journal(written)) as writer:
        writer.close_sweep("time_budget")
    assert read_journal(written).end == "time_budget"
    with JournalWriter(written, HEAD, read_journal(written)) as writer:
        writer.add(ENTRIES[:1])
    assert read_journal(written).end is None


def test_a_journal_is_not_written_over(written):
    with pytest.raises(FileExistsError):
        JournalWriter(written, HEAD)


OTHERS = [
    ({**HEAD, "shard": "1/2"}, "shard is 1/2 there, 1/1 here"),
    (
        {**HEAD, "config": {"engine": {"model": "org/n"}, "optimizer": {"seed": 1}}},
        "config.engine.model is org/n there, org/m here",
    ),
    (
        {**HEAD, "config": {"engine": {"model": "org/m"}, "optimizer": {}}},
        "config.optimizer.seed is absent there, 1 here",
    ),
]


@pytest.mark.parametrize(("found", "difference"), OTHERS)
def test_another_sweep_is_refused_by_the_field_that_differs(found, difference):
    with pytest.raises(OnboardError, match=f"is of another sweep: {difference}; restore that"):
        same_sweep(found, HEAD, "candidates.jsonl")


def test_the_same_sweep_is_accepted():
    same_sweep({"schema": "fpmsdk-candidates/1", **HEAD}, HEAD, "candidates.jsonl")
