"""Whole-forward models of a registered architecture: identity without a profile, lookups carried by the roofline."""

import hashlib

import pyarrow as pa
import pytest

from fpmsdk import ForwardPassPerfModel
from fpmsdk.config.profile import load_fpm_profile
from fpmsdk.config.profile_identity import checkpoint_identity
from fpmsdk.errors import ConfigError, FpmNoCellError, FpmUncoveredError, PerfDataWarning, UnsupportedModelError
from tests.perfdb.pairs import VERSION, decode, prefill, write_pair
from tests.perfdb.synthetic import Systems
from tests.perfmodel import tiny
from tests.perfmodel.deployments import DEPLOYMENT, checkpoint, direct_config, profile, rank

ROWS = [
    *(prefill(batch, tokens, 0, batch + tokens / 100) for batch in (1, 4) for tokens in (100, 200, 400)),
    *(decode(batch, kv, 3.0 + kv / 100) for batch in (1, 2) for kv in (2, 64, 128)),
]


@pytest.fixture
def build(tmp_path):
    Systems(tmp_path / "systems").hardware()

    def model(rows=ROWS, model=None, **changes):
        folder = tiny.write_model(tmp_path / "tiny") if model is None else model
        rows = [row | {"model_path": str(folder)} for row in rows]
        schema = pa.Table.from_pylist([row | MODES for row in rows]).schema  # modes are text, also where all are null
        path = write_pair(tmp_path / "pair", pa.Table.from_pylist(rows, schema=schema))
        interpolation = {"fpm_parquet_path": str(path)} | changes.pop("interpolation", {})
        return ForwardPassPerfModel.best_available(
            {
                "model": str(folder),
                "system": "x100",
                "backend": "vllm",
                "backend_version": VERSION,
                "worker_type": "aggregated",
                "estimation_mode": "fpm_interpolation",
                "systems_paths": [str(tmp_path / "systems")],
                "estimator_config": {"fpm_interpolation": interpolation},
                **changes,
            }
        )

    return model


MODES = {"fmha_quant_mode": "bfloat16", "comm_quant_mode": "half"}


def everywhere(**changes):
    return [row | changes for row in ROWS]


def test_a_measured_point_is_answered_as_it_was_measured(build):
    assert build().predict_prefill_latency_total(1, 200, 0) == 3.0


def test_another_batch_is_carried_over_between_its_neighbours(build):
    explained = build().explain({"scheduled_requests": {"num_prefill_requests": 2, "sum_prefill_tokens": 300}})
    (lookup,) = explained["ranks"][0]["lookups"]
    assert (lookup["resolution"], lookup["in_domain"], explained["in_domain"]) == ("sol_transfer", False, False)
    assert 4.0 < explained["latency_ms"] < 7.0
    assert sum(anchor["weight"] for anchor in lookup["anchors"]) == pytest.approx(1.0)


def test_a_query_outside_the_domain_names_the_axis_and_the_bounds(build):
    with pytest.raises(
        FpmUncoveredError, match=r"total_prefill_tokens=500 is outside the collected domain \[100, 400\]"
    ):
        build().predict_prefill_latency_total(1, 500, 0)


def test_an_identity_that_was_not_collected_lists_those_that_were(build):
    with pytest.raises(FpmNoCellError, match=r"gemm_quant_mode=fp8.*collected: .*gemm_quant_mode=bfloat16"):
        build(gemm_quant_mode="fp8")


TP2 = {"tp": 2, "moe_tp": 2}
UNRECORDED = {"interpolation": {"unrecorded_quant_modes": ["fmha", "comm"]}}
FACTS = {"engram_cpu_offload": False, "input_modality": "text", "comment": "größer"}
# Compact, keys sorted, letters as they are.
WRITTEN = (
    '{"architectures":["DeepseekV41ForCausalLM"],"comment":"größer","engram_cpu_offload":false,"input_modality":"text"}'
)


def test_points_without_kv_of_their_own_that_stay_as_recorded_are_a_warning(build):
    rows = [row | {"kv_seed_regime": "real_kv"} for row in ROWS]
    rows[-1] = rows[-1] | {"kv_seed_regime": "fake_fallback"}
    assert build(rows).predict_decode_latency_total(2, 128) == pytest.approx(4.28)  # on the line through 2 and 64
    with pytest.warns(PerfDataWarning, match=r"1 decode points .*\(0 were extrapolated"):
        build([*rows[:-3], *rows[-2:]])  # one real point below is not enough


class TestDecodeContextParallelism:
    def test_a_table_with_dcp_serves_a_configuration_with_it(self, build):
        model = build(everywhere(**TP2, dcp=2), tp=2, moe_tp_size=2, moe_ep_size=1, dcp=2)
        assert model.predict_decode_latency_total(1, 64) == 3.64

    @pytest.mark.parametrize(("recorded", "asked"), [(2, None), (1, None), (2, 1), (None, 1)])
    def test_another_dcp_is_another_cell(self, build, recorded, asked):
        rows = everywhere(**TP2) if recorded is None else everywhere(**TP2, dcp=recorded)
        with pytest.raises(FpmNoCellError, match="dcp|No FPM cell"):
            build(rows, tp=2, moe_tp_size=2, moe_ep_size=1, dcp=asked)

    def test_dcp_divides_tp(self, build):
        with pytest.raises(ConfigError, match="dcp must be positive and divide tp"):
            build(tp=2, dcp=3)


class TestUnrecordedModes:
    def test_rows_without_a_mode_match_a_request_that_says_so(self, build):
        rows = everywhere(fmha_quant_mode=None, comm_quant_mode=None)
        assert build(rows, **UNRECORDED).predict_prefill_latency_total(1, 200, 0) == 3.0
        with pytest.raises(FpmNoCellError):
            build(rows)

    def test_rows_with_a_mode_do_not_match_such_a_request(self, build):
        with pytest.raises(FpmNoCellError):
            build(**UNRECORDED)

    @pytest.mark.parametrize("mode", ["fmha_quant_mode", "comm_quant_mode"])
    def test_a_mode_cannot_be_both_unrecorded_and_asked_for(self, build, mode):
        value = {"fmha_quant_mode": "bfloat16", "comm_quant_mode": "half"}[mode]
        with pytest.raises(ConfigError, match=f"{mode} contradicts unrecorded_quant_modes"):
            build(**UNRECORDED, **{mode: value})


class TestEncoders:
    @pytest.fixture
    def model(self, tmp_path):
        text = {key: value for key, value in tiny.CONFIG.items() if key != "architectures"}
        return checkpoint(
            tmp_path / "vision", "Qwen3VLForConditionalGeneration", text_config=text, vision_config={"depth": 2}
        )

    def test_a_model_with_an_encoder_is_refused(self, build, model):
        with pytest.raises(UnsupportedModelError, match=r"encoder \(vision_config\).*text_only"):
            build(model=model)

    def test_its_language_model_alone_is_served(self, build, model):
        served = build(model=model, interpolation={"text_only": True})
        assert served.predict_prefill_latency_total(1, 200, 0) == 3.0


class TestCellsBoundToACheckpoint:
    def profile(self, folder, **facts):
        path = checkpoint(folder, "DeepseekV41ForCausalLM", **facts)
        return profile(path, DEPLOYMENT, architecture="DeepseekV41ForCausalLM")

    def test_their_identity_holds_the_digest_of_the_configuration(self, tmp_path):
        identity = checkpoint_identity(load_fpm_profile(self.profile(tmp_path / "model", **FACTS)))
        assert identity == {
            "model_config_sha256": hashlib.sha256(WRITTEN.encode()).hexdigest(),
            "execution_profile": "full",
            "engram_residency": "hbm_tp_sharded",
            "input_modality": "text",
        }

    def test_other_architectures_have_none(self, tmp_path):
        assert checkpoint_identity(load_fpm_profile(profile(checkpoint(tmp_path / "model")))) == {}

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("engram_cpu_offload", True),
            ("engram_cpu_offload", None),
            ("engram_cpu_offload", 0),
            ("input_modality", "image"),
        ],
    )
    def test_the_configuration_must_say_what_was_measured(self, tmp_path, name, value):
        facts = FACTS | {name: value}
        with pytest.raises(ConfigError, match=f"must state {name}"):
            checkpoint_identity(load_fpm_profile(self.profile(tmp_path / "model", **facts)))

    def test_they_are_found_by_it(self, tmp_path):
        Systems(tmp_path / "systems").hardware()
        document = self.profile(tmp_path / "model", **FACTS)
        identity = checkpoint_identity(load_fpm_profile(document))
        rows = [row | identity | {"model_path": document["model"], "kv_seed_regime": "real_kv"} for row in ROWS]
        path = write_pair(tmp_path / "pair", rows, schema_version=7)
        config = direct_config(document["model"], tmp_path / "systems", path, fpm_profile=document)
        assert ForwardPassPerfModel.best_available(config).predict_prefill_latency_total(1, 200, 0) == 3.0
        self.profile(tmp_path / "model", **FACTS | {"comment": "another"})
        with pytest.raises(FpmNoCellError):
            ForwardPassPerfModel.best_available(config)


class TestExplain:
    """What an answer says of its own reach."""

    FLAT = (
        *(prefill(b, t, 0, (1 + 0.01 * i) * (2 + t / 100)) for i, b in enumerate((1, 2, 4)) for t in (128, 256, 512)),
        prefill(1, 128, 256, 4.0),
        # Batches 8 and 9 are neighbours: a captured graph ends at 8.
        *(decode(8, kv, 4 + kv / 1000) for kv in (64, 512)),
        *(decode(9, kv, 5 + kv / 1000) for kv in (64, 512, 2048)),
        *(decode(16, kv, 6 + kv / 1000) for kv in (64, 512)),
    )

    @pytest.mark.parametrize(
        ("asked", "resolution", "in_domain", "anchors"),
        [
            (rank(2, 256), "exact_lookup", True, {(2, 256, 0)}),
            (rank(2, 200), "within_curve_interpolation", True, {(2, 128, 0), (2, 256, 0)}),
            # Latency hardly depends on the batch: that of the largest one stands for batch 16.
            (rank(16, 256), "exact_lookup", False, {(4, 256, 0)}),
            (rank(3, 256), "sol_transfer", False, {(1, 256, 0), (2, 256, 0), (4, 256, 0)}),
            (rank(0, 0, 0, 12, 512), "cross_batch_interpolation", True, {(9, None, 512), (16, None, 512)}),
            # Only the row below holds so much KV.
            (rank(0, 0, 0, 12, 2048), "cross_batch_interpolation", False, {(9, None, 2048)}),
            # After 256 cached tokens one point was measured, which does not reach 512 new ones.
            (rank(1, 512, 256), "sol_transfer", False, {(1, 512, 0), (2, 512, 0), (4, 512, 0)}),
        ],
    )
    def test_the_anchors_tell_whether_measurements_surround_the_query(
        self, build, asked, resolution, in_domain, anchors
    ):
        explained = build(self.FLAT).explain(asked)
        (lookup,) = explained["ranks"][0]["lookups"]
        assert (lookup["resolution"], lookup["in_domain"], explained["in_domain"]) == (resolution, in_domain, in_domain)
        found = {tuple(anchor["coordinates"].values()) for anchor in lookup["anchors"]}
        assert found == anchors
        assert sum(anchor["weight"] for anchor in lookup["anchors"]) == pytest.approx(1.0)

    def test_a_row_that_is_held_beyond_its_end_carries_the_answer(self, build):
        model = build(self.FLAT, interpolation={"ragged_edges": "continuous"})
        (lookup,) = model.explain(rank(0, 0, 0, 12, 1024))["ranks"][0]["lookups"]
        assert (lookup["resolution"], lookup["in_domain"]) == ("sol_transfer", False)
        assert (16, None, 512) in {tuple(anchor["coordinates"].values()) for anchor in lookup["anchors"]}
