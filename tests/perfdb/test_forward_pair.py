import contextlib
import hashlib
import json
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fpmsdk.errors import FpmDataError, FpmNotCollectedError
from fpmsdk.perfdb.forward_pair import read_pair
from tests.perfdb.pairs import VERSION, decode, prefill, write_pair

ROWS = [prefill(1, 128, 0, 2.5), prefill(1, 256, 0, 3.0), decode(1, 2, 3.0), decode(1, 64, 3.5)]
EXECUTION = {
    "model_config_sha256": "",
    "execution_profile": "full",
    "engram_residency": "none",
    "input_modality": "text",
}


def read(path):
    return read_pair(str(path), "x100", "vllm", VERSION)


def changed(index=0, **changes):
    return [row | (changes if i == index else {}) for i, row in enumerate(ROWS)]


def everywhere(**changes):
    return [row | changes for row in ROWS]


def retyped(name, kind):
    table = pa.Table.from_pylist(ROWS)
    at = table.schema.get_field_index(name)
    return table.set_column(at, name, table.column(name).cast(kind))


def test_rows_keep_their_order_and_values(tmp_path):
    rows = read(write_pair(tmp_path, ROWS))
    assert rows.coordinates.tolist() == [[1, 1, 1, 1], [128, 256, 0, 0], [0, 0, 2, 64]]
    assert rows.latency_ms.tolist() == [2.5, 3.0, 3.0, 3.5]
    assert rows.texts["tp"].of(0) == "1"
    assert rows.texts["enable_eplb"].of(0) == "False"


@pytest.mark.parametrize("encoding", ["dictionary", "plain", "categories"])
def test_row_groups_and_encodings_do_not_matter(tmp_path, encoding):
    # Each row group has a dictionary of its own, and empty values stand in any of them.
    rows = [
        row | {"moe_quant_mode": mode, "tp": tp, "enable_eplb": flag, "kv_seed_regime": regime}
        for row, mode, tp, flag, regime in zip(
            ROWS,
            (None, "fp8", "bfloat16", None),
            (4, None, 2, None),
            (True, False, False, True),
            (None, "n/a", "real_kv", "fake_fallback"),
            strict=True,
        )
    ]
    table = pa.Table.from_pylist(rows)
    if encoding == "categories":
        at = table.schema.get_field_index("moe_quant_mode")
        table = table.set_column(at, "moe_quant_mode", table.column("moe_quant_mode").dictionary_encode())
    path = write_pair(tmp_path, table)
    pq.write_table(table, path, row_group_size=1, use_dictionary=encoding != "plain")
    sidecar = path.with_suffix(".metadata.json")
    document = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps(document | {"parquet_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}))
    found = read(path)
    assert [found.texts["moe_quant_mode"].of(i) for i in range(4)] == ["", "fp8", "bfloat16", ""]
    assert [found.texts["tp"].of(i) for i in range(4)] == ["4", "", "2", ""]
    assert [found.texts["enable_eplb"].of(i) for i in range(4)] == ["True", "False", "False", "True"]
    assert [found.texts["kv_seed_regime"].of(i) for i in range(4)] == ["", "n/a", "real_kv", "fake_fallback"]
    assert found.latency_ms.tolist() == [2.5, 3.0, 3.0, 3.5]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema_name": "other"}, ["schema_name", "other", "aic_fpm_forward_perf"]),
        ({"schema_version": 8}, ["schema_version", "8", "7"]),
        ({"schema_version": True}, ["schema_version", "True"]),
        ({"coordinate_system": "other"}, ["coordinate_system", "other"]),
        ({"measurement_policy": "other"}, ["measurement_policy", "other"]),
        ({"system": "h100"}, ["system", "h100", "x100"]),
        ({"backend": "trtllm"}, ["backend", "trtllm", "vllm"]),
        ({"backend_version": "1.0"}, ["backend_version", "1.0", VERSION]),
        ({"parquet_sha256": "0" * 64}, ["digest mismatch", "0" * 64]),
        ({"parquet_sha256": None}, ["digest mismatch", "None"]),
        ({"row_count": 1}, ["row_count", "1", "4"]),
        ({"row_count": 4.5}, ["row_count", "4.5"]),
        ({"row_count": True}, ["row_count", "True"]),
        ({"row_count": float("nan")}, ["row_count", "nan"]),
        ({"knees": [1]}, ["knees", "total_prefill_tokens"]),
        ({"knees": {"other": [1]}}, ["knees", "other"]),
        ({"knees": {"kv_tokens_per_request": [0]}}, ["knees.kv_tokens_per_request", "positive"]),
        ({"schema_version": 7}, ["missing column", *EXECUTION]),
    ],
)
def test_every_required_sidecar_value_is_checked(tmp_path, changes, words):
    with pytest.raises(FpmDataError) as caught:
        read(write_pair(tmp_path, ROWS, **changes))
    assert all(word in str(caught.value) for word in words)


def test_integers_of_the_sidecar_may_be_written_as_floats(tmp_path):
    assert read(write_pair(tmp_path, ROWS, schema_version=6.0, row_count=4.0)).num_rows == 4


def test_a_digest_mismatch_names_both_digests(tmp_path):
    path = write_pair(tmp_path, ROWS)
    old = read(path).sha256
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(FpmDataError, match=rf"digest mismatch.*{old}.*[0-9a-f]{{64}}"):
        read(path)


@pytest.mark.parametrize("text", ["{", "[]", "\ufeff{}", '{"a":' * 100_000])
def test_a_sidecar_that_is_no_json_object_is_an_error(tmp_path, text):
    with pytest.raises(FpmDataError, match="sidecar"):
        read(write_pair(tmp_path, ROWS, sidecar=text))


def test_a_missing_sidecar_is_an_error(tmp_path):
    path = write_pair(tmp_path, ROWS)
    (tmp_path / "fpm_forward_perf.metadata.json").unlink()
    with pytest.raises(FpmDataError, match="sidecar is missing"):
        read(path)


def test_a_missing_table_was_not_collected(tmp_path):
    with pytest.raises(
        FpmNotCollectedError, match=r"File does not exist at .*none\.parquet.*No fpm_forward data collected"
    ):
        read(tmp_path / "none.parquet")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (changed(latency_ms=float("nan")), ["row 0", "latency_ms"]),
        (changed(latency_ms=0.0), ["latency_ms"]),
        (changed(latency_ms=None), ["latency_ms"]),
        (changed(1, workload_kind="mixed"), ["row 1", "workload_kind", "prefill, decode"]),
        (changed(partition_policy="other"), ["partition_policy", "other"]),
        (changed(backend_version="1"), ["backend_version"]),
        (changed(system="h100"), ["system"]),
        (changed(backend="sglang"), ["backend"]),
        (changed(batch_size=0), ["batch_size", "at least 1"]),
        (changed(batch_size=2**32), ["batch_size", "4294967295"]),
        (changed(total_kv_read_tokens=-1), ["total_kv_read_tokens"]),
        (changed(total_prefill_tokens=0), ["total_prefill_tokens", "at least 1"]),
        (changed(2, total_prefill_tokens=1), ["row 2", "total_prefill_tokens", "must be 0"]),
        (changed(moe_backend=""), ["moe_backend", "non-empty"]),
        (changed(attention_backend=None), ["attention_backend", "non-empty"]),
        (everywhere(enable_wideep="False"), ["enable_wideep", "boolean"]),
        (everywhere(batch_size=1.0), ["batch_size", "integers"]),
        (everywhere(total_kv_read_tokens=None), ["total_kv_read_tokens"]),
        (everywhere(tp="1"), ["tp", "integers"]),
        (retyped("latency_ms", pa.float32()), ["latency_ms", "double"]),
        ([*ROWS, ROWS[1]], ["rows 1 and 4", "duplicate physical row key"]),
        ([*ROWS, ROWS[1] | {"cell_id": "other"}], ["row 4 collides with row 1", "other"]),
        ([*ROWS, ROWS[1] | {"weight_quantization": "fp8"}], ["row 4 collides with row 1", "fp8"]),
        ([{k: v for k, v in row.items() if k != "cp"} for row in ROWS], ["missing column cp"]),
        (pa.Table.from_pylist(ROWS).slice(0, 0), ["no rows"]),
    ],
)
def test_every_rule_of_the_rows_is_checked(tmp_path, rows, words):
    with pytest.raises(FpmDataError) as caught:
        read(write_pair(tmp_path, rows))
    assert all(word in str(caught.value) for word in words)


def test_the_first_broken_row_is_reported_and_of_its_rules_the_first(tmp_path):
    rows = changed(1, batch_size=0, workload_kind="mixed")
    rows[2] |= {"latency_ms": -1.0}
    with pytest.raises(FpmDataError, match="row 1: workload_kind"):
        read(write_pair(tmp_path, rows))


def test_the_row_count_is_compared_before_any_row_is_looked_at(tmp_path):
    with pytest.raises(FpmDataError, match="row_count"):
        read(write_pair(tmp_path, changed(latency_ms=-1.0), row_count=3))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_table_that_is_no_parquet_file_is_an_error(tmp_path, content):
    path = write_pair(tmp_path, ROWS)
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    sidecar = tmp_path / "fpm_forward_perf.metadata.json"
    sidecar.write_text(sidecar.read_text().replace(sidecar.read_text().split('"parquet_sha256": "')[1][:64], digest))
    with pytest.raises(FpmDataError, match="not a complete Parquet file|Git LFS pointer"):
        read(path)


class TestSchemaSeven:
    def test_the_execution_columns_are_read(self, tmp_path):
        rows = read(write_pair(tmp_path, everywhere(**EXECUTION), schema_version=7))
        assert rows.texts["execution_profile"].of(0) == "full"

    @pytest.mark.parametrize("index", [1, 2])
    def test_rows_bound_to_a_configuration_need_real_kv(self, tmp_path, index):
        rows = everywhere(**EXECUTION | {"model_config_sha256": "a" * 64}, kv_seed_regime="real_kv")
        rows[1]["total_kv_read_tokens"] = 16
        assert read(write_pair(tmp_path, rows, schema_version=7)).num_rows == 4
        rows[index]["kv_seed_regime"] = "legacy"
        with pytest.raises(FpmDataError, match=f"row {index}: .*requires real_kv provenance"):
            read(write_pair(tmp_path, rows, schema_version=7))

    def test_a_prefill_row_without_cached_tokens_needs_no_kv(self, tmp_path):
        rows = everywhere(**EXECUTION | {"model_config_sha256": "a" * 64}, kv_seed_regime="real_kv")
        rows[0]["kv_seed_regime"] = "n/a"
        assert read(write_pair(tmp_path, rows, schema_version=7)).num_rows == 4


class TestPoliciesPerRow:
    POLICY = "per_row_single_sample_or_median_of_3"

    def rows(self, policy, repeats):
        return everywhere(measurement_policy=policy, measurement_repeats=repeats)

    @pytest.mark.parametrize(("policy", "repeats"), [("dynamo_native_single_sample_v1", 1), ("kvwarm_median_of_3", 3)])
    def test_policies_with_their_number_of_samples_are_read(self, tmp_path, policy, repeats):
        assert read(write_pair(tmp_path, self.rows(policy, repeats), measurement_policy=self.POLICY)).num_rows == 4

    @pytest.mark.parametrize(("policy", "repeats"), [("dynamo_native_single_sample_v1", 3), ("other", 1)])
    def test_other_pairings_are_errors(self, tmp_path, policy, repeats):
        with pytest.raises(FpmDataError, match="measurement policy/repeats are inconsistent"):
            read(write_pair(tmp_path, self.rows(policy, repeats), measurement_policy=self.POLICY))

    def test_the_columns_are_needed(self, tmp_path):
        with pytest.raises(FpmDataError, match="measurement policy/repeats are inconsistent"):
            read(write_pair(tmp_path, ROWS, measurement_policy=self.POLICY))


def test_a_dcp_column_without_a_type_is_an_error(tmp_path):
    table = pa.Table.from_pylist(ROWS).append_column("dcp", pa.nulls(4))
    with pytest.raises(FpmDataError, match="dcp must hold integers"):
        read(write_pair(tmp_path, table))


def resealed(path, content):
    """Put other bytes in place of a table, with a sidecar that vouches for them."""
    sidecar = path.with_suffix(".metadata.json")
    document = json.loads(sidecar.read_text()) | {"parquet_sha256": hashlib.sha256(content).hexdigest()}
    path.write_bytes(content)
    sidecar.write_text(json.dumps(document))


def test_a_table_that_was_published_truncated_is_an_error_at_any_length(tmp_path):
    path = write_pair(tmp_path, ROWS)
    content = path.read_bytes()
    for length in range(0, len(content), max(1, len(content) // 64)):
        resealed(path, content[:length])
        with pytest.raises(FpmDataError, match="not a complete Parquet file"):
            read(path)


def test_damaged_bytes_are_an_error_or_other_values_never_another_exception(tmp_path):
    path = write_pair(tmp_path, ROWS)
    content, random = path.read_bytes(), Random(5)
    for _ in range(200):
        damaged = bytearray(content)
        for _ in range(random.choice((1, 1, 2, 5))):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        resealed(path, bytes(damaged))
        with contextlib.suppress(FpmDataError):
            read(path)
