"""Collection on a budget: few points of the grid, chosen where they help the given traffic most.

A smoke run tells what the whole grid of the engine is. A first round measures its envelope and some points that are
kept apart, the holdout; every further round adds the points at which the table is expected to be wrong most, weighted
by how often the traffic needs them. It ends when the holdout is predicted well enough or the time is used up. A round
is a campaign like any other and measures all points chosen so far, so that the last table is of one launch of each
phase.
Source: beyond the specification; rounds are campaigns of collector.md sections 1.5 and 2.
"""
