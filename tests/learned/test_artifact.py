"""The artifact: what is accepted, what is refused with which place, and that writing keeps every bit."""

import contextlib
import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpmsdk._ext.forest_index import indexed
from fpmsdk.errors import LearnedModelError, PerfDataNotAvailableError
from fpmsdk.learned.artifact import Artifact, StoreForest, read_artifact
from tests.vectors import load_vectors

FORESTS = load_vectors("learned_peer")["forests"]


def document(name="main"):
    return copy.deepcopy(FORESTS[name]["artifact"])


def encoded(changed):
    return json.dumps(changed).encode()


def tree_of(changed, kind="pure_decode"):
    return changed["stores"][kind]["trees"][0]


@pytest.mark.parametrize("name", FORESTS)
def test_a_written_artifact_reads_as_the_same_bits(name):
    first = read_artifact(encoded(document(name)))
    again = read_artifact(first.to_json_bytes())
    assert (again.worker_type, again.target, again.features) == (first.worker_type, first.target, first.features)
    assert again.metadata == first.metadata == document(name)["metadata"]
    assert list(again.stores) == list(first.stores)
    for kind, store in first.stores.items():
        assert again.stores[kind].baseline == store.baseline
        for one, other in zip(store.trees, again.stores[kind].trees, strict=True):
            for left, right in zip(one, other, strict=True):
                assert left.dtype == right.dtype
                np.testing.assert_array_equal(left, right)


def test_stores_are_in_the_order_of_workload_kinds():
    kinds = ["pure_decode", "contains_locally_mixed", "cross_rank_aggregated", "pure_prefill"]
    assert list(read_artifact(encoded(document("ranks"))).stores) == kinds


def remove_missing_left(changed):
    for store in changed["stores"].values():
        for tree in store["trees"]:
            del tree["missing_left"]


def test_without_missing_left_every_node_sends_missing_values_left():
    changed = document()
    remove_missing_left(changed)
    assert all(tree.missing_left.all() for tree in read_artifact(encoded(changed)).stores["pure_decode"].trees)


ACCEPTED = {
    "without trees": lambda d: d["stores"]["pure_decode"].update(trees=[]),
    "an unknown top-level key": lambda d: d.update(extra=1),
    "without missing_left": remove_missing_left,
    "without identity": lambda d: d["metadata"].pop("identity"),
    "without metadata": lambda d: d.pop("metadata"),
    "whole numbers for reals": lambda d: d["stores"]["pure_decode"].update(baseline=2),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case):
    changed = document()
    ACCEPTED[case](changed)
    assert read_artifact(encoded(changed)).features == ("num_decode_requests", *changed["features"][1:])


def one_child(changed):
    tree_of(changed)["left"][0] = -1


def two_parents(changed):
    tree = tree_of(changed)
    tree["right"][0] = tree["left"][0]


def of_decode(changed):
    changed["worker_type"] = "decode"


TREE = "stores.pure_decode.trees[0]"
REFUSED = {
    "another schema": (lambda d: d.update(schema="other"), "schema", "found 'other'"),
    "a newer version": (lambda d: d.update(schema_version=2), "schema_version", "a newer release"),
    "a newer version of another shape": (
        lambda d: d.update(schema_version=2, stores=[]),
        "schema_version",
        "a newer release",
    ),
    "an older version": (lambda d: d.update(schema_version=0), "schema_version", "expected 1, found 0"),
    "no schema": (lambda d: d.pop("schema"), "schema", "found None"),
    "an unknown worker type": (lambda d: d.update(worker_type="agg"), "worker_type", "prefill, decode, aggregated"),
    "an unknown target": (lambda d: d.update(target="s"), "target", "one of log_ms, ms, found 's'"),
    "no features": (lambda d: d.update(features=[]), "features", "at least one"),
    "a feature twice": (
        lambda d: d.update(features=["num_decode_requests"] * 2),
        "features[1]",
        "duplicate feature 'num_decode_requests'",
    ),
    "an unknown feature": (lambda d: d["features"].append("zzz"), "features[4]", "unknown feature 'zzz'"),
    "no stores": (lambda d: d.update(stores={}), "stores", "at least one"),
    "an unknown store": (
        lambda d: d["stores"].update(zzz=d["stores"]["pure_decode"]),
        "stores",
        "'zzz'; expected some of pure_decode, contains_locally_mixed, cross_rank_aggregated, pure_prefill",
    ),
    "a store of another role": (of_decode, "stores.contains_locally_mixed", "a decode worker has no such store"),
    "a tree without nodes": (lambda d: [a.clear() for a in tree_of(d).values()], TREE, "at least one node"),
    "an array one short": (lambda d: tree_of(d)["value"].pop(), f"{TREE}.value", "expected 15 nodes as in left"),
    "one child": (one_child, f"{TREE}, node 0", "children out of range"),
    "a child beyond the nodes": (
        lambda d: tree_of(d)["right"].__setitem__(0, 999),
        f"{TREE}, node 0",
        "children out of range",
    ),
    "a child before its parent": (
        lambda d: tree_of(d)["left"].__setitem__(0, 0),
        f"{TREE}, node 0",
        "larger than its parent's",
    ),
    "a node with two parents": (two_parents, f"{TREE}, node 1", "more than one parent"),
    "a feature beyond the list": (
        lambda d: tree_of(d)["feature"].__setitem__(0, 99),
        f"{TREE}, node 0",
        "feature out of range 0..3",
    ),
    "a feature below the list": (
        lambda d: tree_of(d)["feature"].__setitem__(0, -1),
        f"{TREE}, node 0",
        "feature out of range 0..3",
    ),
    "an index beyond 32 bits": (lambda d: tree_of(d)["left"].__setitem__(0, 2**40), "stores", "<= 2147483647"),
    "a number as text": (lambda d: tree_of(d)["threshold"].__setitem__(0, "1"), "stores", "Expected `float`"),
    "a number for a flag": (lambda d: tree_of(d)["missing_left"].__setitem__(0, 1), "stores", "Expected `bool`"),
    "no baseline": (lambda d: d["stores"]["pure_decode"].pop("baseline"), "stores", "missing required field"),
    "an identity that is no object": (
        lambda d: d["metadata"].update(identity="tiny"),
        "metadata.identity",
        "expected an object, found 'tiny'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    change, path, message = REFUSED[case]
    changed = document()
    change(changed)
    with pytest.raises(LearnedModelError) as refusal:
        read_artifact(encoded(changed))
    assert str(refusal.value).startswith("learned forward-pass model: ")
    assert message in str(refusal.value)
    assert refusal.value.path.startswith(path)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"\xff", encoded(document())[:-20], encoded(document()) + b"x", b'{"a": 1e999}'),
        *(b'{"stores": 1, "schema', b'{"stores": 1, "zzz": ' + b"[" * 100_000, b'{"stores": 1, "metadata": "\xff"}'),
    ],
    ids=[
        *("empty", "open", "a list", "not UTF-8", "cut", "more after it", "beyond all numbers"),
        *("cut behind a wrong field", "too deep behind a wrong field", "not UTF-8 behind a wrong field"),
    ],
)
def test_what_is_no_document_is_refused(content):
    with pytest.raises(LearnedModelError, match="^learned forward-pass model: "):
        read_artifact(content)


def test_a_number_that_is_too_large_is_refused():
    text = encoded(document()).replace(b'"baseline": 1.4658369900460526', b'"baseline": 1e999')
    assert text != encoded(document())
    with pytest.raises(LearnedModelError, match=r"out of range"):
        read_artifact(text)


def test_a_file_that_cannot_be_read_is_missing_data(tmp_path):
    with pytest.raises(PerfDataNotAvailableError, match="none.json cannot be read"):
        read_artifact(tmp_path / "none.json")


def test_a_file_is_read_by_its_path(tmp_path):
    path = tmp_path / "artifact.json"
    path.write_bytes(encoded(document()))
    assert read_artifact(path).identity == document()["metadata"]["identity"]


def test_a_forest_without_an_identity_says_so():
    stores = {"pure_decode": StoreForest(1.0, ())}
    assert Artifact("decode", "ms", ("num_decode_requests",), stores, {}).identity is None


# --- anything else ---

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(), st.text(max_size=4), st.just([])
)
SMALL = {
    "schema": "aic_fpm_learned_forward_perf",
    "schema_version": 1,
    "worker_type": "aggregated",
    "target": "ms",
    "features": ["num_decode_requests", "req_batch_size"],
    "stores": {
        "pure_decode": {
            "baseline": 1.0,
            "trees": [
                {
                    "left": [1, -1, 3, -1, -1],
                    "right": [2, -1, 4, -1, -1],
                    "feature": [0, 0, 1, 0, 0],
                    "threshold": [4.5, 0.0, 2.5, 0.0, 0.0],
                    "value": [0.0, -0.5, 0.0, 0.25, 0.5],
                }
            ],
        }
    },
    "metadata": {"identity": {"tp": 1}},
}


def places(document, path=()):
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(places(SMALL))), LEAVES | st.integers(-2, 6)), min_size=1, max_size=3))
def test_a_changed_document_is_refused_or_answers(changes):
    changed = copy.deepcopy(SMALL)
    for path, value in changes:
        with contextlib.suppress(LookupError, TypeError):  # an earlier change took the place away
            place = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
    try:
        artifact = read_artifact(encoded(changed))
    except LearnedModelError:
        return
    for store in artifact.stores.values():
        compiled = store.compiled(artifact.target)
        assert not compiled.predict([0.0] * len(artifact.features)) < 1e-6
        assert indexed(compiled, 2**20) is not None
