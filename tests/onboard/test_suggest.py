"""Suggested topologies: budgets, domains, families, the default and the gaps."""

import pytest

from fpmsdk.errors import OnboardError
from fpmsdk.onboard.hardware import hardware_envelope
from fpmsdk.onboard.intake import load_model_config
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.onboard.suggest import shortlist, suggest_topologies
from tests.onboard.models import BFLOAT16, IDENTITY, LARGE, MIXTRAL, SMALL, WINDOWED, write_config

BLOCKS = {"cache_block_sizes": {"full_attention": 16, "sliding_attention": 16}}


def suggestions(folder, config, kind="dense", overrides=BFLOAT16, **identity):
    asked = {"identity": IDENTITY | {"model_kind": kind} | identity, "search": {"context_length": 4096}}
    return suggest_topologies(
        load_model_config(write_config(folder, config)), SupportRequest.model_validate(asked), overrides
    )


def shown(found):
    return [(candidate.family, candidate.required_gpus, candidate.status) for candidate in found.candidates]


@pytest.mark.parametrize(
    ("config", "gpu", "default", "required"),
    [
        (SMALL, "h200_sxm", 1, 3831772384),
        (LARGE, "h200_sxm", 2, 74650927104),
        (LARGE, "gb200", 1, 144555458560),
    ],
)
def test_the_default_is_the_smallest_that_fits(tmp_path, systems, config, gpu, default, required):
    found = suggestions(tmp_path, config, gpu=gpu)
    assert found.default.required_gpus == default
    assert found.default.estimated_required_bytes == required


@pytest.mark.parametrize(
    ("gpu", "interconnect", "budget", "domain", "gpus"),
    [
        ("h200_sxm", "nvswitch", 136257837465, "node", 8),
        ("h200_sxm", "none", 136257837465, "single_gpu", 1),
        ("gb200", "NV-Link / NVSwitch", 178807268966, "rack", 72),
        ("gb200", "nvlink", 178807268966, "rack", 72),
        ("gb200", "infiniband", 178807268966, "node", 4),
    ],
)
def test_the_fast_domain_is_that_of_the_declared_fabric(systems, gpu, interconnect, budget, domain, gpus):
    found = hardware_envelope(gpu, interconnect, 0.9)
    assert (found.memory_budget_bytes, found.fast_domain, found.fast_domain_gpus) == (budget, domain, gpus)


def test_what_exceeds_the_budget_is_rejected_with_its_bytes(tmp_path, systems):
    found = suggestions(tmp_path, LARGE)
    assert [candidate.sizes for candidate in found.rejected_candidates] == [(1, 1, 1, 1)]
    assert "exceed the budget: 136257837465" in found.rejected_candidates[0].reasons[0]
    assert shown(found) == [("tp", 2, "estimated_fit"), ("tp", 4, "estimated_fit")]


def test_without_an_interconnect_a_large_model_has_no_topology(tmp_path, systems):
    found = suggestions(tmp_path, LARGE, interconnect="none")
    assert found.candidates == () and found.default is None
    assert "no eligible topology" in shortlist(found) and "rejected tp, 1 GPUs" in shortlist(found)


@pytest.mark.parametrize("gpu", ["h200_sxm", "gb200"])
def test_experts_come_in_three_families(tmp_path, systems, gpu):
    found = suggestions(tmp_path, MIXTRAL, "moe", gpu=gpu)
    sizes = [tuple(candidate.sizes) for candidate in found.candidates]
    assert [candidate.family for candidate in found.candidates] == ["pure_tp"] * 2 + ["dep"] * 2 + ["tep"] * 2
    assert (sizes[1], sizes[2], sizes[4]) == ((2, 1, 2, 1), (1, 2, 1, 2), (2, 1, 1, 2))
    for candidate in found.candidates[2:]:
        assert candidate.status == "needs_inputs" and "comm_overhead_bytes" not in candidate.draft.resolved
    assert found.default.family == "pure_tp" and found.default.required_gpus == 1


def test_widths_that_do_not_divide_the_heads_are_rejected(tmp_path, systems):
    found = suggestions(tmp_path, SMALL)
    assert [candidate.required_gpus for candidate in found.rejected_candidates] == [8]
    assert "num_attention_heads" in found.rejected_candidates[0].reasons[0]


@pytest.mark.parametrize(
    ("config", "kind", "overrides", "status"),
    [
        (SMALL, "dense", {}, "needs_inputs"),
        (WINDOWED, "moe", BFLOAT16 | BLOCKS, "needs_inputs"),
        (SMALL | {"architectures": ["NewForCausalLM"], "model_type": "new", "num_experts": 0}, "dense", BFLOAT16,
         "needs_inputs"),
        (SMALL | {"sliding_window": 64}, "dense", BFLOAT16 | {"cache_block_sizes": {"sliding_attention": 16}},
         "estimated_fit"),
    ],
)  # fmt: skip
def test_only_complete_estimates_fit(tmp_path, systems, config, kind, overrides, status):
    found = suggestions(tmp_path, config, kind, overrides)
    assert {candidate.status for candidate in found.candidates} == {status}
    assert (found.default is None) is (status != "estimated_fit")


def test_a_grouped_cache_counts_the_most_pages_of_one_request(tmp_path, systems):
    overrides = BFLOAT16 | {"cache_block_sizes": {"sliding_attention": 16}}
    found = suggestions(tmp_path, SMALL | {"sliding_window": 64}, overrides=overrides)
    # 64 - 1 + 8192 tokens and a block in advance are more than the 4096 / 16 pages that there are.
    cache = 256 * (2 * 2 * (4 + 4) * 2 * 16)
    assert found.default.estimated_required_bytes == 13472 + 73400320 + 3758096384 + cache
    unlabelled = suggestions(tmp_path, SMALL | {"sliding_window": 64}, overrides=overrides, framework_version=None)
    assert unlabelled.default is None


@pytest.mark.parametrize("role", ["aggregated", "prefill", "decode"])
def test_a_grouped_cache_of_one_role_is_assessed_like_any(tmp_path, systems, role):
    config = load_model_config(write_config(tmp_path, SMALL | {"sliding_window": 64}))
    document = {"identity": IDENTITY, "search": {"context_length": 4096}}
    overrides = BFLOAT16 | {"cache_block_sizes": {"sliding_attention": 16}}
    untagged = suggest_topologies(config, SupportRequest.model_validate(document), overrides)
    tagged = suggest_topologies(config, SupportRequest.model_validate(document | {"worker_type": role}), overrides)
    assert shown(tagged) == shown(untagged) == [("tp", 1, "estimated_fit"), ("tp", 2, "estimated_fit")]
    assert tagged.default.estimated_required_bytes == untagged.default.estimated_required_bytes
    assert tagged.default.draft.profile.deployments[0].worker_type == role


@pytest.mark.parametrize("name", ["weights_bytes", "kv_bytes_per_token"])
def test_bytes_of_one_rank_are_not_carried_over(tmp_path, systems, name):
    with pytest.raises(OnboardError, match=f"{name} belong to one topology"):
        suggestions(tmp_path, SMALL, overrides=BFLOAT16 | {name: 64})


def test_a_system_without_description_has_no_suggestions(tmp_path, systems):
    with pytest.raises(OnboardError, match="no description of system 'unheard_of'"):
        suggestions(tmp_path, SMALL, gpu="unheard_of")


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("num_gpus_per_rack: 72", "num_gpus_per_rack: 6", "must be a multiple"),
        ("mem_capacity: 198674743296", "mem_capacity: -1", "mem_capacity"),
        ("mem_capacity: 198674743296", "power: 700", "mem_capacity is missing"),
        ("8: 411041792", "8: many", "nccl_mem"),
    ],
)
def test_a_malformed_description_is_refused_by_file(systems, old, new, found):
    path = systems / "gb200.yaml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(OnboardError, match=found) as fault:
        hardware_envelope("gb200", "nvlink", 0.9)
    assert str(path) in str(fault.value)
