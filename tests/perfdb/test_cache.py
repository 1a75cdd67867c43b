"""The compiled-table cache: found by content, ignored when stale or damaged, safe to write together, never needed."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fpmsdk.perfdb import cache, compiled, database, open_database, roots
from tests.perfdb.synthetic import GEMM, rows


@pytest.fixture
def gemm(systems):
    systems.table("gemm/vllm/1.0", "gemm_perf", rows(GEMM, {"m": 1, "latency": 1.0}, {"m": 2, "latency": 2.0}))
    return systems


def fresh(monkeypatch, systems, system="x100"):
    """The gemm table, as a new process would load it."""
    monkeypatch.setattr(roots, "_roots", {})
    monkeypatch.setattr(database, "_databases", {})
    return open_database(systems.path, system, "vllm", "1.0").table("gemm_perf")


def forbid_decoding(monkeypatch):
    def decode(*_):
        raise AssertionError("decoded a Parquet file")

    monkeypatch.setattr(database, "read_rows", decode)


def tables(own_cache):
    return sorted((own_cache / "perfdb").glob("table-*"))


def test_the_second_load_decodes_nothing_and_is_the_same(gemm, monkeypatch):
    first = fresh(monkeypatch, gemm)
    forbid_decoding(monkeypatch)
    second = fresh(monkeypatch, gemm)
    assert second is not first
    assert list(second.slices) == list(first.slices)
    assert second.sources == first.sources
    for key in first.slices:
        for one, other in zip(first.slices[key], second.slices[key], strict=True):
            for a, b in zip(*(part if isinstance(part, tuple) else (part,) for part in (one, other)), strict=True):
                assert a.dtype == b.dtype
                assert a.tobytes() == b.tobytes()
                assert not b.flags.writeable


def test_power_survives(systems, monkeypatch):
    systems.table("gemm/vllm/1.0", "gemm_perf", rows(GEMM, {"power": 250.0}))
    fresh(monkeypatch, systems)
    forbid_decoding(monkeypatch)
    assert fresh(monkeypatch, systems).slices["bfloat16",].power_w.tolist() == [250.0]


def test_changed_content_is_loaded_anew(gemm, monkeypatch):
    fresh(monkeypatch, gemm)
    gemm.table("gemm/vllm/1.0", "gemm_perf", rows(GEMM, {"m": 1, "latency": 9.0}))
    assert fresh(monkeypatch, gemm).slices["bfloat16",].latency_ms.tolist() == [9.0]


def test_an_added_source_is_loaded_anew(gemm, monkeypatch):
    fresh(monkeypatch, gemm)
    gemm.table("gemm/vllm/0.9", "gemm_perf", rows(GEMM, {"m": 4, "latency": 4.0}))
    assert fresh(monkeypatch, gemm).rows == 3


def test_the_same_content_elsewhere_is_found(gemm, monkeypatch):
    fresh(monkeypatch, gemm)
    forbid_decoding(monkeypatch)
    moved = type(gemm)(gemm.path.rename(gemm.path.with_name("moved")))
    assert fresh(monkeypatch, moved).sources[0].path.startswith(str(moved.path))


def test_a_rule_of_the_system_is_part_of_the_identity(systems, monkeypatch):
    systems.hardware("xpu", gpu={"sm_version": None})
    row = {"num_gpus": 2, "message_size": 1, "kernel_source": "custom_eager", "latency": 1.0}
    systems.table("comm/vllm/1.0", "custom_allreduce_perf", [row, row | {"num_gpus": 4, "kernel_source": "graph"}])
    served = [open_database(systems.path, system, "vllm", "1.0") for system in ("x100", "xpu")]
    assert [opened.table("custom_allreduce_perf").rows for opened in served] == [1, 2]


@pytest.mark.parametrize("at", [0, 9, 17, 64, 80, 200, -1])
def test_a_flipped_byte_is_a_miss(gemm, monkeypatch, own_cache, at):
    expected = fresh(monkeypatch, gemm).slices["bfloat16",].latency_ms.tolist()
    (entry,) = tables(own_cache)
    content = bytearray(entry.read_bytes())
    content[at] ^= 0x40
    entry.write_bytes(content)
    assert cache.load(entry.name) is None
    assert fresh(monkeypatch, gemm).slices["bfloat16",].latency_ms.tolist() == expected
    assert cache.load(entry.name) is not None


@pytest.mark.parametrize("size", [0, 1, 63, 64, 100])
def test_a_shortened_entry_is_a_miss(gemm, monkeypatch, own_cache, size):
    fresh(monkeypatch, gemm)
    (entry,) = tables(own_cache)
    entry.write_bytes(entry.read_bytes()[:size])
    assert cache.load(entry.name) is None
    assert fresh(monkeypatch, gemm).rows == 2


def test_an_entry_in_another_form_is_replaced(gemm, monkeypatch, own_cache):
    fresh(monkeypatch, gemm)
    (entry,) = tables(own_cache)
    for content in (b"", b"\x05\x00\x00\x00\x00\x00\x00\x00wrong"):
        cache.store(entry.name, [content])
        assert fresh(monkeypatch, gemm).rows == 2
        assert compiled.unpack(cache.load(entry.name))[0] == [("bfloat16",)]


def test_entries_of_other_code_are_not_found(monkeypatch, tmp_path):
    old = cache.key("table", b"x")
    package = tmp_path / "perfdb"
    shutil.copytree(Path(cache.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "__file__", str(package / "cache.py"))
    cache._code_digest.cache_clear()
    same = cache.key("table", b"x")
    (package / "tables.py").write_text((package / "tables.py").read_text() + "# edited\n")
    cache._code_digest.cache_clear()
    other = cache.key("table", b"x")
    monkeypatch.undo()
    cache._code_digest.cache_clear()
    assert same == old
    assert other != old


def test_keys_tell_parts_apart():
    assert cache.key("table", b"ab", b"c") != cache.key("table", b"a", b"bc")


def test_without_a_cache_directory_everything_works(gemm, monkeypatch):
    monkeypatch.setattr(cache, "cache_dir", lambda: None)
    assert fresh(monkeypatch, gemm).rows == 2


def test_a_cache_that_cannot_be_written_is_no_fault(gemm, monkeypatch, own_cache):
    (own_cache / "perfdb").write_text("a file where the folder should be")
    assert fresh(monkeypatch, gemm).rows == 2


def test_a_full_disk_leaves_nothing_behind(monkeypatch, own_cache):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    cache.store("table-x", [b"content"])
    assert list((own_cache / "perfdb").iterdir()) == []


def test_concurrent_writers_and_readers_see_whole_entries():
    seen = []

    def work(number):
        for _ in range(50):
            cache.store("table-shared", [bytes([number]) * 10_000])
            seen.append(bytes(cache.load("table-shared")))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 200
    assert all(len(content) == 10_000 and len(set(content)) == 1 for content in seen)


def test_a_mapped_entry_outlives_its_replacement_and_removal(own_cache):
    cache.store("table-x", [b"old" * 1000])
    held = cache.load("table-x")
    cache.store("table-x", [b"new" * 1000])
    (own_cache / "perfdb" / "table-x").unlink()
    assert bytes(held) == b"old" * 1000


def test_the_oldest_entries_go_when_there_is_too_much(monkeypatch, own_cache):
    monkeypatch.setattr(cache, "SIZE_LIMIT_BYTES", 2500)
    folder = own_cache / "perfdb"
    folder.mkdir()
    for age, name in enumerate(["table-new", "table-mid", "table-old"]):
        (folder / name).write_bytes(bytes(1000))
        os.utime(folder / name, (1_000_000 - age, 1_000_000 - age))
    cache.store("table-x", [bytes(400)])
    assert sorted(path.name for path in folder.iterdir()) == ["table-mid", "table-new", "table-x"]


def test_a_warm_start_imports_neither_parquet_nor_yaml(gemm, tmp_path):
    code = f"""
import sys
from fpmsdk.perfdb import open_database
rows = open_database({str(gemm.path)!r}, "x100", "vllm", "1.0").table("gemm_perf").rows
print(rows, *sorted({{"pyarrow", "yaml"}} & set(sys.modules)))
"""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"FPMSDK_CACHE_DIR": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    ]
    assert outputs == [["2", "pyarrow", "yaml"], ["2"]]
