"""Which parallel sizes a configuration asks for, and which of them a model can be divided into."""

import pytest

from fpmsdk.errors import OnboardError
from fpmsdk.recommendation.menu import asked_shapes, with_replicas, worker_menu
from fpmsdk.recommendation.parallelism import Sizes, parse_layouts
from fpmsdk.recommendation.shapes import ModelShape, shape_fault

ONE = {"replicas": 1, "tensor": 1, "pipeline": 1, "attention_data": 1, "moe_tensor": 1, "moe_expert": 1}
DENSE = ModelShape("dense", heads=32, kv_heads=8, layers=36, inter_size=12288, context_length=40960)
MOE = ModelShape("moe", heads=32, kv_heads=4, layers=48, experts=128, expert_size=768, context_length=40960)


def shapes(value, *, is_moe=False, most=8, closed=False):
    menu = worker_menu(is_moe, most)
    return [str(shape) for shape in asked_shapes(parse_layouts(value, "p"), menu, is_moe, most, closed=closed)]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "menu"),
        ({}, "menu"),
        ({"preset": "default"}, "menu"),
        ({"prefill_context": 1}, "menu"),
        ({"preset": False}, "domains"),
        ({"preset": {}, "tensor": 2}, "domains"),
        ({"tensor": 2}, "domains"),
        ({"preset": [ONE]}, "list"),
        ({"preset": [ONE | {"decode_context": None}]}, "list"),
    ],
)
def test_single_sizes_without_a_preset_turn_the_preset_off(value, kind):
    assert parse_layouts(value, "p").kind == kind


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "p: found [1], accepted is a mapping"),
        ({"tensr": 2}, "p.tensr: unknown field; known are preset, replicas, tensor"),
        ({"preset": "default", "tensor": 2}, "p.preset: found 'default' beside tensor; leave preset out"),
        ({"preset": [ONE], "tensor": 2}, "beside tensor"),
        ({"preset": []}, "p.preset: found [], accepted are default, false and a list of mappings"),
        ({"preset": {"a": 1}}, "accepted are default, false and a list of mappings"),
        ({"preset": [{"tensor": 2}]}, "p.preset[0]: missing replicas, pipeline, attention_data"),
        ({"preset": [ONE | {"tp": 2}]}, "p.preset[0]: unknown tp; an entry has exactly"),
        ({"preset": [ONE | {"tensor": True}]}, "p.preset[0].tensor: found True, accepted is an integer of at least 1"),
        ({"preset": [ONE | {"prefill_context": 2}]}, "unknown prefill_context"),
        ({"tensor": 0}, "p.tensor: found 0, accepted are sizes of at least 1"),
    ],
)
def test_a_malformed_parallelism_is_refused(value, message):
    with pytest.raises(OnboardError) as caught:
        parse_layouts(value, "p")
    assert message in str(caught.value)


def test_the_menu_of_a_dense_model_is_divided_by_tensor():
    assert shapes(None, most=12) == ["tensor 1", "tensor 2", "tensor 4", "tensor 8"]


def test_the_menu_of_a_model_with_experts_has_the_four_pure_patterns():
    assert [str(shape) for shape in worker_menu(True, 4)[1:]] == [
        "tensor 1, attention_data 2, moe_expert 2",
        "tensor 1, attention_data 2, moe_tensor 2",
        "tensor 2, moe_expert 2",
        "tensor 2, moe_tensor 2",
        "tensor 1, attention_data 4, moe_expert 4",
        "tensor 1, attention_data 4, moe_tensor 4",
        "tensor 4, moe_expert 4",
        "tensor 4, moe_tensor 4",
    ]


@pytest.mark.parametrize(
    ("value", "is_moe", "closed", "expected"),
    [
        ({"tensor": {"choices": [1, 2]}}, False, False, ["tensor 1", "tensor 2"]),
        ({"replicas": 2}, False, False, ["tensor 1", "tensor 2", "tensor 4", "tensor 8"]),
        ({"tensor": 6}, False, False, ["tensor 6"]),
        ({"tensor": 6}, False, True, []),
        ({"tensor": 16}, False, False, []),
        ({"tensor": {"range": {"min": 1, "max": 2**40, "scale": "log"}}, "replicas": 1}, False, False,
         ["tensor 1", "tensor 2", "tensor 4", "tensor 8", "tensor 3", "tensor 5", "tensor 6", "tensor 7"]),
        ({"pipeline": 2}, False, False, ["tensor 1, pipeline 2", "tensor 2, pipeline 2", "tensor 4, pipeline 2"]),
        ({"moe_expert": 4}, True, False, ["tensor 1, attention_data 4, moe_expert 4", "tensor 4, moe_expert 4"]),
        ({"tensor": 2, "attention_data": 2, "moe_tensor": 1, "moe_expert": 4}, True, False,
         ["tensor 2, attention_data 2, moe_expert 4"]),
    ],
)  # fmt: skip
def test_named_sizes_choose_from_the_menu_and_go_beyond_it_when_all_of_a_division_is_named(
    value, is_moe, closed, expected
):
    assert shapes(value, is_moe=is_moe, closed=closed) == expected


def test_replicas_fill_the_gpus_unless_they_are_named():
    assert [one.replicas for one in with_replicas(parse_layouts({}, "p"), [Sizes(tensor=2)], 7)] == [1, 2, 3]
    named = parse_layouts({"replicas": {"choices": [2, 9]}, "tensor": 2}, "p")
    assert [one.replicas for one in with_replicas(named, [Sizes(tensor=2)], 7)] == [2]


@pytest.mark.parametrize(
    ("model", "sizes", "fault"),
    [
        (DENSE, Sizes(tensor=8), None),
        (DENSE, Sizes(tensor=16), None),
        (DENSE, Sizes(tensor=3), "tensor 3 does not divide the 32 attention heads"),
        (ModelShape("m", heads=12, kv_heads=4), Sizes(tensor=6), "neither divides the 4 key-value heads nor"),
        (ModelShape("m", heads=8, inter_size=100), Sizes(tensor=8), "tensor 8 does not divide the intermediate size"),
        (DENSE, Sizes(attention_data=2), "attention_data 2 needs a model with experts; use replicas or tensor"),
        (DENSE, Sizes(moe_expert=2), "the model has no experts"),
        (DENSE, Sizes(pipeline=37), "pipeline 37 exceeds the 36 layers"),
        (MOE, Sizes(tensor=2), "moe_tensor x moe_expert is 1, and the experts lie on the 2 GPUs"),
        (MOE, Sizes(tensor=2, attention_data=2, moe_expert=4), None),
        (MOE, Sizes(tensor=4, moe_tensor=2, moe_expert=2), "by moe_tensor or by moe_expert, not by both"),
        (ModelShape("m", experts=8), Sizes(attention_data=16, moe_expert=16), "moe_expert 16 does not divide the 8"),
        (ModelShape("m", experts=8, expert_size=100), Sizes(tensor=8, moe_tensor=8), "the expert size 100"),
    ],
)
def test_sizes_that_do_not_divide_the_model_are_refused(model, sizes, fault):
    found = shape_fault(model, sizes)
    assert (found is None) if fault is None else (fault in found)
