"""Source resolution: channels, their order, what each may take, and faulty metadata."""

import warnings

import pytest

from fpmsdk.errors import PerfDataCorruptError, PerfDataWarning
from fpmsdk.perfdb import open_root
from tests.perfdb.synthetic import REUSE

FILE = "gemm_perf.parquet"


def place(systems, *places, file=FILE):
    for where in places:
        systems.text(f"data/x100/{where}/{file}")


def found(systems, version="0.24.0", backend="vllm", table="gemm_perf", **options):
    data = f"{systems.path}/data/x100/"
    sources = open_root(systems.path).sources("x100", backend, version, table, **options)
    return [(source.channel, source.path.removeprefix(data).rpartition("/")[0]) for source in sources]


def declare(systems, where, *donors, table="gemm_perf"):
    entries = [{"table": table, "from_version": donor} | REUSE for donor in donors]
    systems.document(f"data/x100/{where}/reuse.yaml", {"reuse": entries})


def share(systems, *groups):
    keys = ("op_file", "kernel_source", "tier", "frameworks")
    systems.document("perf_data_reuse_manifest.yaml", {"groups": [dict(zip(keys, g, strict=True)) for g in groups]})


def test_the_primary_lies_in_any_family(systems):
    place(systems, "dense/vllm/0.24.0")
    assert found(systems) == [("primary", "dense/vllm/0.24.0")]


def test_the_first_family_by_name_wins(systems):
    place(systems, "b/vllm/0.24.0", "a/vllm/0.24.0")
    assert found(systems) == [("primary", "a/vllm/0.24.0")]


def test_the_legacy_layout_is_still_read(systems):
    place(systems, "vllm/0.24.0")
    assert found(systems) == [("primary", "vllm/0.24.0")]


def test_a_family_comes_before_the_legacy_layout(systems):
    place(systems, "vllm/0.24.0", "gemm/vllm/0.24.0")
    assert found(systems) == [("primary", "gemm/vllm/0.24.0")]


@pytest.mark.parametrize("where", [".hidden/vllm/0.24.0", "nccl/vllm/0.24.0", "trtllm/vllm/0.24.0"])
def test_hidden_directories_and_backend_names_are_no_families(systems, where):
    place(systems, where)
    assert found(systems) == []


def test_older_versions_of_the_backend_follow_nearest_first(systems):
    place(systems, *(f"gemm/vllm/{v}" for v in ("0.9.0", "0.24.0", "0.24.0rc1", "0.22.0", "0.22.0.post1", "0.10.0")))
    assert [where.rpartition("/")[2] for _, where in found(systems)] == [
        "0.24.0",
        "0.24.0rc1",
        "0.22.0.post1",
        "0.22.0",
        "0.10.0",
        "0.9.0",
    ]
    assert {channel for channel, _ in found(systems)[1:]} == {"fallback"}


@pytest.mark.parametrize("name", ["0.25.0", "dev-abc", "_0.20.0", ".0.20.0"])
def test_newer_unparseable_and_hidden_versions_do_not_fall_back(systems, name):
    place(systems, "gemm/vllm/0.24.0", f"gemm/vllm/{name}")
    assert found(systems) == [("primary", "gemm/vllm/0.24.0")]


def test_an_unparseable_request_has_no_fallback(systems):
    place(systems, "gemm/vllm/dev-abc", "gemm/vllm/0.1.0")
    assert found(systems, "dev-abc") == [("primary", "gemm/vllm/dev-abc")]


def test_rows_may_come_from_older_versions_alone(systems):
    place(systems, "gemm/vllm/0.20.0")
    assert found(systems) == [("fallback", "gemm/vllm/0.20.0")]


def test_an_incomplete_collection_counts_only_with_a_record(systems):
    place(systems, "gemm/vllm/0.24.0", "gemm/vllm/0.23.0")
    systems.text("data/x100/gemm/vllm/0.24.0/INCOMPLETE.txt")
    systems.text("data/x100/gemm/vllm/0.23.0/INCOMPLETE.txt")
    systems.document("data/x100/gemm/vllm/0.23.0/collection_meta.yaml", {"tables": {"gemm_perf": {}}})
    assert found(systems) == [("fallback", "gemm/vllm/0.23.0")]


def test_declared_reuse_comes_before_fallback_and_may_be_newer(systems):
    place(systems, *(f"gemm/vllm/{v}" for v in ("0.24.0", "0.25.0", "0.23.0", "0.22.0", "dev-abc")))
    declare(systems, "gemm/vllm/0.24.0", "0.25.0", "0.22.0", "0.25.0", "dev-abc")
    assert found(systems) == [
        ("primary", "gemm/vllm/0.24.0"),
        ("declared_reuse", "gemm/vllm/0.25.0"),
        ("declared_reuse", "gemm/vllm/0.22.0"),
        ("declared_reuse", "gemm/vllm/dev-abc"),
        ("fallback", "gemm/vllm/0.23.0"),
    ]


def test_reuse_is_declared_for_one_table(systems):
    place(systems, "gemm/vllm/0.24.0", "gemm/vllm/0.25.0")
    declare(systems, "gemm/vllm/0.24.0", "0.25.0", table="moe_perf")
    assert found(systems) == [("primary", "gemm/vllm/0.24.0")]


def test_reuse_may_be_declared_in_another_family_of_the_version(systems):
    place(systems, "gemm/vllm/0.24.0", "gemm/vllm/0.25.0")
    declare(systems, "moe/vllm/0.24.0", "0.25.0")
    assert found(systems)[1:] == [("declared_reuse", "gemm/vllm/0.25.0")]


def test_reuse_declared_by_another_version_does_not_count(systems):
    place(systems, "gemm/vllm/0.24.0", "gemm/vllm/0.23.0", "gemm/vllm/0.25.0")
    declare(systems, "gemm/vllm/0.23.0", "0.25.0")
    assert found(systems) == [("primary", "gemm/vllm/0.24.0"), ("fallback", "gemm/vllm/0.23.0")]


def test_other_backends_follow_by_name_newest_first_with_their_kernels(systems):
    place(systems, "gemm/vllm/0.24.0", "gemm/trtllm/1.0", "gemm/sglang/0.5.2", "gemm/sglang/0.5.14", "gemm/sglang/dev")
    share(
        systems,
        ("gemm_perf.parquet", "deepgemm", "shared", ["vllm", "sglang", "trtllm"]),
        ("gemm_perf.txt", "default", "shared_fallback", ["vllm", "trtllm"]),
        ("gemm_perf.parquet", "hidden", "absence_load_bearing", ["vllm", "trtllm"]),
        ("gemm_perf.parquet", "foreign", "shared", ["sglang", "trtllm"]),
        ("moe_perf.parquet", "other", "shared", ["vllm", "trtllm"]),
    )
    sources = open_root(systems.path).sources("x100", "vllm", "0.24.0", "gemm_perf")
    assert [(source.version, source.kernel_sources) for source in sources[1:]] == [
        ("0.5.14", {"deepgemm"}),
        ("0.5.2", {"deepgemm"}),
        ("dev", {"deepgemm"}),
        ("1.0", {"deepgemm", "default"}),
    ]
    assert {source.channel for source in sources[1:]} == {"cross_backend"}


def test_without_sharing_only_the_primary_counts(systems):
    place(systems, "gemm/vllm/0.24.0", "gemm/vllm/0.23.0", "gemm/vllm/0.25.0", "gemm/sglang/0.5.14")
    declare(systems, "gemm/vllm/0.24.0", "0.25.0")
    share(systems, ("gemm_perf.parquet", "k", "shared", ["vllm", "sglang"]))
    assert found(systems, shared=False) == [("primary", "gemm/vllm/0.24.0")]


def test_collectives_take_older_versions_but_neither_declared_reuse_nor_other_backends(systems):
    file = "custom_allreduce_perf.parquet"
    place(systems, "comm/vllm/0.24.0", "comm/vllm/0.23.0", "comm/vllm/0.25.0", "comm/sglang/0.5.14", file=file)
    declare(systems, "comm/vllm/0.24.0", "0.25.0", table="custom_allreduce_perf")
    share(systems, (file, "k", "shared", ["vllm", "sglang"]))
    assert found(systems, table="custom_allreduce_perf") == [
        ("primary", "comm/vllm/0.24.0"),
        ("fallback", "comm/vllm/0.23.0"),
    ]


def test_library_tables_are_those_of_the_library_version_and_never_shared(systems):
    place(systems, "comm/nccl/2.26.2", "comm/nccl/2.20", file="nccl_perf.parquet")
    place(systems, "comm/oneccl/1.0", file="oneccl_perf.parquet")
    assert found(systems, table="nccl_perf") == [("primary", "comm/nccl/2.26.2")]
    assert found(systems, table="oneccl_perf") == []


def test_the_data_dir_is_joined_as_written(systems):
    systems.hardware(data_dir="../elsewhere/x100/../x100")
    systems.text(f"../elsewhere/x100/gemm/vllm/0.24.0/{FILE}")
    (source,) = open_root(systems.path).sources("x100", "vllm", "0.24.0", "gemm_perf")
    assert source.path == f"{systems.path}/../elsewhere/x100/../x100/gemm/vllm/0.24.0/{FILE}"


MALFORMED = {
    "reuse not YAML": ("reuse.yaml", "reuse: ["),
    "reuse not a list": ("reuse.yaml", "reuse: text"),
    "reuse missing": ("reuse.yaml", "reuses: []"),
    "reuse entry without a reason": ("reuse.yaml", "reuse: [{table: gemm_perf, from_version: '1', approved_by: me}]"),
    "reuse version not a string": ("reuse.yaml", "reuse: [{table: t, from_version: 0.25, reason: r, approved_by: me}]"),
    "reuse entry not a mapping": ("reuse.yaml", "reuse: [text]"),
    "record not YAML": ("collection_meta.yaml", "tables: ["),
    "record tables": ("collection_meta.yaml", "tables: [gemm_perf]"),
    "record entry": ("collection_meta.yaml", "tables: {gemm_perf: text}"),
    "record version": ("collection_meta.yaml", "schema_version: 3"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_metadata_are_an_error_only_under_strict(systems, case):
    name, content = MALFORMED[case]
    place(systems, "gemm/vllm/0.24.0")
    systems.document("data/x100/gemm/vllm/0.24.0/collection_meta.yaml", {"tables": {"gemm_perf": {}}})
    path = systems.text(f"data/x100/gemm/vllm/0.24.0/{name}", content)
    with pytest.warns(PerfDataWarning, match=str(path)):
        assert found(systems) == [("primary", "gemm/vllm/0.24.0")]
    with pytest.raises(PerfDataCorruptError, match=str(path)):
        found(systems, strict=True)


def test_strict_wants_a_record_of_every_primary_and_declared_table(systems):
    place(systems, "gemm/vllm/0.24.0", "gemm/vllm/0.25.0")
    declare(systems, "gemm/vllm/0.24.0", "0.25.0")
    record = {"tables": {"gemm_perf": {"status": "partial"}}}
    with pytest.raises(PerfDataCorruptError, match=r"0\.24\.0/collection_meta\.yaml.*record of table 'gemm_perf'"):
        found(systems, strict=True)
    systems.document("data/x100/gemm/vllm/0.24.0/collection_meta.yaml", record)
    with pytest.raises(PerfDataCorruptError, match=r"0\.25\.0/collection_meta\.yaml"):
        found(systems, strict=True)
    systems.document("data/x100/gemm/vllm/0.25.0/collection_meta.yaml", record)
    assert len(found(systems, strict=True)) == 2


@pytest.mark.parametrize("where", ["gemm/vllm/0.24.0", "vllm/0.24.0"])
def test_strict_accepts_records_and_layouts_older_than_per_table_records(systems, where):
    place(systems, where)
    if where.startswith("gemm"):
        systems.document(f"data/x100/{where}/collection_meta.yaml", {"provenance": "legacy", "tables": {}})
    assert found(systems, strict=True) == [("primary", where)]


def test_strict_does_not_ask_fallback_versions_for_records(systems):
    place(systems, "gemm/vllm/0.23.0")
    assert found(systems, strict=True) == [("fallback", "gemm/vllm/0.23.0")]


@pytest.mark.parametrize(
    "content",
    [
        "groups: [",
        "groups: text",
        "groups: [text]",
        "groups: [{tier: shared, op_file: f, kernel_source: k, frameworks: vllm}]",
        "groups: [{tier: shared, op_file: 5, kernel_source: k, frameworks: [vllm]}]",
    ],
)
def test_a_broken_sharing_manifest_is_corruption(systems, content):
    place(systems, "gemm/vllm/0.24.0")
    systems.text("perf_data_reuse_manifest.yaml", content)
    with pytest.raises(PerfDataCorruptError, match=r"perf_data_reuse_manifest\.yaml"):
        found(systems)


def test_sound_metadata_raise_no_warning(systems):
    place(systems, "gemm/vllm/0.24.0")
    systems.document("data/x100/gemm/vllm/0.24.0/collection_meta.yaml", {"schema_version": 2, "tables": {}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(found(systems)) == 1
