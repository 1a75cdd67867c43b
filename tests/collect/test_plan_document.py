"""Saved plans: digests, cells, and what is no plan (collector.md sections 1.6, 1.7, 12)."""

import pytest

from fpmsdk.collect.cells import backend_columns, cell_id
from fpmsdk.collect.plan import CollectionPlan, plan_digest
from fpmsdk.collect.topology import Topology
from fpmsdk.errors import OnboardError

AUTO = backend_columns({})


@pytest.mark.parametrize(
    ("phase", "expected"), [("prefill", "fpm-880f66661adf28cd"), ("decode", "fpm-ec8d9e06c446148c")]
)
def test_a_cell_is_named_by_its_identity(phase, expected):
    name = cell_id(
        backend="vllm",
        model_path="example/slurm-fpm-model",
        system="gb200",
        phase=phase,
        topology=Topology(tp=8, moe_ep=8),
        weight_quantization="bfloat16",
        kv_cache_dtype="bfloat16",
        backend_columns=AUTO,
    )
    assert name == expected


@pytest.mark.parametrize("name", ["dense_runtime", "moe"])
def test_a_plan_of_the_upstream_collector_is_read_as_it_is(peer_plans, name):
    document = peer_plans[name]["plan"]
    plan = CollectionPlan.from_document(document)
    assert plan.sha256 == plan_digest(document)
    assert [cell.document() for cell in plan.cells] == document["cells"]
    for cell in plan.cells:
        assert cell.cell_id == cell_id(
            backend=plan.backend,
            model_path=plan.model_path,
            system=plan.system,
            phase=cell.workload_kind,
            topology=cell.topology,
            weight_quantization=cell.weight_quantization,
            kv_cache_dtype=cell.kv_cache_dtype,
            backend_columns=cell.backend_columns,
            execution=cell.execution_columns,
            input_text_sha256=cell.input_text_sha256,
        )


def test_a_plan_of_schema_10_has_no_execution_identity(dense_plan):
    dense_plan["schema_version"] = 10
    for cell in dense_plan["cells"]:
        del cell["execution_identity"], cell["input_text_sha256"]
    dense_plan["sha256"] = plan_digest(dense_plan)
    cell = CollectionPlan.from_document(dense_plan).cells[0]
    assert cell.execution_identity is None
    assert cell.execution_columns["execution_profile"] == "full"


def test_the_reason_of_an_admission_is_not_hashed(dense_plan):
    dense_plan["topology_memory_admission"][0]["reason"] = "worded otherwise"
    dense_plan["topology_memory_admission"][0]["estimates"][0]["reason"] = "worded otherwise"
    CollectionPlan.from_document(dense_plan)


def change(document, path, value):
    *steps, last = path
    for step in steps:
        document = document[step]
    if value is KeyError:
        del document[last]
    else:
        document[last] = value


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (["schema_name"], "other", "no aic_fpm_collection_plan document"),
        (["schema_version"], 9, "accepted are 10 and 11, found 9"),
        (["schema_version"], True, "accepted are 10 and 11, found True"),
        (["schema_version"], 10, "belong to schema 11 alone"),
        (["options", "max_gpus"], 4, "sha256: the content has"),
        (["topology_memory_admission", 0, "disposition"], "admitted", "sha256: the content has"),
        (["backend_policies"], KeyError, "incomplete or malformed"),
        (["topologies", 0, "tp"], KeyError, "incomplete or malformed"),
        (["cells"], [], "expected at least one"),
        (["cells", 0, "topology", "tp"], True, r"cells\[0\].topology.tp: expected a positive integer, found True"),
        (["cells", 0, "topology", "ep"], 1, r"cells\[0\].topology: expected the axes"),
        (["cells", 0, "workload_kind"], "agg", r"cells\[0\].workload_kind: expected prefill or decode"),
        (["cells", 0, "extra"], 1, r"cells\[0\]: expected the keys"),
        (["cells", 0, "execution_identity"], KeyError, r"cells\[0\]: expected the keys"),
        (["cells", 0, "resolved_dtypes", "kvcache_quant_mode"], "fp8", "resolved_dtypes.kvcache_quant_mode"),
        (["cells", 0, "execution_identity", "engram_residency"], None, "execution_identity: expected the words"),
    ],
)
def test_what_is_no_plan_is_refused_with_its_place(dense_plan, path, value, reason):
    change(dense_plan, path, value)
    with pytest.raises(OnboardError, match=reason):
        CollectionPlan.from_document(dense_plan)


def test_a_cell_may_be_there_once(dense_plan):
    dense_plan["cells"][1] = dense_plan["cells"][0]
    with pytest.raises(OnboardError, match="repeated are fpm-"):
        CollectionPlan.from_document(dense_plan)
