"""Databases: sharing per process, lazy and concurrent loading, filling in, and every kind of bad file."""

import contextlib
import copy
import gc
import os
import pickle
import shutil
import sys
import threading
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fpmsdk.errors import FpmSdkError, PerfDataCorruptError, PerfDataNotAvailableError, UnknownSystemError
from fpmsdk.perfdb import SystemsRoot, open_database, open_root, parquet
from tests.perfdb.synthetic import ATTENTION, GEMM, MOE, REUSE, rows


def gemm(systems, place="gemm/vllm/1.0", *changes):
    return systems.table(place, "gemm_perf", rows(GEMM, *(changes or ({},))))


def database(systems, version="1.0", **options):
    return open_database(systems.path, "x100", "vllm", version, **options)


def latencies(table):
    return {key: part.latency_ms.tolist() for key, part in table.slices.items()}


def test_one_instance_serves_a_process(systems):
    gemm(systems)
    assert database(systems) is open_database(open_root(systems.path), "x100", "vllm", "1.0")
    assert database(systems) is not database(systems, enable_shared_layer=False)
    assert database(systems) is not database(systems, strict_provenance=True)


def test_a_table_is_loaded_once(systems):
    gemm(systems)
    assert database(systems).table("gemm_perf") is database(systems).table("gemm_perf")


def test_concurrent_first_loads_share_one_load(systems, monkeypatch):
    gemm(systems)
    reads = []
    started = threading.Barrier(8)
    read = parquet.read_content
    monkeypatch.setattr("fpmsdk.perfdb.database.read_content", lambda path: reads.append(path) or read(path))
    loaded = []

    def load():
        started.wait()
        loaded.append(database(systems).table("gemm_perf"))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 1
    assert len(loaded) == 8
    assert len({id(table) for table in loaded}) == 1


def test_missing_coordinates_are_filled_from_later_sources_in_order(systems):
    gemm(systems, "gemm/vllm/1.0", {"m": 1, "latency": 1.0}, {"m": 2, "latency": 2.0})
    gemm(systems, "gemm/vllm/2.0", {"m": 2, "latency": 22.0}, {"m": 4, "latency": 24.0})
    gemm(systems, "gemm/vllm/0.9", {"m": 4, "latency": 94.0}, {"m": 8, "latency": 98.0})
    reuse = {"table": "gemm_perf", "from_version": "2.0"} | REUSE
    systems.document("data/x100/gemm/vllm/1.0/reuse.yaml", {"reuse": [reuse]})
    assert latencies(database(systems).table("gemm_perf")) == {("bfloat16",): [1.0, 2.0, 24.0, 98.0]}
    assert latencies(database(systems, enable_shared_layer=False).table("gemm_perf")) == {("bfloat16",): [1.0, 2.0]}


def test_other_backends_give_only_rows_of_shared_kernels(systems):
    gemm(systems, "gemm/vllm/1.0", {"m": 1})
    gemm(
        systems,
        "gemm/sglang/0.5",
        {"m": 2, "kernel_source": "deepgemm", "latency": 2.0},
        {"m": 4, "kernel_source": "own", "latency": 4.0},
    )
    gemm(systems, "gemm/trtllm/1.0", {"m": 8, "latency": 8.0})
    group = {"op_file": "gemm_perf.parquet", "kernel_source": "deepgemm", "tier": "shared"}
    group["frameworks"] = ["vllm", "sglang", "trtllm"]
    systems.document("perf_data_reuse_manifest.yaml", {"groups": [group]})
    table = database(systems).table("gemm_perf")
    assert latencies(table) == {("bfloat16",): [1.0, 2.0]}
    assert [(source.channel, source.version) for source in table.sources] == [
        ("primary", "1.0"),
        ("cross_backend", "0.5"),
        ("cross_backend", "1.0"),
    ]


def test_an_unknown_system_is_told(systems):
    with pytest.raises(UnknownSystemError):
        open_database(systems.path, "x1000", "vllm", "1.0")


def test_a_version_without_a_directory_is_refused_unless_tolerated(systems):
    gemm(systems)
    with pytest.raises(PerfDataNotAvailableError, match="no vllm 2.0 data for x100.*present: 1.0"):
        database(systems, "2.0")
    assert database(systems, "2.0", tolerate_dirless=True).table("gemm_perf").rows == 1


def test_a_table_without_rows_fails_the_same_way_every_time(systems):
    gemm(systems)
    opened = database(systems)
    for _ in range(2):
        with pytest.raises(PerfDataNotAvailableError, match=r"^perf database error: no moe_perf data.*no moe_perf\.p"):
            opened.table("moe_perf")


EMPTY = pa.Table.from_pylist([GEMM]).slice(0, 0)


def test_an_empty_primary_leaves_the_table_to_other_sources(systems):
    systems.table("gemm/vllm/1.0", "gemm_perf", EMPTY)
    gemm(systems, "gemm/vllm/0.9", {"latency": 9.0})
    assert latencies(database(systems).table("gemm_perf")) == {("bfloat16",): [9.0]}


def test_a_table_of_empty_files_has_no_data(systems):
    systems.table("gemm/vllm/1.0", "gemm_perf", EMPTY)
    with pytest.raises(PerfDataNotAvailableError, match=r"none of .*gemm/vllm/1\.0/gemm_perf.* has a usable row"):
        database(systems).table("gemm_perf")


def truncated(path):
    path.write_bytes(path.read_bytes()[:-20])


def damaged_page(path):
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [truncated, damaged_page, lambda path: path.write_bytes(b""), lambda path: path.write_text("no Parquet at all")],
    ids=["truncated", "damaged page", "empty", "another format"],
)
def test_a_damaged_file_is_corruption_and_names_the_file(systems, damage):
    path = gemm(systems)
    damage(path)
    with pytest.raises(PerfDataCorruptError, match=f"{path}: .*reinstall or repair") as caught:
        database(systems).table("gemm_perf")
    assert caught.value.path == str(path)


def test_a_git_lfs_pointer_is_no_data_and_says_how_to_get_it(systems):
    gemm(systems).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(PerfDataNotAvailableError, match=r"perf database error: .*Git LFS pointer.*git lfs pull"):
        database(systems).table("gemm_perf")


def column(name, values, dtype=None):
    return lambda table: table.set_column(table.column_names.index(name), name, pa.array(values, dtype))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda table: table.drop_columns(["latency"]), r"columns \['latency'\] are missing"),
        (lambda table: table.drop_columns(["n", "k"]), r"columns \['n', 'k'\] are missing"),
        (column("k", ["1", "2"]), "'k' must hold integers, found text"),
        (column("k", [1.0, 2.0]), "'k' must hold integers, found float64"),
        (column("gemm_dtype", [1, 2]), "'gemm_dtype' must hold text, found integers"),
        (column("latency", ["1", "2"]), "'latency' must hold numbers, found text"),
        (column("k", [1, None]), "'k' has 1 empty values"),
        (column("latency", [1.0, None]), "'latency' has 1 empty values"),
        (
            lambda table: pa.Table.from_arrays([*table.columns, table["m"]], [*table.column_names, "m"]),
            r"\['m'\] are there",
        ),
    ],
)
def test_a_file_with_wrong_columns_provides_no_data(systems, change, reason):
    path = gemm(systems, "gemm/vllm/1.0", {"m": 1}, {"m": 2})
    pq.write_table(change(pq.ParquetFile(path).read()), path)
    with pytest.raises(PerfDataNotAvailableError, match=f"^perf database error: {path}: .*{reason}"):
        database(systems).table("gemm_perf")


@pytest.mark.parametrize(
    "changes",
    [
        [column("k", [3, 3], pa.int32())],
        [column("latency", [1.0, 2.0], pa.float32())],
        [column("k", [3, 3], pa.uint8())],
    ],
)
def test_other_widths_of_numbers_are_read(systems, changes):
    path = gemm(systems, "gemm/vllm/1.0", {"m": 1, "k": 3, "latency": 1.0}, {"m": 2, "k": 3, "latency": 2.0})
    table = pq.ParquetFile(path).read()
    for change in changes:
        table = change(table)
    pq.write_table(table, path)
    assert latencies(database(systems).table("gemm_perf")) == {("bfloat16",): [1.0, 2.0]}


@pytest.mark.parametrize("latency", [float("nan"), float("inf"), 0.0, -1.0])
def test_an_impossible_latency_is_corruption(systems, latency):
    path = gemm(systems, "gemm/vllm/1.0", {}, {"m": 2, "latency": latency})
    with pytest.raises(PerfDataCorruptError, match=f"{path}: 1 of 2 rows have an impossible latency, first {latency}"):
        database(systems).table("gemm_perf")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"m": 0}, "1 of 2 rows have m 0"),
        ({"n": -5}, "1 of 2 rows have an impossible n, first -5"),
        ({"k": 2**53 + 1}, "1 of 2 rows have an impossible k, first 9007199254740993"),
        ({"power": -1.0}, "1 of 2 rows have an impossible power, first -1.0 W"),
        ({"power": float("inf")}, "1 of 2 rows have an impossible power, first inf W"),
    ],
)
def test_what_no_measurement_can_have_is_corruption(systems, changes, reason):
    path = gemm(systems, "gemm/vllm/1.0", {"power": 1.0}, {"power": 1.0} | changes)
    with pytest.raises(PerfDataCorruptError, match=f"{path}: {reason}"):
        database(systems).table("gemm_perf")


def test_a_column_that_holds_others_shifts_none(systems):
    path = gemm(systems, "gemm/vllm/1.0", {"m": 1, "latency": 3.0})
    table = pq.ParquetFile(path).read()
    pq.write_table(table.add_column(0, "note", [[{"a": 7, "b": [8.0, 9.0]}]]), path)
    assert latencies(database(systems).table("gemm_perf")) == {("bfloat16",): [3.0]}


def test_a_column_of_several_values_a_row_provides_no_data(systems):
    path = gemm(systems)
    table = pq.ParquetFile(path).read()
    pq.write_table(table.set_column(table.column_names.index("latency"), "latency", [[[1.0, 2.0]]]), path)
    with pytest.raises(PerfDataNotAvailableError, match=f"{path}: column 'latency' must hold numbers"):
        database(systems).table("gemm_perf")


def test_integers_without_a_sign_bit_do_not_wrap(systems):
    path = gemm(systems, "gemm/vllm/1.0", {"m": 1}, {"m": 2})
    pq.write_table(column("m", [1, 2**63 + 5], pa.uint64())(pq.ParquetFile(path).read()), path)
    with pytest.raises(PerfDataCorruptError, match="impossible m, first 9223372036854775813"):
        database(systems).table("gemm_perf")


def test_a_position_of_no_token_is_corruption(systems):
    path = systems.table("attention/vllm/1.0", "generation_attention_perf", rows(ATTENTION, {"isl": 0, "step": 0}))
    with pytest.raises(PerfDataCorruptError, match=rf"{path}: 1 of 1 rows have isl \+ step 0"):
        database(systems).table("generation_attention_perf")


def test_truth_values_must_not_be_empty(systems):
    path = systems.table("moe/vllm/1.0", "moe_perf", rows(MOE, {"default_eligible": True}, {"default_eligible": None}))
    with pytest.raises(PerfDataNotAvailableError, match=f"{path}: column 'default_eligible' must hold truth values"):
        database(systems).table("moe_perf")


def test_text_that_is_not_utf8_is_corruption(systems):
    path = gemm(systems)
    path.write_bytes(path.read_bytes().replace(b"bfloat16", b"bfloat\xff\xfe"))
    with pytest.raises(PerfDataCorruptError, match=f"{path}: "):
        database(systems).table("gemm_perf")


def test_a_file_with_any_byte_changed_gives_rows_or_a_typed_error(systems):
    path = gemm(systems, "gemm/vllm/1.0", *({"m": m} for m in range(1, 9)))
    content = path.read_bytes()
    for at in range(0, len(content), 5):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :])
        opened = open_database(SystemsRoot(systems.path), "x100", "vllm", "1.0", keep=False)
        with contextlib.suppress(FpmSdkError):
            opened.table("gemm_perf")


SCALE = {"quant_dtype": "fp8", "m": 1, "k": 1}


def test_a_difference_of_timings_may_be_zero(systems):
    systems.table("q/vllm/1.0", "computescale_perf", [SCALE | {"latency": 0.0}])
    assert latencies(database(systems).table("computescale_perf")) == {("fp8",): [0.0]}


def test_a_difference_of_timings_is_not_negative(systems):
    systems.table("q/vllm/1.0", "computescale_perf", [SCALE | {"latency": -0.1}])
    with pytest.raises(PerfDataCorruptError, match="impossible latency"):
        database(systems).table("computescale_perf")


def test_an_impossible_latency_in_a_row_that_does_not_count_does_no_harm(systems):
    gemm(systems, "gemm/vllm/1.0", {}, {"gemm_dtype": "awq", "latency": -1.0})
    assert database(systems).table("gemm_perf").rows == 1


def test_several_row_groups_read_as_one_table(systems):
    path = systems.path / "data/x100/gemm/vllm/1.0/gemm_perf.parquet"
    path.parent.mkdir(parents=True)
    dtypes = ["b", "a", "a", "c"]
    table = pa.Table.from_pylist(
        [GEMM | {"gemm_dtype": d, "m": i + 1, "latency": i + 1.0} for i, d in enumerate(dtypes)]
    )
    pq.write_table(table, path, row_group_size=1)
    expected = {("b",): [1.0], ("a",): [2.0, 3.0], ("c",): [4.0]}
    assert latencies(database(systems).table("gemm_perf")) == expected
    assert list(latencies(database(systems).table("gemm_perf"))) == list(expected)


def test_what_is_loaded_outlives_its_files_and_what_is_not_is_missing(systems):
    gemm(systems)
    loaded = database(systems)
    loaded.table("gemm_perf")
    shutil.rmtree(systems.path)
    assert loaded.table("gemm_perf").rows == 1
    with pytest.raises(PerfDataNotAvailableError):
        loaded.table("moe_perf")


def test_what_is_loaded_stays_when_its_file_changes(systems):
    gemm(systems, "gemm/vllm/1.0", {"latency": 1.0})
    loaded = database(systems)
    before = loaded.table("gemm_perf")
    gemm(systems, "gemm/vllm/1.0", {"latency": 9.0})
    assert loaded.table("gemm_perf") is before is database(systems).table("gemm_perf")
    assert latencies(before) == {("bfloat16",): [1.0]}


def replaced(path):
    pq.write_table(pa.Table.from_pylist([GEMM | {"latency": 9.0}]), path)


def rewritten(path):
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    os.utime(path, (1, 1))


@pytest.mark.parametrize(
    ("change", "refused"), [(replaced, True), (lambda path: path.unlink(), True), (rewritten, False), (str, False)]
)
def test_tables_of_two_states_of_the_data_never_come_together(systems, change, refused):
    path = gemm(systems)
    systems.table("moe/vllm/1.0", "moe_perf", [MOE])
    opened = database(systems)
    opened.table("gemm_perf")
    change(path)
    if refused:
        with pytest.raises(PerfDataCorruptError, match=f"{path}: changed or vanished since .* new process"):
            opened.table("moe_perf")
    else:
        assert opened.table("moe_perf").rows == 1


def test_errors_can_be_copied_and_sent_to_another_process(systems):
    path = gemm(systems)
    truncated(path)
    with pytest.raises(PerfDataCorruptError) as caught:
        database(systems).table("gemm_perf")
    for twin in (copy.copy(caught.value), pickle.loads(pickle.dumps(caught.value))):
        assert (str(twin), twin.path) == (str(caught.value), str(path))


def test_loading_allocates_no_python_object_a_row(systems):
    count = 200_000
    values = {name: [value] * count for name, value in GEMM.items()} | {"m": np.arange(1, count + 1)}
    systems.table("gemm/vllm/1.0", "gemm_perf", pa.table(values))
    gc.collect()
    tracemalloc.start()
    before = sys.getallocatedblocks()
    table = database(systems).table("gemm_perf")
    blocks = sys.getallocatedblocks() - before
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert table.rows == count
    assert blocks < count / 10
    # Three axes, latency and rank are 36 bytes a row; the rest is work space.
    assert peak < 400 * count
