"""The order inside the compiled layer, which import-linter cannot see: every cimport points down or sideways.

Declarations, then features and tables, operators, estimators, pricing, scheduler and pages, replay; the codec is apart.
"""

import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    {"declarations", "search", "solver"},
    {"features", "frames", "sampler", "nnls", "grid", "sites", "passroofline"},
    {"operators", "forest", "forest_features", "forest_index", "online_split", "online_trees"}
    | {"online_forest", "online"},
    {"estimator", "regression", "row_store", "linear", "linear_store", "monitor", "spline", "spline_statistics"}
    | {"spline_store", "recursive", "automatic", "correction", "native", "wholeforward"}
    | {"learned", "learned_online", "causal_selector"},
    {"pricing"},
    {"fitted", "recorded", "standin"},
    {"pages", "rolling", "budget", "hybrid", "speculation", "scheduler"},
    {"recorder", "placement"},
    {"workers"},
    {"replay"},
]
APART = {"snapshot_codec", "mathprobe", "plain", "writeback"}
LAYER_OF = {module: depth for depth, layer in enumerate(LAYERS) for module in layer}
CIMPORT = re.compile(
    r"^\s*(?:from\s+fpmsdk\._ext\.(\w+)\s+cimport|from\s+fpmsdk\._ext\s+cimport\s+(\w+)|cimport\s+fpmsdk\._ext\.(\w+))",
    re.MULTILINE,
)


def cimports_of(text):
    return {next(filter(None, match)) for match in CIMPORT.findall(text)}


def cimport_graph():
    graph = {}
    for source in (*sorted(ROOT.glob("ext/*.pyx")), *sorted(ROOT.glob("fpmsdk/_ext/*.pxd"))):
        graph.setdefault(source.stem, set()).update(cimports_of(source.read_text()) - {source.stem})
    return graph


GRAPH = cimport_graph()


def test_every_form_of_cimport_is_seen():
    text = """
from fpmsdk._ext.one cimport A
from fpmsdk._ext cimport two
    cimport fpmsdk._ext.three as three
from fpmsdk._ext.four import B
from libc.math cimport log
"""
    assert cimports_of(text) == {"one", "two", "three"}


@pytest.mark.parametrize("module", sorted(GRAPH))
def test_a_compiled_module_cimports_its_own_layer_or_lower_ones(module):
    if module in APART:
        assert GRAPH[module] == set()
        return
    assert module in LAYER_OF, f"give {module} a place in the order at the top of this file"
    upward = {name for name in GRAPH[module] if name in APART or LAYER_OF[name] > LAYER_OF[module]}
    assert not upward


def test_there_are_no_cycles():
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as cycle:
        pytest.fail(f"cimport cycle: {' -> '.join(cycle.args[1])}")
