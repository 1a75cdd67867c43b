"""Automatic parallel configurations, against those that the peer has found for the same models."""

import json
import os
from pathlib import Path

import pytest

from fpmsdk.recommendation.config import RecommendConfig
from fpmsdk.recommendation.menu import with_replicas, worker_menu
from fpmsdk.recommendation.parallelism import SIZES, parse_layouts
from fpmsdk.recommendation.space import build_branches

PEER = json.loads((Path(__file__).parent / "peer_menus.json").read_text())


def searched(mode, model, context, workers, **constraints):
    engine = {"mode": mode, "model": model, "hardware": "h200_sxm", "context_length": context}
    engine["systems_paths"] = [os.environ["FPMSDK_TEST_SYSTEMS_013"]]
    engine["workers"] = {
        role: {"scheduler": {"max_batched_tokens": tokens, "max_sequences": sequences}}
        for role, (tokens, sequences) in workers.items()
    }
    config = {"engine": engine, "optimization": {"constraints": {"max_candidate_gpus": 8, **constraints}}}
    (branch,) = build_branches(RecommendConfig.from_source(config)).branches
    return branch.arms


@pytest.mark.parametrize("case", PEER["menus"])
def test_the_menu_before_memory_is_that_of_the_peer(case):
    is_moe, most, least = case.split("/")
    found = with_replicas(parse_layouts(None, "p"), worker_menu(is_moe == "True", int(most)), int(most))
    within = [sizes for sizes in found if least == "None" or sizes.gpus >= int(least)]
    assert sorted([getattr(sizes, name) for name in SIZES] for sizes in within) == sorted(PEER["menus"][case])


@pytest.mark.peer_data
@pytest.mark.parametrize("model", PEER["viable"])
def test_the_workers_that_hold_one_sequence_are_those_of_the_peer(model):
    for context, expected in zip((8192, "max"), PEER["viable"][model], strict=True):
        arms = searched("aggregated", model, context, {"aggregated": (32768, 1024)})
        found = {tuple(arm.parallelism["aggregated"][name] for name in SIZES[1:]) for arm in arms}
        assert found == {tuple(shape) for shape in expected}


@pytest.mark.peer_data
@pytest.mark.parametrize("model", PEER["pairs"])
def test_as_many_pairs_are_searched_as_by_the_peer(model):
    workers = {"prefill": (32768, 256), "decode": (8192, 1024)}
    counts = [
        len(searched("disaggregated", model, 8192, workers, **least)) for least in ({}, {"min_candidate_gpus": 6})
    ]
    assert counts == PEER["pairs"][model]
