"""The public systems roots, against what the public software makes of them.

`FPMSDK_TEST_SYSTEMS_013` names the root of the aisimulate 0.13 wheel, `FPMSDK_TEST_SYSTEMS_012` that of
aiconfigurator-core 0.12.0.
"""

import math
import os
import warnings

import pytest

from fpmsdk.errors import PerfDataNotAvailableError, UnsupportedAttentionBackendError
from fpmsdk.perfdb import SCHEMAS, lanes, open_database, open_root
from tests.vectors import load_vectors

pytestmark = pytest.mark.peer_data

# The peer has no name of its own for the same rows told apart by kernel; its answers from them are compared as models.
PEER_TABLES = sorted(SCHEMAS.keys() - {"moe_perf_by_kernel"})

PEER = load_vectors("perfdb_peer")
ATTENTION = ("context_attention_perf", "generation_attention_perf")
PLACES = [(release, place) for release in ("0.13", "0.12") for place in PEER[release]["slots"]]


def root_of(release):
    return open_root(os.environ[f"FPMSDK_TEST_SYSTEMS_{release.replace('.', '')}"])


def databases(release, place):
    """Slot and database of every queryable version of one system and backend."""
    root = root_of(release)
    system, backend = place.split("|")
    for slot in PEER[release]["slots"][place]:
        version, tolerate_dirless = root.resolve_version(system, backend, slot)
        yield slot, open_database(root, system, backend, version, tolerate_dirless=tolerate_dirless)


@pytest.fixture(scope="module", autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(("release", "place"), PLACES)
def test_slots_are_those_of_the_peer(release, place):
    assert root_of(release).slots(*place.split("|")).listed() == PEER[release]["slots"][place]


@pytest.mark.parametrize(("release", "place"), PLACES)
def test_sources_are_those_of_the_peer(release, place):
    root = root_of(release)
    system, backend = place.split("|")
    for slot, version in PEER[release]["slots"][place].items():
        for table in PEER_TABLES:
            found = [
                [
                    os.path.relpath(s.path, root.path),
                    s.channel,
                    None if s.kernel_sources is None else sorted(s.kernel_sources),
                ]
                for s in root.sources(system, backend, version, table)
            ]
            assert found == PEER[release]["sources"][f"{place}|{slot}|{table}"], table


@pytest.mark.parametrize(("release", "place"), PLACES)
def test_tables_hold_what_the_peer_loads(release, place):
    for slot, database in databases(release, place):
        for name in PEER_TABLES:
            if name in ATTENTION:
                continue
            expected = PEER[release]["tables"][f"{place}|{slot}|{name}"]
            if expected is None:
                with pytest.raises(PerfDataNotAvailableError):
                    database.table(name)
            else:
                table = database.table(name)
                assert [table.rows, math.fsum(table.arrays.latency_ms.tolist())] == expected, name


@pytest.mark.parametrize(("release", "place"), PLACES)
def test_lanes_hold_what_the_peer_loads(release, place):
    for slot, database in databases(release, place):
        for name in ATTENTION:
            expected = PEER[release]["densities"][f"{place}|{slot}|{name}"]
            table = database.table(name)
            for primary_only, kind in ((False, "all"), (True, "primary")):
                found = lanes.density(table, primary_only=primary_only)
                assert found == {lane: tuple(counts) for lane, counts in expected[kind].items()}


@pytest.mark.parametrize("place", PEER["0.13"]["slots"])
def test_lane_orders_are_those_of_the_peer(place):
    for slot, database in databases("0.13", place):
        for name in ATTENTION:
            for request, expected in PEER["0.13"]["lane_orders"][f"{place}|{slot}|{name}"].items():
                override, architecture = (None if part == "None" else part for part in request.split("|"))
                try:
                    found = list(database.lane_order(name, architecture, override))
                except UnsupportedAttentionBackendError:
                    found = "error"
                assert found == expected, (slot, name, request)


def attention_operators(document):
    if isinstance(document, list):
        for part in document:
            yield from attention_operators(part)
    elif isinstance(document, dict):
        for kind, part in document.items():
            if kind in ("ContextAttention", "GenerationAttention"):
                yield kind, part
            else:
                yield from attention_operators(part)


@pytest.mark.parametrize(
    ("release", "name"),
    [
        (release, name)
        for release, file in (("0.13", "op_level_peer_0.13"), ("0.12", "op_level_peer"))
        for name in load_vectors(file)["engine_specs"]
    ],
)
def test_engine_specs_carry_these_lane_orders(release, name):
    spec = load_vectors("op_level_peer_0.13" if release == "0.13" else "op_level_peer")["engine_specs"][name]
    engine = spec["engine"]
    database = open_database(root_of(release), engine["system_name"], engine["backend"], engine["backend_version"])
    tables = {"ContextAttention": "context_attention_perf", "GenerationAttention": "generation_attention_perf"}
    for kind, operator in attention_operators(spec):
        assert list(database.lane_order(tables[kind])) == operator["lane_order"]


def test_row_counts_of_the_documentation():
    """Figures of op-level.md sections 7 and 8.1 (h200_sxm, current versions, own files)."""
    expected = {
        ("0.12", "vllm", "0.24.0", "gemm_perf"): 107225,
        ("0.12", "trtllm", "1.3.0rc20", "gemm_perf"): 100668,
        ("0.12", "sglang", "0.5.14", "gemm_perf"): 101010,
        ("0.13", "vllm", "0.24.0", "gemm_perf"): 71484,
        ("0.12", "vllm", "0.24.0", "context_attention_perf"): 50830,
        ("0.12", "trtllm", "1.3.0rc20", "context_attention_perf"): 75837,
        ("0.12", "sglang", "0.5.14", "context_attention_perf"): 35090,
        ("0.12", "vllm", "0.24.0", "generation_attention_perf"): 62166,
        ("0.12", "trtllm", "1.3.0rc20", "generation_attention_perf"): 52033,
        ("0.12", "sglang", "0.5.14", "generation_attention_perf"): 40468,
        ("0.12", "sglang", "0.5.14", "context_mla_perf"): 1760,
        ("0.13", "sglang", "0.5.14", "context_mla_perf"): 3080,
        ("0.12", "trtllm", "1.3.0rc20", "mla_context_module_perf"): 3869,
        ("0.12", "trtllm", "1.3.0rc20", "mla_generation_module_perf"): 5888,
        ("0.12", "vllm", "0.24.0", "mla_context_module_perf"): 3886,
    }
    found = {
        case: open_database(root_of(case[0]), "h200_sxm", *case[1:3], enable_shared_layer=False).table(case[3]).rows
        for case in expected
    }
    assert found == expected
