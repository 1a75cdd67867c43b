"""The engine record and the digest of a specification."""

import json

import pytest

from fpmsdk.opgraph import build_graph
from fpmsdk.opgraph.spec import EngineSpec
from tests.opgraph.checkpoints import LLAMA_8B, QWEN3_30B, default_lanes, deployment, graph, model


def test_the_digest_ignores_where_data_are_stored():
    assert graph(LLAMA_8B, systems_path="/a").digest() == graph(LLAMA_8B, systems_path="/b").digest()


def test_the_digest_ignores_locations_inside_the_estimator_configuration():
    def digest(path):
        spec = graph(LLAMA_8B)
        estimator = json.dumps({"fpm_interpolation": {"method": "sol", "fpm_parquet_path": path}})
        engine = spec.engine | {"fpm_parquet_path": path, "extra": {"estimator_config": estimator}}
        return EngineSpec(engine, spec.context_ops, spec.generation_ops, spec.precision).digest()

    assert digest("/a.parquet") == digest("/b.parquet")
    assert digest("/a.parquet") != graph(LLAMA_8B).digest()


@pytest.mark.parametrize(
    "fields",
    [
        {"tp": 2},
        {"pp": 2},
        {"nextn": 1},
        {"gemm_quant_mode": "fp8"},
        {"kvcache_quant_mode": "fp8"},
        {"system": "b200_sxm"},
        {"backend_version": "1.3.0rc23"},
        {"kv_block_size": 64},
        {"database_mode": "SOL"},
        {"enable_shared_layer": False},
        {"strict_provenance": True},
        {"transfer_policy": ("xshape",)},
    ],
)
def test_the_digest_covers_everything_else(fields):
    assert graph(LLAMA_8B, **fields).digest() != graph(LLAMA_8B).digest()


def test_the_digest_covers_lane_orders_and_the_name_of_the_model():
    plain = graph(LLAMA_8B).digest()
    assert build_graph(model(LLAMA_8B), deployment(), lambda *_: ("fa3",)).digest() != plain
    assert build_graph(model(LLAMA_8B, name="other"), deployment(), default_lanes).digest() != plain


def test_the_digest_is_the_same_on_every_machine():
    assert graph(LLAMA_8B).digest() == "038551a9c21fc4098e2097b299ffd9426fcafdd23d04dee0f8f5484d4fe94737"


@pytest.mark.parametrize(
    ("mode", "sharing"), [("SILICON", True), ("HYBRID", True), ("EMPIRICAL", False), ("SOL", False)]
)
def test_sharing_follows_the_database_mode_unless_given(mode, sharing):
    assert graph(LLAMA_8B, database_mode=mode).engine["enable_shared_layer"] is sharing
    assert (
        graph(LLAMA_8B, database_mode=mode, enable_shared_layer=not sharing).engine["enable_shared_layer"]
        is not sharing
    )


@pytest.mark.parametrize(
    ("policy", "written"),
    [
        (None, None),
        (("xop", "xshape", "xquant", "xprofile", "xop"), None),
        (("xshape", "xquant", "xshape"), ["xquant", "xshape"]),
        ((), []),
    ],
)
def test_all_transfers_are_written_as_null(policy, written):
    assert graph(LLAMA_8B, transfer_policy=policy).engine["transfer_policy"] == written


@pytest.mark.parametrize(
    ("field", "mode", "wire"),
    [
        ("gemm_quant_mode", "int8_wo", "int8"),
        ("gemm_quant_mode", "sq", "int8"),
        ("gemm_quant_mode", "int4_wo", "int4"),
        ("gemm_quant_mode", "fp8_ootb", "fp8"),
        ("gemm_quant_mode", "nvfp4_wo", None),
        ("gemm_quant_mode", "fp8_static", "fp8_static"),
        ("moe_quant_mode", "int4_wo", "int4"),
        ("moe_quant_mode", "w4afp8", "w4afp8"),
        ("moe_quant_mode", "nvfp4_wo", None),
    ],
)
def test_the_engine_record_collapses_modes_but_the_operators_keep_them(field, mode, wire):
    spec = graph(QWEN3_30B, **{field: mode})
    assert spec.engine["weight_dtype" if field.startswith("gemm") else "moe_dtype"] == wire
    assert mode in {getattr(op, "quant_mode", None) for op in spec.context_ops}
