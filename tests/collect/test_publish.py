import errno
import hashlib
import json
import statistics
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fpmsdk import sample
from fpmsdk.collect.artifact import validate_native
from fpmsdk.collect.commit import rows_digest, validate_commit
from fpmsdk.collect.plan import CollectionPlan, plan_digest
from fpmsdk.collect.publish import is_measured_version, publish_cells
from fpmsdk.collect.rows import DENSE_REGIME, attempt_rows, cell_rows, kv_seed_regime
from fpmsdk.documents.canonical import digest
from fpmsdk.errors import CollectionError, EvidenceError, FpmDataError, OnboardError
from fpmsdk.perfdb.forward_cells import open_forward_table
from fpmsdk.perfdb.forward_median import median_pair
from tests.collect.native import (
    DECODE,
    PLAN,
    PREFILL,
    REAL_KV,
    RECORDED,
    artifact,
    cell_of,
    point,
    recorded,
    recorded_attempt,
    write,
)

GOLDEN = json.loads((RECORDED / "published.json").read_text())


def launched_rows(folder, run):
    return {
        cell.cell_id: attempt_rows(
            PLAN, cell, recorded(folder, cell, run), attempt_id=recorded_attempt(cell.workload_kind, run)
        )
        for cell in PLAN.cells
    }


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """Rows of the three recorded launches."""
    return {run: launched_rows(tmp_path_factory.mktemp(f"run{run}"), run) for run in (1, 2, 3)}


@pytest.fixture
def published(tmp_path, launches):
    return publish_cells(PLAN, launches[1], systems_data=tmp_path / "data")


def files(published):
    return published.parquet.read_bytes(), published.sidecar.read_bytes()


@pytest.mark.parametrize("run", [1, 2, 3])
def test_the_recorded_launches_are_published_as_the_peer_publishes_them(tmp_path, launches, run):
    found = publish_cells(PLAN, launches[run], systems_data=tmp_path)
    golden = GOLDEN[str(run)]
    commit = validate_commit(PLAN, found.parquet, found.sidecar)
    assert (found.row_count, found.skipped_cells, commit.cell_rows) == (golden["rows"], (), golden["cell_rows"])
    sidecar = {name: value for name, value in commit.sidecar.items() if name != "parquet_sha256"}
    assert digest(sidecar) == golden["sidecar_sha256_without_parquet"]
    assert found.parquet == tmp_path / "h200_sxm" / "vllm" / "0.31.0" / "fpm_forward_perf.parquet"


@pytest.mark.skipif(pa.__version__ != "26.0.1", reason="the bytes of a Parquet file depend on who wrote it")
def test_and_byte_by_byte_with_the_same_parquet_library(published):
    found = [hashlib.sha256(content).hexdigest() for content in files(published)]
    assert found == [GOLDEN["1"]["parquet_sha256"], GOLDEN["1"]["sidecar_sha256"]]


def test_the_median_of_three_launches_is_the_pair_of_the_package(tmp_path, launches):
    pairs = [str(publish_cells(PLAN, rows, systems_data=tmp_path / str(run)).parquet) for run, rows in launches.items()]
    found = median_pair(str(tmp_path / "median.parquet"), pairs)
    assert (found.num_rows, found.dropped_cells) == (217, ())

    def latencies(path):
        names = ("workload_kind", "batch_size", "total_prefill_tokens", "total_kv_read_tokens")
        return {tuple(row[name] for name in names): row["latency_ms"] for row in pq.read_table(path).to_pylist()}

    assert latencies(found.path) == latencies(sample.forward_pair())
    table = open_forward_table(found.path, "h200_sxm", "vllm", "0.31.0")
    assert [(len(cell.prefill), len(cell.decode), cell.kept_fake_rows) for cell in table.cells] == [(162, 55, 0)]
    row = pq.read_table(found.path).to_pylist()[0]
    assert (row["measurement_policy"], row["measurement_repeats"]) == ("kvwarm_median_of_3", 3)
    assert row["latency_ms"] == statistics.median(rows[DECODE.cell_id][0]["latency_ms"] for rows in launches.values())


def other_grid(rows):
    return {cell: some[1:] for cell, some in rows.items()}


def other_precision(rows):
    return {cell: [row | {"parallel_strategy": "tp"} for row in some] for cell, some in rows.items()}


@pytest.mark.parametrize(
    ("third", "message"),
    [
        (lambda launches: other_grid(launches[3]), "2 points are not in both this pair and"),
        (lambda launches: other_precision(launches[3]), "parallel_strategy differs from"),
        (lambda launches: launches[1], "must tell the launches apart"),
    ],
)
def test_a_median_needs_three_launches_of_one_measurement(tmp_path, launches, third, message):
    tables = [launches[1], launches[2], third(launches)]
    pairs = [str(publish_cells(PLAN, rows, systems_data=tmp_path / str(at)).parquet) for at, rows in enumerate(tables)]
    with pytest.raises(FpmDataError, match=message):
        median_pair(str(tmp_path / "median.parquet"), pairs)
    assert not (tmp_path / "median.parquet").exists()


def test_the_first_publisher_of_a_cell_wins(tmp_path, launches, published):
    before = files(published)
    again = publish_cells(PLAN, launches[1], systems_data=tmp_path / "data")
    assert (again.row_count, again.skipped_cells, files(published)) == (217, (), before)
    other = publish_cells(PLAN, launches[2], systems_data=tmp_path / "data")
    assert (other.skipped_cells, files(published)) == (tuple(sorted((PREFILL.cell_id, DECODE.cell_id))), before)


def test_cells_that_are_new_are_added_beside_those_that_are_published(tmp_path, launches):
    first = publish_cells(PLAN, {PREFILL.cell_id: launches[1][PREFILL.cell_id]}, systems_data=tmp_path)
    with pytest.raises(CollectionError, match=f"{DECODE.cell_id}: not published"):
        validate_commit(PLAN, first.parquet, first.sidecar)
    assert validate_commit(PLAN, first.parquet, first.sidecar, cells=[PREFILL]).cell_rows
    both = publish_cells(PLAN, launches[2], systems_data=tmp_path)
    assert (both.row_count, both.skipped_cells) == (217, (PREFILL.cell_id,))
    digests = validate_commit(PLAN, both.parquet, both.sidecar).cell_rows
    assert digests == {
        PREFILL.cell_id: GOLDEN["1"]["cell_rows"][PREFILL.cell_id],
        DECODE.cell_id: GOLDEN["2"]["cell_rows"][DECODE.cell_id],
    }


def changed(rows, **fields):
    cells = {cell: [dict(row) for row in some] for cell, some in rows.items()}
    cells[PREFILL.cell_id][0] |= fields
    return cells


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (lambda rows: {}, "no rows to publish"),
        (lambda rows: changed(rows, latency_ms=1.5), "conflicting FPM database row.*differs in latency_ms"),
        (lambda rows: changed(rows, backend_version="0.32.0"), r"one backend_version, found \['0.31.0', '0.32.0'\]"),
        (lambda rows: changed(rows, runtime_run_id="other"), "rows of two runs"),
        (lambda rows: changed(rows, runtime_grid_digest=None), "runtime_grid_digest must be text, found None"),
        (lambda rows: changed(rows, cell_id=""), "a row has no cell_id"),
    ],
)
def test_rows_that_contradict_each_other_or_the_pair_change_nothing(tmp_path, launches, published, rows, message):
    before = files(published)
    with pytest.raises(CollectionError, match=message):
        publish_cells(PLAN, rows(launches[1]), systems_data=tmp_path / "data")
    assert files(published) == before


@pytest.mark.parametrize("label", ["a b", "a/b", "a\\b", "..", ".", "a\0", "a\tb"])
def test_a_label_that_cannot_name_a_folder_is_refused(tmp_path, launches, label):
    rows = {DECODE.cell_id: [row | {"backend_version": label} for row in launches[1][DECODE.cell_id]]}
    with pytest.raises(CollectionError, match="cannot name a folder"):
        publish_cells(PLAN, rows, systems_data=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_pair_is_not_built_upon(tmp_path, launches, published):
    published.parquet.write_bytes(published.parquet.read_bytes() + b"\n")
    with pytest.raises(CollectionError, match="cannot be built upon: .*digest mismatch"):
        publish_cells(PLAN, launches[2], systems_data=tmp_path / "data")
    published.sidecar.unlink()
    with pytest.raises(CollectionError, match="cannot be built upon: .*sidecar is missing"):
        publish_cells(PLAN, launches[2], systems_data=tmp_path / "data")


def test_rows_without_a_value_are_sorted_and_published(tmp_path, launches):
    rows = [row | {"moe_quant_mode": None, "comm_quant_mode": None} for row in launches[1][DECODE.cell_id]]
    found = publish_cells(PLAN, {DECODE.cell_id: rows}, systems_data=tmp_path)
    assert pq.read_schema(found.parquet).field("moe_quant_mode").type == pa.string()
    assert publish_cells(PLAN, {DECODE.cell_id: rows}, systems_data=tmp_path).row_count == 55


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({}, False),
        ({"gemm/vllm/0.31.0/gemm_perf.parquet": ""}, True),
        ({"gemm/vllm/0.31.0/reuse.yaml": ""}, False),
        ({".hidden/vllm/0.31.0/gemm_perf.parquet": ""}, False),
        ({"gemm/vllm/0.31.0/.gemm_perf.parquet": ""}, False),
        ({"gemm/vllm/0.31.0/gemm_perf.parquet": "", "gemm/vllm/0.31.0/INCOMPLETE.txt": ""}, False),
        (
            {
                "gemm/vllm/0.31.0/gemm_perf.parquet": "",
                "gemm/vllm/0.31.0/collection_meta.yaml": "tables: {gemm: {status: partial}}",
            },
            False,
        ),
        ({"gemm/vllm/0.31.0/a.parquet": "", "gemm/vllm/0.31.0/collection_meta.yaml": "tables: ["}, False),
        (
            {
                "gemm/vllm/0.31.0/a.parquet": "",
                "gemm/vllm/0.31.0/collection_meta.yaml": "tables: {gemm: {status: complete}}",
            },
            True,
        ),
        ({"gemm/vllm/0.30.0/gemm_perf.parquet": ""}, False),
    ],
)
def test_only_versions_with_operator_tables_may_appear_in_a_curated_root(tmp_path, launches, tree, expected):
    for name, content in tree.items():
        path = tmp_path / "h200_sxm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert is_measured_version(tmp_path, "h200_sxm", "vllm", "0.31.0") is expected
    if expected:
        assert publish_cells(PLAN, launches[1], systems_data=tmp_path, is_curated=True).row_count == 217
    else:
        with pytest.raises(OnboardError, match="no operator table of vllm 0.31.0"):
            publish_cells(PLAN, launches[1], systems_data=tmp_path, is_curated=True)


# --- commit ---


def rewritten(published, **changes):
    """The sidecar with other values."""
    document = json.loads(published.sidecar.read_bytes()) | changes
    published.sidecar.write_text(json.dumps({name: value for name, value in document.items() if value is not ...}))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"schema_version": 6}, CollectionError, "historical schema-6 FPM publication"),
        ({"schema_version": 8}, CollectionError, "schema_version must be 7, found 8"),
        ({"system": "gb200"}, CollectionError, "system must be 'h200_sxm', found 'gb200'"),
        ({"backend": "trtllm"}, CollectionError, "backend must be 'vllm'"),
        ({"parquet_sha256": "0" * 64}, EvidenceError, "digest mismatch"),
        ({"row_count": 216}, CollectionError, "row_count says 216, the table has 217 rows"),
        ({"row_count": True}, CollectionError, "row_count says True"),
        ({"kv_seed_classification": ...}, CollectionError, r"names \[\], the rows show \['fpm-2d636e"),
        ({"kv_seed_classification": {"policy": "x", "cells": ["a"]}}, CollectionError, "must be policy dense_full"),
        ({"backend_version": "0.32.0"}, CollectionError, "backend_version must be '0.32.0' as planned"),
    ],
)
def test_a_sidecar_must_be_of_this_plan_and_of_this_table(published, changes, error, message):
    rewritten(published, **changes)
    with pytest.raises(error, match=message):
        validate_commit(PLAN, published.parquet, published.sidecar)


def test_a_missing_file_of_a_pair_is_missing_evidence(published):
    published.sidecar.unlink()
    with pytest.raises(EvidenceError, match="metadata.json: what was published is missing"):
        validate_commit(PLAN, published.parquet, published.sidecar)


ATTEMPTS = {cell.cell_id: recorded_attempt(cell.workload_kind, 1) for cell in PLAN.cells}


def test_a_finished_checkpoint_names_attempts_and_seals_rows(published):
    sealed = GOLDEN["1"]["cell_rows"]
    commit = validate_commit(PLAN, published.parquet, published.sidecar, attempt_ids=ATTEMPTS, cell_rows=sealed)
    assert commit.cell_rows == sealed
    with pytest.raises(CollectionError, match="seals no rows; validate the raw artifacts again"):
        validate_commit(PLAN, published.parquet, published.sidecar, attempt_ids=ATTEMPTS)
    with pytest.raises(EvidenceError, match="differ from those of the checkpoint"):
        validate_commit(
            PLAN, published.parquet, published.sidecar, attempt_ids=ATTEMPTS, cell_rows=GOLDEN["2"]["cell_rows"]
        )
    others = ATTEMPTS | {DECODE.cell_id: "b" * 32}
    with pytest.raises(CollectionError, match="published by attempt 6431"):
        validate_commit(PLAN, published.parquet, published.sidecar, attempt_ids=others, cell_rows=sealed)
    reused = [DECODE.cell_id]
    assert validate_commit(
        PLAN, published.parquet, published.sidecar, attempt_ids=others, cell_rows=sealed, reused_cells=reused
    ).cell_rows
    with pytest.raises(CollectionError, match="reused cells fpm-other are not in the plan"):
        validate_commit(PLAN, published.parquet, published.sidecar, reused_cells=["fpm-other"])


def plan_with(**changes):
    """The recorded plan with other values, and the digest of these."""
    document = json.loads(json.dumps(PLAN.document)) | changes
    return CollectionPlan.from_document(document | {"sha256": plan_digest(document)})


def test_another_plan_may_only_reuse_cells(published):
    other = plan_with(aic_revision="another")
    with pytest.raises(CollectionError, match="published by another plan, b9c93944"):
        validate_commit(other, published.parquet, published.sidecar)
    reused = [cell.cell_id for cell in PLAN.cells]
    assert validate_commit(other, published.parquet, published.sidecar, reused_cells=reused).cell_rows
    with pytest.raises(CollectionError, match="model_path must be 'another/model' as planned"):
        validate_commit(plan_with(model_path="another/model"), published.parquet, published.sidecar)


@pytest.mark.parametrize(("kv", "is_published"), [(7552, True), (7553, False)])
def test_reused_cells_must_cover_explicit_points(published, kv, is_published):
    asked = [{"batch_size": 4, "total_prefill_tokens": 512, "total_kv_read_tokens": kv}]
    payload = {"schema_version": 1, "prefill": asked, "decode": []}
    options = PLAN.options | {"benchmark_points": {"payload": payload, "sha256": digest(payload)}}
    other, reused = plan_with(options=options), [cell.cell_id for cell in PLAN.cells]
    if is_published:
        assert validate_commit(other, published.parquet, published.sidecar, reused_cells=reused).cell_rows
        return
    with pytest.raises(CollectionError, match=r"1 requested points are not published, \[\[4, 512, 7553\]\] among them"):
        validate_commit(other, published.parquet, published.sidecar, reused_cells=reused)


def test_the_digest_of_rows_is_that_of_their_sorted_canonical_lines():
    assert rows_digest([{"b": 1, "a": None}, {"a": 2.5}]) == hashlib.sha256(b'{"a":2.5}\n{"a":null,"b":1}').hexdigest()


# --- KV regimes ---


@pytest.mark.parametrize(
    ("phase", "kv", "reasons", "kvwarm", "expected"),
    [
        ("prefill", 64, ["prefill_real_seed"], None, "n/a"),
        ("decode", 64, [], None, "legacy"),
        ("decode", 64, [], {"skip_reason": "moe_tp_balanced_by_construction"}, "skip:moe_tp_balanced_by_construction"),
        ("decode", 64, ["kvwarm_real_kv"], {"skip_reason": None}, "real_kv"),
        ("decode", 64, ["kvwarm_fake_fallback"], {"skip_reason": None}, "fake_fallback"),
        ("decode", 64, ["kvwarm_fake_fallback"], {"skip_reason": "dense_model_content_insensitive"}, "fake_fallback"),
        ("decode", 64, [], {"skip_reason": "flag_off"}, "fake_fallback"),
        ("decode", 64, [], {"skip_reason": None}, "legacy"),
    ],
)
def test_the_table_says_what_kv_a_point_read(phase, kv, reasons, kvwarm, expected):
    found = kv_seed_regime(
        cell_of(phase, "single"), point(1, phase, 1, 8 if phase == "prefill" else 0, kv, reasons), kvwarm
    )
    assert found == expected


def test_real_kv_under_a_skipped_warm_up_is_refused():
    with pytest.raises(CollectionError, match="reports real KV although the warm-up was skipped"):
        kv_seed_regime(DECODE, point(7, "decode", 1, 0, 4, ["kvwarm_real_kv"]), {"skip_reason": "flag_off"})


def engine(path, value):
    def change(document):
        *folders, name = path.split(".")
        inside = document
        for folder in folders:
            inside = inside[int(folder) if folder.isdigit() else folder]
        if value is ...:
            del inside[name]
        else:
            inside[name] = value

    return change


def regimes(tmp_path, change=None, plan=PLAN, **options):
    rows = cell_rows(
        plan, DECODE, validate_native(None, DECODE, recorded(tmp_path, DECODE, 1, change) / "raw"), tmp_path, **options
    )
    return {row["kv_seed_regime"] for row in rows}


def test_synthetic_kv_of_a_dense_model_counts_as_real(tmp_path):
    assert regimes(tmp_path) == {DENSE_REGIME}
    assert regimes(tmp_path, is_dense_policy_on=False) == {"fake_fallback"}


GROUP = "engine.kv_cache.groups.0"
UNIFORM = {"type": "UniformTypeKVCacheSpecs", "specs": []}


@pytest.mark.parametrize(
    "change",
    [
        engine("kvwarm.enabled", False),
        engine("kvwarm.skip_reason", "flag_off"),
        engine("engine", ...),
        engine("engine.capture_error", "boom"),
        engine("engine.model.model_type", "llama"),
        engine("engine.model.architectures", ["LlamaForCausalLM"]),
        engine("engine.model.model", "another/model"),
        engine("engine.parallel.tensor_parallel_size", 2),
        engine("engine.parallel.decode_context_parallel_size", True),
        engine("engine.parallel.enable_expert_parallel", ...),
        engine("engine.parallel.data_parallel_rank", 1),
        engine("engine.versions.vllm", "0.32.0"),
        engine("engine.kv_cache.groups", []),
        engine(f"{GROUP}.type", "SlidingWindowSpec"),
        engine(f"{GROUP}.sliding_window", 128),
        engine(f"{GROUP}.sliding_window", ...),
        engine(f"{GROUP}.attention_chunk_size", 64),
        engine(f"{GROUP}.non_causal", True),
        engine(f"{GROUP}.specs", []),
        engine("engine.kv_cache.groups", [UNIFORM]),
        engine("engine.kv_cache.groups", [UNIFORM | {"specs": [{"type": "MambaSpec"}]}]),
    ],
)
def test_unless_the_engine_does_not_confirm_it(tmp_path, change):
    assert regimes(tmp_path, change) == {"fake_fallback"}


def test_a_uniform_group_of_full_attention_is_full_attention(tmp_path):
    def wraps(document):
        cache = document["engine"]["kv_cache"]
        cache["groups"] = [UNIFORM | {"specs": cache["groups"]}]

    assert regimes(tmp_path, wraps) == {DENSE_REGIME}


def config_with(**fields):
    payload = PLAN.capability["model_config"]["payload"] | fields
    return {"model_config": PLAN.capability["model_config"] | {"payload": payload}}


@pytest.mark.parametrize(
    "changes",
    [
        {"is_moe": True},
        {"attention_source": "mla"},
        {"model_config": None},
        config_with(num_experts=8),
        config_with(text_config={"n_routed_experts": 4}),
        config_with(model_type=""),
        config_with(architectures=[]),
    ],
)
def test_unless_the_configuration_does_not(tmp_path, changes):
    plan = plan_with(capability=PLAN.capability | changes)
    assert regimes(tmp_path, plan=plan) == {"fake_fallback"}


# --- rows ---


def test_the_latency_is_that_of_the_slowest_rank(tmp_path):
    cell = cell_of("decode", "dep", dp=2, moe_ep=2)
    points = [point(1, "decode", 1, 0, 16, ["kvwarm_real_kv"])]
    files = artifact(points, ["real_kv"], 2, REAL_KV, wall_s=lambda number, rank: (0.002, 0.003)[rank])
    (row,) = cell_rows(PLAN, cell, validate_native(PLAN, cell, write(tmp_path, cell, files)), tmp_path)
    assert (row["latency_ms"], row["kv_seed_regime"], row["dp"]) == (3.0, "real_kv", 2)


def test_another_runtime_than_planned_is_refused(tmp_path):
    plan = plan_with(runtime_backend_version="0.27.0")
    with pytest.raises(CollectionError, match="vLLM 0.31.0 was observed, 0.27.0 was planned"):
        regimes(tmp_path, plan=plan)


def test_a_cache_layout_without_a_template_needs_real_prefixes(tmp_path):
    plan = plan_with(capability=PLAN.capability | {"template_id": "generic:native_runtime"})
    raw = recorded(tmp_path, PREFILL, 1) / "raw"
    assert len(cell_rows(plan, PREFILL, validate_native(None, PREFILL, raw), tmp_path)) == 162

    def fakes(document):
        for group in (document["results"], document["iteration_groups"]):
            for row in group:
                if row["point"]["total_kv_read_tokens"]:
                    row["point"]["sample_reasons"] = ["prefill_fake_prefix"]
        for row in document["results"]:
            if row["point"]["total_kv_read_tokens"]:
                row["kv_seed_regime"] = "fake_prefix"

    raw = recorded(tmp_path, PREFILL, 1, fakes) / "raw"
    with pytest.raises(CollectionError, match="was seeded as fake_prefix; .*only with a real prefix"):
        cell_rows(plan, PREFILL, validate_native(None, PREFILL, raw), tmp_path)


def test_expected_markers_are_compared_with_what_the_engine_resolved(tmp_path):
    policy = dict(PREFILL.backend_policy) | {"expected_markers": {"parallel.enable_eplb": "True"}}
    cell = type(PREFILL).from_document(PREFILL.document() | {"backend_policy": policy})
    cell_dir = recorded(tmp_path, PREFILL, 1)

    def rows():
        return attempt_rows(PLAN, cell, cell_dir, attempt_id=recorded_attempt("prefill", 1))

    with pytest.raises(CollectionError, match="no resolved configuration, which backend policy"):
        rows()
    resolved = cell_dir / "raw" / "node0000" / "resolved-config-node0.json"
    resolved.write_text('{"parallel": {"enable_eplb": false}}')
    with pytest.raises(CollectionError, match="parallel.enable_eplb: .*expects 'True', found False"):
        rows()
    resolved.write_text('{"parallel": {"enable_eplb": true}}')
    assert len(rows()) == 162


def test_a_full_disk_leaves_the_pair_as_it_was(tmp_path, launches, published, monkeypatch):
    before = files(published)
    rows = {
        DECODE.cell_id: [row | {"cell_id": "fpm-other", "model_path": "other"} for row in launches[1][DECODE.cell_id]]
    }

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        publish_cells(PLAN, rows, systems_data=tmp_path / "data")
    left = {path.name for path in published.parquet.parent.iterdir()}
    assert files(published) == before
    assert left == {published.parquet.name, published.sidecar.name, ".fpm_forward_perf.lock"}


def test_two_publishers_at_once_both_publish(tmp_path, launches):
    def publishes(cell):
        publish_cells(PLAN, {cell.cell_id: launches[1][cell.cell_id]}, systems_data=tmp_path)

    threads = [threading.Thread(target=publishes, args=(cell,)) for cell in PLAN.cells]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    folder = tmp_path / "h200_sxm" / "vllm" / "0.31.0"
    commit = validate_commit(PLAN, folder / "fpm_forward_perf.parquet", folder / "fpm_forward_perf.metadata.json")
    assert commit.cell_rows == GOLDEN["1"]["cell_rows"]
