import pytest

from fpmsdk.collect.artifact import validate_native
from fpmsdk.collect.selection import selected_rows
from fpmsdk.errors import CollectionError
from tests.collect.native import PLAN, artifact, cell_of, point, write

CLAMPED = ["context_clamped"]
SEEDED = ["prefill_real_seed"]
GRAPH = {"expected_cudagraph_mode": "FULL", "expected_capture_size": 8, "padding_tokens": 0}


def selected(tmp_path, phase, entries):
    """Benchmark ids that are published of points given as (batch, kv, reasons, regime, further fields)."""
    cell = cell_of(phase, "single")
    tokens = 8 if phase == "prefill" else 0
    points = [
        point(number, phase, batch, tokens, kv, reasons, **dict(*more))
        for number, (batch, kv, reasons, _, *more) in enumerate(entries, 1)
    ]
    raw = write(tmp_path, cell, artifact(points, [entry[3] for entry in entries]))
    collection = validate_native(PLAN, cell, raw)
    return [row + 1 for row in selected_rows(collection, cell.cell_id)]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([(1, 4, [], None), (1, 8, [], None)], [1, 2]),
        ([(3, 6, CLAMPED, None), (3, 6, CLAMPED, None), (3, 6, [], None)], [3]),
        ([(3, 6, [], None), (3, 6, CLAMPED, None)], [1]),
        ([(3, 9, [], None), (3, 6, CLAMPED, None), (3, 6, CLAMPED, None)], [1, 2]),
    ],
)
def test_the_sample_that_was_asked_for_stands_for_lifted_ones_or_the_first_of_these(tmp_path, entries, expected):
    assert selected(tmp_path, "decode", entries) == expected


def test_the_ordinary_sample_stands_for_seeded_prefill_without_kv(tmp_path):
    ordinary = (1, 0, [], "not_applicable")
    assert selected(tmp_path, "prefill", [(1, 0, SEEDED, "real_prefix"), ordinary, (1, 0, SEEDED, "real_prefix")]) == [
        2
    ]


@pytest.mark.parametrize(
    "entries",
    [
        [(1, 0, [], "not_applicable"), (1, 0, [], "not_applicable")],
        [(1, 0, SEEDED, "real_prefix"), (1, 0, SEEDED, "real_prefix")],
        [(1, 0, [], "not_applicable"), (1, 0, [], None)],
        [(1, 0, [], "not_applicable"), (1, 0, [*SEEDED, "explicit"], "real_prefix")],
        [(1, 0, [], "not_applicable"), (1, 0, SEEDED, "real_prefix", GRAPH)],
        [(1, 0, [], "not_applicable"), (1, 0, SEEDED, "real_prefix", {"partition": {"axis": "new"}})],
        [(1, 0, [], "not_applicable"), (1, 0, SEEDED, "real_prefix"), (1, 0, CLAMPED, "legacy")],
        [(1, 16, [], "not_applicable"), (1, 16, SEEDED, "real_prefix")],
    ],
)
def test_samples_that_differ_in_more_than_their_seeding_are_refused(tmp_path, entries):
    with pytest.raises(CollectionError, match="fpm-single-prefill: 2 unclamped samples share one key"):
        selected(tmp_path, "prefill", entries)
