"""A slice of `make fuzz-snapshots`: mutated states are errors or exactly what is in their bytes."""

import random

import pytest

from tests.snapshot.fuzz import flipped, targets, try_documents, try_fields, try_state

KINDS = (
    "regression linear",
    "regression linear threshold",
    "regression selected",
    "regression spline",
    "regression spline periodic",
    "op_level fixed",
    "op_level bounded",
    "fpm_interpolation dynamic_local",
    "execution_profile",
    "learned online batches",
    "learned causal_selector",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return {target.name: target for target in targets(tmp_path_factory.mktemp("fuzz"))}


@pytest.mark.parametrize("kind", KINDS)
def test_an_untouched_state_is_taken_as_it_is(built, kind):
    assert try_state(built[kind], built[kind].state) == "unchanged"


@pytest.mark.parametrize("kind", KINDS)
def test_changed_bytes(built, kind):
    random_numbers = random.Random(kind)
    outcomes = [try_state(built[kind], flipped(random_numbers, built[kind].state)) for _ in range(300)]
    assert outcomes.count("refused") > 100


@pytest.mark.parametrize("kind", KINDS)
def test_changed_fields(built, kind):
    outcomes = try_fields(built[kind], 60, 7)
    assert outcomes["refused"] > 20


@pytest.mark.parametrize("kind", ["regression linear", "op_level fixed"])
def test_changed_documents(built, kind):
    outcomes = try_documents(built[kind], random.Random(3), 40)
    assert outcomes["refused"] > 10
