"""Topologies: names, candidates and what is refused (collector.md section 1.2)."""

import pytest

from fpmsdk.collect.topology import Topology, candidate_topologies
from fpmsdk.errors import OnboardError


@pytest.mark.parametrize(
    ("topology", "is_moe", "name"),
    [
        (Topology(), False, "single"),
        (Topology(), True, "single"),
        (Topology(tp=4), False, "tp"),
        (Topology(tp=4, moe_ep=4), True, "tep"),
        (Topology(dp=8, moe_ep=8), True, "dep"),
        (Topology(tp=2, moe_tp=2), True, "pure_tp"),
    ],
)
def test_the_name_of_a_layout(topology, is_moe, name):
    assert topology.strategy(is_moe) == name


def test_a_mixture_of_experts_in_another_layout_has_no_name():
    with pytest.raises(OnboardError, match="none of the collected layouts"):
        Topology(tp=4).strategy(is_moe=True)


def names(**options):
    return [
        (topology.strategy(options["is_moe"]), topology.gpus)
        for topology in candidate_topologies(**{"max_gpus": 8, **options})
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"is_moe": False, "gpu_counts": [1, 2, 4, 8]}, [("single", 1), ("tp", 2), ("tp", 4), ("tp", 8)]),
        ({"is_moe": True, "gpu_counts": [2]}, [("dep", 2), ("pure_tp", 2), ("tep", 2)]),
        ({"is_moe": True, "gpu_counts": [1, 2], "allow_pure_tp": False}, [("single", 1), ("dep", 2), ("tep", 2)]),
        ({"is_moe": True, "gpu_counts": [4], "parallel_axes": ["moe_ep", "dp"]}, [("dep", 4)]),
        ({"is_moe": True, "gpu_counts": [2, 4], "parallel_presets": ["tep"], "sizes": {"tp": [4]}}, [("tep", 4)]),
        ({"is_moe": False, "gpu_counts": [2], "sizes": {"dp": [1], "tp": None}}, [("tp", 2)]),
    ],
)
def test_candidates_are_sorted_by_gpus_and_name(options, expected):
    assert names(**options) == expected


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"is_moe": False, "gpu_counts": [2], "parallel_presets": ["tep"]}, "dense models run as tp only"),
        ({"is_moe": True, "gpu_counts": [2], "parallel_presets": ["tp"]}, "tep, dep or pure_tp"),
        ({"is_moe": True, "gpu_counts": [2], "parallel_presets": ["pure_tp"], "allow_pure_tp": False}, "pure_tp"),
        ({"is_moe": True, "gpu_counts": [2], "parallel_axes": ["tp", "dp"]}, "name no layout"),
        ({"is_moe": False, "gpu_counts": [2], "sizes": {"dp": [2]}}, "keep dp at 1"),
        ({"is_moe": False, "gpu_counts": [2], "sizes": {"tp": [16]}}, r"\[16\] exceed max_gpus 8"),
        ({"is_moe": False, "gpu_counts": [2], "sizes": {"tp": [4]}}, "no topology is left"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(options, reason):
    with pytest.raises(OnboardError, match=reason):
        names(**options)
