"""Version slots: aliases, defaults, overrides, the derived next version, and what is refused."""

import pytest

from fpmsdk.errors import PerfDataCorruptError, UnlistedVersionError
from fpmsdk.perfdb import open_root
from fpmsdk.perfdb.versions import newer_than, newest_first

SLOTS = {
    "defaults": {"vllm": {"current": "0.24.0", "previous": "0.20.0"}, "sglang": {"current": "0.5.14"}},
    "overrides": {"old": {"vllm": {"current": "0.14.0"}}},
}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("AIC_ALLOW_UNLISTED_VERSIONS", raising=False)


@pytest.fixture
def governed(systems):
    """x100 holds the current version, its sister y200 a newer one, and `old` has slots of its own."""
    systems.document("query_versions.yaml", SLOTS)
    systems.hardware("y200", data_dir="data/y200")
    systems.hardware("old", data_dir="data/old")
    systems.text("data/x100/gemm/vllm/0.24.0/gemm_perf.parquet")
    systems.text("data/y200/gemm/vllm/0.31.0/gemm_perf.parquet")
    systems.text("data/old/gemm/vllm/0.14.0/gemm_perf.parquet")
    systems.text("data/old/gemm/vllm/0.99.0/gemm_perf.parquet")
    return systems


def resolve(systems, requested, system="x100", backend="vllm", **options):
    return open_root(systems.path).resolve_version(system, backend, requested, **options)


@pytest.mark.parametrize(
    ("requested", "resolved"),
    [
        (None, ("0.24.0", False)),
        ("current", ("0.24.0", False)),
        ("previous", ("0.20.0", False)),
        ("next", ("0.31.0", True)),
        ("0.24.0", ("0.24.0", False)),
        ("0.20.0", ("0.20.0", False)),
        ("0.31.0", ("0.31.0", True)),
    ],
)
def test_a_request_means_a_slot(governed, requested, resolved):
    assert resolve(governed, requested) == resolved


def test_the_next_version_is_not_dirless_where_it_has_a_directory(governed):
    assert resolve(governed, "next", system="y200") == ("0.31.0", False)


def test_an_override_replaces_the_defaults_and_has_no_next(governed):
    assert resolve(governed, None, system="old") == ("0.14.0", False)
    with pytest.raises(UnlistedVersionError, match="vllm on old has no 'next' version; accepted: current = 0.14.0$"):
        resolve(governed, "next", system="old")


def test_directories_of_markers_are_not_a_next_version(governed):
    governed.document("data/y200/gemm/vllm/0.40.0/reuse.yaml", {"reuse": []})
    governed.text("data/y200/gemm/vllm/0.41.0/collection_meta.yaml")
    governed.text("data/y200/gemm/vllm/0.42.0/.hidden")
    governed.text("data/y200/gemm/vllm/dev-build/gemm_perf.parquet")
    assert resolve(governed, "next").version == "0.31.0"


def test_an_alias_without_a_slot_is_refused(governed):
    governed.document("query_versions.yaml", SLOTS | {"defaults": {"vllm": {"current": "0.31.0", "previous": None}}})
    for alias in ("previous", "next"):
        with pytest.raises(UnlistedVersionError, match=alias):
            resolve(governed, alias, system="y200")


def test_an_unlisted_version_is_refused_with_the_accepted_ones(governed):
    expected = "current = 0.24.0, previous = 0.20.0, next = 0.31.0"
    with pytest.raises(UnlistedVersionError, match=f"'9.9.9' of vllm on x100.*{expected}"):
        resolve(governed, "9.9.9")


def test_an_explicit_flag_admits_an_unlisted_version(governed):
    assert resolve(governed, "9.9.9", allow_unlisted=True) == ("9.9.9", False)


@pytest.mark.parametrize(("value", "admitted"), [("1", True), ("TRUE", True), ("yes", True), ("0", False), ("", False)])
def test_the_environment_admits_an_unlisted_version(governed, monkeypatch, value, admitted):
    monkeypatch.setenv("AIC_ALLOW_UNLISTED_VERSIONS", value)
    if admitted:
        assert resolve(governed, "9.9.9").version == "9.9.9"
    else:
        with pytest.raises(UnlistedVersionError):
            resolve(governed, "9.9.9")


@pytest.mark.parametrize(
    "case",
    ["no slots file", "no entry for the backend", "no directory of the backend"],
)
def test_without_slots_a_version_is_used_as_it_is(systems, case):
    if case != "no slots file":
        systems.document("query_versions.yaml", SLOTS)
    systems.text("data/x100/gemm/vllm/0.24.0/gemm_perf.parquet")
    backend = {"no slots file": "vllm", "no entry for the backend": "trtllm", "no directory of the backend": "sglang"}[
        case
    ]
    assert resolve(systems, "made.up", backend=backend) == ("made.up", False)
    with pytest.raises(UnlistedVersionError, match="'current' has no meaning"):
        resolve(systems, "current", backend=backend)


def test_without_slots_an_omitted_version_is_the_newest_measured_one(systems):
    for version in ("0.9.0", "0.24.0", "dev"):
        systems.text(f"data/x100/gemm/vllm/{version}/gemm_perf.parquet")
    systems.text("data/x100/gemm/vllm/0.30.0/INCOMPLETE.txt")
    assert resolve(systems, None) == ("0.24.0", False)
    assert resolve(systems, None, backend="sglang") == (None, False)


@pytest.mark.parametrize("slot", ["current: 0.30", "previous: 0.30", "current: [1]", "current: 2026-01-01"])
def test_a_version_that_is_no_text_is_corruption(governed, slot):
    # 0.30 without quotes reads as 0.3.
    governed.text("query_versions.yaml", f"defaults: {{vllm: {{{slot}}}}}")
    with pytest.raises(PerfDataCorruptError, match=r"query_versions\.yaml: .* of vllm must be text; put .* in quotes"):
        resolve(governed, None)


@pytest.mark.parametrize("content", ["defaults: [", "defaults: 5", "defaults: {vllm: text}"])
def test_a_broken_slots_file_is_corruption(governed, content):
    governed.text("query_versions.yaml", content)
    with pytest.raises(PerfDataCorruptError, match=r"query_versions\.yaml"):
        resolve(governed, None)


def test_versions_order_as_pep_440_and_unparseable_ones_come_last():
    assert newest_first(["1.3.0rc9", "dev-b", "1.3.0", "dev-c", "1.3.0rc10", "1.3.0.post1"]) == [
        "1.3.0.post1",
        "1.3.0",
        "1.3.0rc10",
        "1.3.0rc9",
        "dev-c",
        "dev-b",
    ]


@pytest.mark.parametrize(
    ("candidates", "newest"),
    [(["1.3.0rc20", "1.3.0rc9"], None), (["1.3.0rc23", "1.3.0rc21", "dev"], "1.3.0rc23"), ([], None)],
)
def test_the_next_version_is_strictly_newer(candidates, newest):
    assert newer_than("1.3.0rc20", candidates) == newest
