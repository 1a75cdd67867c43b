"""All candidates of a search, in the order of its branches, arms and knobs."""

from itertools import product

from fpmsdk.recommendation.candidate import Sample
from fpmsdk.recommendation.space import build_branches, materialise


def enumerated(config):
    """Point and concrete configuration of every candidate of a search without continuous knobs."""
    for branch in build_branches(config).branches:
        paths = [path for path, _ in branch.domains]
        values = [[domain.at(index) for index in range(domain.count)] for _, domain in branch.domains]
        for number, arm in enumerate(branch.arms):
            for chosen in product(*values):
                sample = Sample(branch.mode, arm.backend, number, tuple(zip(paths, chosen, strict=True)))
                yield sample, materialise(config, branch, sample)
