import contextlib
import json
import os
import signal
import threading
import warnings

import numpy as np
import pyarrow.parquet as pq
import pytest

from fpmsdk.errors import FpmDataError, FpmNotCollectedError
from fpmsdk.perfdb import forward_commit
from fpmsdk.perfdb.forward_cells import build_table
from fpmsdk.perfdb.forward_pair import read_pair
from fpmsdk.perfdb.forward_writer import merge_pairs, publish_rows
from tests.perfdb.pairs import VERSION, decode, prefill, write_pair

RUN = {"runtime_run_id": "run-1", "collector_attempt_id": "1"}
ROWS = [prefill(1, 256, 0, 3.0, **RUN), prefill(1, 128, 0, 2.5, **RUN), decode(1, 2, 3.0, **RUN)]


def read(path):
    return read_pair(str(path), "x100", "vllm", VERSION)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".parquet", ".json")}


def test_a_new_pair_is_of_schema_seven_and_sorted_by_key(tmp_path):
    published = publish_rows(str(tmp_path / "new" / "t.parquet"), ROWS, facts={"aic_revision": "r"})
    rows = read(published.path)
    assert (published.num_rows, published.added_rows, published.dropped_cells) == (3, 3, ())
    assert rows.sidecar["schema_version"] == 7
    assert rows.coordinates.tolist() == [[1, 1, 1], [0, 128, 256], [2, 0, 0]]
    assert (rows.sidecar["aic_revision"], rows.sidecar["runtime_run_ids"]) == ("r", ["run-1"])
    assert rows.texts["execution_profile"].of(0) == "full"
    assert pq.ParquetFile(published.path).metadata.row_group(0).column(0).compression == "ZSTD"


def test_equal_rows_give_equal_bytes(tmp_path):
    for name in ("a", "b"):
        publish_rows(str(tmp_path / name / "t.parquet"), ROWS)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_rows_are_added_to_a_pair_of_schema_six(tmp_path):
    path = write_pair(tmp_path, ROWS)
    published = publish_rows(str(path), [prefill(1, 512, 0, 4.0, **RUN), ROWS[0]])
    assert (published.num_rows, published.added_rows) == (4, 1)
    (cell,) = build_table(read(path), heal=True).cells
    assert cell.prefill.tokens.tolist() == [128, 256, 512]


def test_a_published_point_is_never_changed(tmp_path):
    path = write_pair(tmp_path, ROWS)
    before = files(tmp_path)
    with pytest.raises(FpmDataError, match=r"3\.0 ms in one row and 9\.0 ms in another"):
        publish_rows(str(path), [ROWS[0] | {"latency_ms": 9.0}])
    assert files(tmp_path) == before


def test_the_first_publisher_of_a_cell_wins(tmp_path):
    path = write_pair(tmp_path, ROWS)
    other = RUN | {"runtime_run_id": "run-2"}
    published = publish_rows(str(path), [prefill(1, 128, 0, 9.9, **other), decode(2, 4, 3.5, cell_id="new", **other)])
    assert (published.added_rows, published.dropped_cells) == (1, ("org/tiny-prefill",))
    assert 9.9 not in read(path).latency_ms


def test_declared_knees_stay_until_they_are_given_anew(tmp_path):
    path = str(tmp_path / "t.parquet")
    for rows, facts in ((ROWS, {"knees": {"total_prefill_tokens": [128]}}), ([decode(2, 4, 3.5)], None)):
        publish_rows(path, rows, facts=facts)
    assert read(path).sidecar["knees"] == {"total_prefill_tokens": [128]}
    publish_rows(path, ROWS, facts={"knees": {}})
    assert read(path).sidecar["knees"] == {}


def test_a_damaged_pair_is_not_built_upon(tmp_path):
    path = write_pair(tmp_path, ROWS, parquet_sha256="0" * 64)
    with pytest.raises(FpmDataError, match="digest mismatch"):
        publish_rows(str(path), ROWS)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "one system"),
        ([ROWS[0], ROWS[1] | {"backend_version": "2"}], "one backend_version"),
        ([ROWS[0] | {"latency_ms": -1.0}], "latency_ms"),
        ([ROWS[0] | {"latency_ms": "fast"}], "do not fit"),
        ([ROWS[0] | {"moe_backend": ""}], "moe_backend"),
        ([ROWS[0], {key: value for key, value in ROWS[1].items() if key != "cp"}], "row 1 lacks cp"),
        ([ROWS[0], 5], "row 1 must hold columns by name, found 5"),
        ([ROWS[0] | {"cell_id": ["a"]}], "row 0: cell_id must be a text, .* found"),
        ([ROWS[0] | {"total_kv_read_tokens": 2**70}], "do not fit"),
        ([ROWS[0] | {"total_kv_read_tokens": -1}], "t.parquet: row 0: total_kv_read_tokens"),
        ([ROWS[0] | {"total_prefill_tokens": 128.5}], "t.parquet: .*total_prefill_tokens must hold integers"),
    ],
)
def test_rows_that_break_the_format_leave_nothing_behind(tmp_path, rows, words):
    with pytest.raises(FpmDataError, match=words):
        publish_rows(str(tmp_path / "t.parquet"), rows)
    assert {path.name for path in tmp_path.iterdir()} <= {".t.lock"}


@pytest.mark.parametrize("facts", [{"aic_revision": object()}, {"share": float("nan")}, {"schema_version": 5}])
def test_facts_that_are_no_json_or_break_the_format_leave_nothing_behind(tmp_path, facts):
    with pytest.raises(FpmDataError, match="facts must be an object of JSON|schema_version 5"):
        publish_rows(str(tmp_path / "t.parquet"), ROWS, facts=facts)
    assert files(tmp_path) == {}


def test_a_table_is_named_as_one(tmp_path):
    with pytest.raises(FpmDataError, match=r"t\.txt: the table of a pair is a \*\.parquet file"):
        publish_rows(str(tmp_path / "t.txt"), ROWS)


def test_values_of_arrays_are_values(tmp_path):
    path = str(tmp_path / "t.parquet")
    publish_rows(path, [prefill(np.int64(1), np.int32(8), np.int64(0), np.float64(1.5), enable_eplb=np.bool_(False))])
    assert read(path).latency_ms.tolist() == [1.5]


NEW = [prefill(1, 512, 0, 4.0, **RUN)]


def forked():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        child = os.fork()
    if child == 0:
        signal.alarm(60)
    return child


def killed_at(call, path, count):
    """Publish in a process that dies at the `count`-th call of a function; whether it came so far."""
    child = forked()
    if child == 0:
        module, name = (forward_commit.os, call) if call == "replace" else (forward_commit, call)
        function, calls = getattr(module, name), []

        def dies(*args):
            calls.append(args)
            if len(calls) == count:
                os._exit(9)
            return function(*args)

        setattr(module, name, dies)
        with contextlib.suppress(BaseException):
            publish_rows(str(path), NEW)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(
    ("call", "count", "committed"),
    [
        ("_sync", 1, False),  # both files are staged
        ("replace", 1, False),  # nothing is replaced
        ("replace", 2, True),  # the table is, its sidecar is not
        ("_sync", 3, True),  # both are
    ],
)
def test_a_publisher_that_is_killed_leaves_a_pair_that_the_next_one_builds_upon(
    tmp_path, exists, call, count, committed
):
    path = tmp_path / "fpm_forward_perf.parquet"
    if exists:
        write_pair(tmp_path, ROWS)
    assert killed_at(call, path, count)
    published = publish_rows(str(path), [prefill(1, 1024, 0, 5.0, **RUN)])
    tokens = sorted(read(path).coordinates[1].tolist())
    assert tokens == sorted([*([0, 128, 256] if exists else []), *([512] if committed else []), 1024])
    assert published.added_rows == 1
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {path.name, ".fpm_forward_perf.lock", "fpm_forward_perf.metadata.json"}


def test_until_then_a_table_without_its_commit_record_is_a_digest_mismatch(tmp_path):
    path = write_pair(tmp_path, ROWS)
    assert killed_at("replace", path, 2)
    with pytest.raises(FpmDataError, match="digest mismatch"):
        read(path)


def test_readers_never_see_half_of_a_publication(tmp_path):
    path = str(tmp_path / "t.parquet")
    publish_rows(path, ROWS)
    stop, faults = threading.Event(), []

    def keep_reading():
        while not stop.is_set():
            try:
                assert read(path).num_rows >= 3
            except Exception as fault:
                faults.append(fault)

    readers = [threading.Thread(target=keep_reading) for _ in range(2)]
    for reader in readers:
        reader.start()
    for batch in range(2, 32):
        publish_rows(path, [decode(batch, 64, 1.0, cell_id=f"cell-{batch}")])
    stop.set()
    for reader in readers:
        reader.join()
    assert faults == []


def test_a_reader_waits_for_a_publication_between_its_two_steps(tmp_path, monkeypatch):
    path = str(tmp_path / "t.parquet")
    publish_rows(path, ROWS)
    replace, readers, found = forward_commit.os.replace, [], []

    def starts_a_reader_after_the_table(source, target):
        replace(source, target)
        if not readers:
            readers.append(threading.Thread(target=lambda: found.append(read(path).num_rows)))
            readers[0].start()
            readers[0].join(0.2)  # it waits for the lock

    monkeypatch.setattr(forward_commit.os, "replace", starts_a_reader_after_the_table)
    publish_rows(path, NEW)
    readers[0].join()
    assert found == [4]


def test_concurrent_publishers_lose_no_row(tmp_path):
    path = str(tmp_path / "t.parquet")
    threads = [
        threading.Thread(target=publish_rows, args=(path, [decode(batch, 64, 1.0, cell_id=f"cell-{batch}")]))
        for batch in range(1, 9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(path).coordinates[0].tolist() == list(range(1, 9))


def test_nor_do_publishers_in_other_processes(tmp_path):
    path = str(tmp_path / "t.parquet")
    children = []
    for batch in range(1, 5):
        child = forked()
        if child == 0:
            with contextlib.suppress(BaseException):
                publish_rows(path, [decode(batch, 64, 1.0, cell_id=f"cell-{batch}")])
                os._exit(0)
            os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0, 0]
    assert read(path).coordinates[0].tolist() == [1, 2, 3, 4]


class TestMerge:
    def test_pairs_are_merged_in_order(self, tmp_path):
        one = write_pair(tmp_path / "a", ROWS)
        two = write_pair(tmp_path / "b", [decode(2, 4, 3.5, cell_id="other")])
        merge_pairs(str(tmp_path / "c" / "t.parquet"), [str(one), str(two)])
        assert read(tmp_path / "c" / "t.parquet").num_rows == 4

    def test_attention_backends_are_not_mixed(self, tmp_path):
        one = write_pair(tmp_path / "a", ROWS)
        two = write_pair(tmp_path / "b", [decode(2, 4, 3.5, attention_backend="fa3")])
        with pytest.raises(FpmDataError, match="attention_backend.*'auto' and 'fa3'"):
            merge_pairs(str(tmp_path / "c" / "t.parquet"), [str(one), str(two)])
        assert not (tmp_path / "c").exists()

    def test_nor_with_those_of_the_target(self, tmp_path):
        target = write_pair(tmp_path / "a", ROWS)
        before = files(tmp_path / "a")
        other = write_pair(tmp_path / "b", [decode(2, 4, 3.5, attention_backend="fa3", cell_id="other")])
        with pytest.raises(FpmDataError, match="attention_backend.*'auto' and 'fa3'"):
            merge_pairs(str(target), [str(other)])
        assert files(tmp_path / "a") == before

    def test_a_source_that_is_not_there_was_not_collected(self, tmp_path):
        with pytest.raises(FpmNotCollectedError, match=r"File does not exist at .*none\.parquet"):
            merge_pairs(str(tmp_path / "t.parquet"), [str(tmp_path / "none.parquet")])

    def test_a_source_without_a_sidecar_is_an_error(self, tmp_path):
        one = write_pair(tmp_path / "a", ROWS)
        (tmp_path / "a" / "fpm_forward_perf.metadata.json").unlink()
        with pytest.raises(FpmDataError, match="sidecar"):
            merge_pairs(str(tmp_path / "t.parquet"), [str(one)])


def test_the_sidecar_is_plain_json(tmp_path):
    publish_rows(str(tmp_path / "t.parquet"), ROWS)
    assert json.loads((tmp_path / "t.metadata.json").read_text())["row_count"] == 3
