"""Every fault of a pair or a profile shows when the model is built, as fpm-interpolation.md section 10.6 lists them."""

import pyarrow as pa
import pytest

from fpmsdk import ForwardPassPerfModel
from fpmsdk.errors import (
    ConfigError,
    FpmDataError,
    FpmNoCellError,
    FpmUncoveredError,
    MetricsError,
    PerfDataNotAvailableError,
)
from tests.perfdb.pairs import decode, prefill, write_pair
from tests.perfdb.synthetic import Systems
from tests.perfmodel.deployments import checkpoint, direct_config, profile, rank

ROWS = [
    *(prefill(1, tokens, 0, tokens / 10) for tokens in (100, 200)),
    *(decode(batch, kv, 3.0 + kv / 100) for batch in (1, 2) for kv in (2, 64)),
]
EXECUTION = {
    "model_config_sha256": "",
    "execution_profile": "full",
    "engram_residency": "none",
    "input_modality": "text",
}
BOUND = EXECUTION | {"model_config_sha256": "0" * 64}
PER_ROW = "per_row_single_sample_or_median_of_3"


@pytest.fixture
def place(tmp_path):
    Systems(tmp_path / "systems").hardware()
    checkpoint(tmp_path / "model")
    return tmp_path


def config_of(place, rows=ROWS, sidecar=None, **changes):
    rows = [row | {"model_path": str(place / "model")} for row in rows]
    table = changes.pop("table", lambda rows: rows)
    path = write_pair(place / "pair", table(rows), **(sidecar or {}))
    return direct_config(place / "model", place / "systems", path, **changes)


def changed(**changes):
    return [ROWS[0] | changes, *ROWS[1:]]


def everywhere(**changes):
    return [row | changes for row in ROWS]


def typed(name, kind):
    def table(rows):
        made = pa.Table.from_pylist(rows)
        at = made.schema.get_field_index(name)
        return made.set_column(at, name, made.column(name).cast(kind, safe=False))

    return table


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sidecar": {"schema_version": 7}}, "missing column"),
        ({"sidecar": {"schema_version": 8}}, "schema_version 8"),
        ({"sidecar": {"parquet_sha256": "0" * 64}}, "digest mismatch.*0000"),
        ({"sidecar": {"row_count": 1}}, "row_count mismatch: the sidecar says 1, the table has 6"),
        ({"rows": changed(latency_ms=float("nan"))}, "row 0.*latency_ms"),
        ({"rows": [*ROWS, ROWS[0]]}, "rows 0 and 6.*duplicate physical row key"),
        ({"rows": [*ROWS, ROWS[0] | {"cell_id": "other"}]}, "row 6 collides with row 0"),
        ({"rows": changed(workload_kind="mixed")}, "workload_kind"),
        ({"rows": changed(backend_version="1")}, "backend_version"),
        ({"rows": changed(total_prefill_tokens=0)}, "total_prefill_tokens"),
        ({"rows": everywhere(enable_eplb="False")}, "enable_eplb.*boolean"),
        ({"table": typed("latency_ms", pa.int64())}, "latency_ms must hold double"),
        ({"rows": changed(moe_backend="")}, "moe_backend.*non-empty"),
        (
            {"rows": everywhere(**BOUND, kv_seed_regime="legacy"), "sidecar": {"schema_version": 7}},
            "config-bound cached prefill/decode requires real_kv provenance",
        ),
        (
            {
                "rows": everywhere(measurement_policy="kvwarm_median_of_3", measurement_repeats=1),
                "sidecar": {"measurement_policy": PER_ROW},
            },
            "measurement policy/repeats are inconsistent",
        ),
        ({"rows": changed(partition_policy="other")}, "partition_policy.*other"),
        *(
            ({"sidecar": {name: "other"}}, f"{name}.*other")
            for name in (
                "schema_name",
                "coordinate_system",
                "measurement_policy",
                "system",
                "backend",
                "backend_version",
            )
        ),
    ],
)
def test_a_broken_pair_is_no_model(place, changes, words):
    with pytest.raises(FpmDataError, match=words) as caught:
        ForwardPassPerfModel.best_available(config_of(place, **changes))
    assert str(caught.value).startswith("perf database error: ")


def test_a_missing_sidecar_is_no_model(place):
    config = config_of(place)
    (place / "pair" / "fpm_forward_perf.metadata.json").unlink()
    with pytest.raises(FpmDataError, match="sidecar is missing"):
        ForwardPassPerfModel.best_available(config)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_truncated_table_is_a_digest_mismatch(place, share):
    config = config_of(place)
    path = place / "pair" / "fpm_forward_perf.parquet"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(FpmDataError, match="digest mismatch"):
        ForwardPassPerfModel.best_available(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"sidecar": {"schema_version": 6.0}},
        {"rows": everywhere(**EXECUTION), "sidecar": {"schema_version": 7}},
        {
            "rows": everywhere(measurement_policy="kvwarm_median_of_3", measurement_repeats=3),
            "sidecar": {"measurement_policy": PER_ROW},
        },
    ],
)
def test_what_the_format_allows_is_a_model(place, changes):
    model = ForwardPassPerfModel.best_available(config_of(place, **changes))
    assert model.predict_prefill_latency_total(1, 100, 0) == 10.0


def test_a_mode_that_is_null_everywhere_matches_no_profile(place):
    with pytest.raises(FpmNoCellError, match="No FPM cell matches"):
        ForwardPassPerfModel.best_available(
            config_of(place, everywhere(moe_quant_mode=None), table=lambda rows: pa.Table.from_pylist(
                rows, schema=pa.Table.from_pylist([row | {"moe_quant_mode": "x"} for row in rows]).schema
            ))
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"interpolation": {"method": "sol"}}, "sol needs an architecture with an operator graph"),
        ({"fpm_profile": None}, "direct needs an fpm_profile"),
        ({"database_mode": "HYBRID"}, "direct needs database_mode SILICON"),
    ],
)
def test_a_method_that_the_configuration_does_not_allow_is_a_value_error(place, changes, words):
    with pytest.raises(ConfigError, match=words):
        ForwardPassPerfModel.best_available(config_of(place, **changes))


def test_a_checkpoint_of_another_architecture_is_a_value_error(place):
    checkpoint(place / "model", "OtherForCausalLM")
    with pytest.raises(ConfigError, match="OtherForCausalLM"):
        ForwardPassPerfModel.best_available(config_of(place, fpm_profile=profile(place / "model")))


# --- queries ---


@pytest.mark.parametrize(
    ("rows", "asked"),
    [
        # one number of prefill tokens, one cached length, one KV total, one batch
        ([prefill(1, 100, 0, 10.0), *ROWS[2:]], rank(1, 101)),
        (ROWS, rank(1, 150, 1)),
        ([*ROWS[:2], decode(1, 64, 3.0)], rank(0, 0, 0, 1, 65)),
        ([*ROWS[:2], *(decode(4, kv, 3.0) for kv in (2, 64))], rank(0, 0, 0, 3, 32)),
    ],
)
def test_one_value_on_an_axis_is_never_copied_to_another(place, rows, asked):
    with pytest.raises(FpmUncoveredError, match="genuine"):
        ForwardPassPerfModel.best_available(config_of(place, rows)).estimate_forward_pass_time_ms(asked)


@pytest.mark.parametrize("asked", [rank(1, 99), rank(1, 201), rank(9, 100), rank(0, 0, 0, 1, 65), rank(0, 0, 0, 5, 8)])
def test_queries_outside_the_domain_are_refused(place, asked):
    model = ForwardPassPerfModel.best_available(config_of(place))
    for ask in (model.estimate_forward_pass_time_ms, model.estimate_forward_pass_detailed, model.explain):
        with pytest.raises(PerfDataNotAvailableError):
            ask(asked)


@pytest.mark.parametrize("asked", [rank(1, 100.5), rank(1, -100), rank(0, 0, 0, 1, -2), rank(0.5, 100)])
def test_fractional_and_negative_counts_are_errors(place, asked):
    with pytest.raises(MetricsError):
        ForwardPassPerfModel.best_available(config_of(place)).estimate_forward_pass_time_ms(asked)
