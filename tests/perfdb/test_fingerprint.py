"""Fingerprint: everything resolution can see changes it, nothing else does."""

import os
import shutil
import sys
import threading

import pytest

from fpmsdk.perfdb import fingerprint as module
from fpmsdk.perfdb import open_root
from fpmsdk.perfdb.fingerprint import fingerprint, measure_fingerprint
from fpmsdk.perfdb.roots import SystemsRoot


@pytest.fixture
def data(systems, monkeypatch):
    monkeypatch.setattr(module, "_known", {})
    systems.hardware("y200", data_dir="data/y200")
    systems.text("query_versions.yaml", "defaults: {}")
    systems.text("data/x100/gemm/vllm/1.0/gemm_perf.parquet", "rows")
    systems.text("data/x100/gemm/vllm/1.0/reuse.yaml", "reuse: []")
    systems.text("data/y200/gemm/vllm/1.0/gemm_perf.parquet", "other rows")
    return systems


def digest(systems, external=None):
    return measure_fingerprint(SystemsRoot(systems.path), "x100", external).digest


CHANGES = {
    "table content": lambda root: (root / "data/x100/gemm/vllm/1.0/gemm_perf.parquet").write_text("rowz"),
    "sidecar content": lambda root: (root / "data/x100/gemm/vllm/1.0/reuse.yaml").write_text("reuse: [] "),
    "top-level content": lambda root: (root / "query_versions.yaml").write_text("defaults:  {}"),
    "file removed": lambda root: (root / "data/x100/gemm/vllm/1.0/reuse.yaml").unlink(),
    "file added": lambda root: (root / "data/x100/gemm/vllm/1.0/new").touch(),
    "empty version directory": lambda root: (root / "data/x100/gemm/vllm/2.0").mkdir(),
    "data dir gone": lambda root: shutil.rmtree(root / "data/x100"),
    "dangling link": lambda root: (root / "data/x100/gemm/vllm/1.0/link").symlink_to("nowhere"),
    "file renamed": lambda root: (root / "data/x100/gemm").rename(root / "data/x100/gemn"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_resolution_sees_changes_the_digest(data, change):
    before = digest(data)
    CHANGES[change](data.path)
    assert digest(data) != before


def non_utf8(root):
    if sys.platform == "linux":  # other file systems refuse such names
        open(os.fsencode(root / "data/x100/gemm") + b"/\xff\xfe", "wb").close()


UNSEEN = {
    "another system's data": lambda root: (root / "data/y200/gemm/vllm/1.0/gemm_perf.parquet").write_text("x"),
    "hidden file": lambda root: (root / "data/x100/gemm/vllm/1.0/.hidden").touch(),
    "hidden directory": lambda root: (root / "data/x100/.hidden/vllm/1.0").mkdir(parents=True),
    "hidden top-level file": lambda root: (root / ".hidden.yaml").touch(),
    "underscored version": lambda root: (root / "data/x100/gemm/vllm/_2.0").mkdir(),
    "top-level directory": lambda root: (root / "support_matrix").mkdir(),
    "name that is not UTF-8": non_utf8,
    "modification time": lambda root: os.utime(root / "query_versions.yaml", (1, 1)),
}


@pytest.mark.parametrize("change", UNSEEN)
def test_what_resolution_does_not_see_leaves_the_digest(data, change):
    before = digest(data)
    UNSEEN[change](data.path)
    assert digest(data) == before


def test_the_place_of_the_root_does_not_matter(data):
    before = digest(data)
    moved = data.path.rename(data.path.with_name("moved"))
    assert measure_fingerprint(SystemsRoot(moved), "x100").digest == before


def test_entries_are_named_and_described(data):
    (data.path / "data/x100/link").symlink_to("nowhere")
    entries = {entry.name: entry for entry in measure_fingerprint(SystemsRoot(data.path), "x100").entries}
    assert set(entries) == {
        "data",
        "data/gemm",
        "data/gemm/vllm",
        "data/gemm/vllm/1.0",
        "data/gemm/vllm/1.0/gemm_perf.parquet",
        "data/gemm/vllm/1.0/reuse.yaml",
        "data/link",
        "root/query_versions.yaml",
        "root/x100.yaml",
        "root/y200.yaml",
    }
    table = entries["data/gemm/vllm/1.0/gemm_perf.parquet"]
    assert (table.kind, table.size_bytes) == ("file", 4)
    assert (entries["data/link"].kind, entries["data/link"].target) == ("unread", "nowhere")
    assert entries["data/gemm"].kind == "directory"


def test_a_missing_data_dir_is_recorded(data):
    shutil.rmtree(data.path / "data/x100")
    assert ("absent", "data") in [entry[:2] for entry in measure_fingerprint(SystemsRoot(data.path), "x100").entries]


def test_links_are_followed_and_circles_end(data):
    shutil.move(data.path / "data/x100/gemm", data.path / "elsewhere")
    (data.path / "data/x100/gemm").symlink_to(data.path / "elsewhere")
    (data.path / "elsewhere/vllm/circle").symlink_to(data.path / "elsewhere")
    names = [entry.name for entry in measure_fingerprint(SystemsRoot(data.path), "x100").entries]
    assert "data/gemm/vllm/1.0/gemm_perf.parquet" in names
    assert "data/gemm/vllm/circle" in names
    assert max(map(len, names)) < 60


def test_an_external_table_and_its_metadata_are_covered(data, tmp_path):
    table = tmp_path / "fpm.parquet"
    table.write_text("rows")
    seen = {digest(data), digest(data, str(table))}
    (tmp_path / "fpm.metadata.json").write_text("{}")
    seen.add(digest(data, str(table)))
    table.write_text("other")
    seen.add(digest(data, str(table)))
    assert len(seen) == 4


def test_a_process_keeps_what_it_first_saw(data):
    root = open_root(data.path)
    first = fingerprint(root, "x100")
    (data.path / "query_versions.yaml").write_text("changed")
    assert fingerprint(root, "x100") is first
    assert measure_fingerprint(root, "x100").digest != first.digest


def test_concurrent_first_calls_share_one_computation(data, monkeypatch):
    calls = []
    measure = module.measure_fingerprint
    monkeypatch.setattr(module, "measure_fingerprint", lambda *given: calls.append(given) or measure(*given))
    root = open_root(data.path)
    threads = [threading.Thread(target=fingerprint, args=(root, "x100")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
