"""The bytes of a state: an independent reader agrees with the layout on committed files; nothing else is accepted."""

import struct
from pathlib import Path

import numpy as np
import pytest

from fpmsdk import errors
from fpmsdk._ext.snapshot_codec import LayoutCodec, SlotRows
from fpmsdk.perfmodel.state_registry import STATES
from fpmsdk.snapshot.layout import StateField, StateLayout
from fpmsdk.snapshot.state import STATE_LAYOUT_VERSION, StatePart, StateRegistry

GOLDEN = sorted((Path(__file__).parents[1] / "vectors" / "snapshots").glob("*.bin"))

# One digest per layout version. A change of codes or declarations needs a new version, a new line here and new golden
# files (`python -m tests.snapshot.golden`).
DIGESTS = {
    1: "584c0d2d636c9b65ca2503f89c2b1e99ad0bdf0083a94d7222cba4d1619ed955",
    2: "2e69490c145b2a39bdef7d767fd303a6e69abce4aacac101d69197a4c61a0cf1",
}


def test_the_state_does_not_change_within_a_version():
    assert STATES.digest() == DIGESTS[STATE_LAYOUT_VERSION]


# --- an independent reader: written by hand from the documented form, with nothing of the package ---

STORES = (
    "pure_decode",
    "contains_locally_mixed",
    "cross_rank_aggregated",
    "pure_prefill",
    "prefill",
    "decode",
    "mixed",
    *(
        f"{forest}.{query}"
        for forest in ("pure_decode", "contains_locally_mixed", "cross_rank_aggregated", "pure_prefill")
        for query in ("prefill", "decode", "mixed")
    ),
    "selector",
    "learner",
)
SAMPLER = (
    ("axis_min", "d", "axes of the sampler"),
    ("axis_max", "d", "axes of the sampler"),
    ("extent", "q", 3),
    ("coordinates", "d", "rows", "axes of the sampler"),
    ("order", "i", "rows"),
    ("bucket_key", "q", "buckets"),
    ("bucket_start", "i", "buckets", 1),
)
FORMS = {
    1: (
        "linear_store",
        *SAMPLER,
        ("mean", "d", "axes", 1),
        ("scatter", "d", "axes", 1, "square"),
        ("features", "d", "rows", "axes"),
        ("target_ms", "d", "rows"),
        ("clock", "q", 7),
        ("errors", "B", "errors"),
        ("fit_intercept_ms", "d", 1),
        ("fit_slope_ms", "d", "axes"),
        ("fit_mean", "d", "axes"),
        ("fit_scale", "d", "axes"),
        ("fit_flags", "q", 2),
    ),
    2: ("fixed_correction", *SAMPLER, ("ratio", "d", "rows"), ("cell_factor", "d", "buckets")),
    3: (
        "dynamic_local_correction",
        ("axis_min", "d", "axes"),
        ("axis_max", "d", "axes"),
        ("extent", "q", 4),
        ("recent", "d", "recent"),
        ("coordinates", "d", "rows", "axes"),
        ("ratio", "d", "rows"),
        ("sequence", "q", "rows"),
        ("cell_key", "q", "cells"),
        ("cell_factor", "d", "cells"),
        ("global_factor", "d", 1),
    ),
    4: (
        "spline_store",
        *SAMPLER,
        ("mean", "d", "axes", 1),
        ("scatter", "d", "axes", 1, "square"),
        ("features", "d", "rows", "axes"),
        ("target_ms", "d", "rows"),
        ("sequence", "q", "rows"),
        ("clock", "q", 13),
        ("errors", "B", "errors"),
        ("fit_intercept_ms", "d", 1),
        ("fit_slope_ms", "d", "axes"),
        ("fit_mean", "d", "axes"),
        ("fit_scale", "d", "axes"),
        ("fit_flags", "q", 2),
        ("guard_min", "d", 2),
        ("guard_max", "d", 2),
        ("scale", "d", 2),
        ("knot_count", "q", 2),
        ("knots", "d", 6),
        ("basis_mean", "d", 9),
        ("basis_mean_rest", "d", 9),
        ("basis_scatter", "d", 81),
        ("basis_scatter_rest", "d", 81),
        ("spline_exists", "q", 1),
        ("spline_intercept_ms", "d", 1),
        ("spline_slope_ms", "d", 8),
        ("spline_sse", "d", 1),
    ),
    5: (
        "recursive_store",
        ("coefficient_ms", "d", 5),
        ("level", "d", 1),
        ("long_run_level", "d", 1),
        ("mean_error", "d", 1),
        ("information", "d", 25),
        ("moment_ms", "d", 5),
        ("clock", "q", 2),
    ),
    6: ("automatic_choice", ("mean_error", "d", "candidates"), ("answers", "q", "candidates"), ("selected", "q", 1)),
    7: (
        "causal_selector",
        ("observations", "q", 12),
        ("stable_ewma", "d", 12),
        ("online_ewma", "d", 12),
        ("online_selected", "B", 12),
        ("streak", "q", 12),
        ("switches", "q", 12),
    ),
    8: ("online_model", ("clock", "q", 3)),
    9: (
        "online_store",
        ("num_bins", "i", "features"),
        ("column_of", "i", "features"),
        ("threshold_start", "q", "features", 1),
        ("thresholds", "d", "thresholds"),
        ("group_rows", "q", "groups"),
        ("group_sum", "d", "groups"),
        ("columns", "B", "columns", "groups"),
        ("history_ids_sha256", "B", 32),
        ("rates", "d", 3),
        ("limits", "q", 2),
        ("tree_slots", "q", "trees"),
        ("tree_nodes", "q", "trees"),
        ("left", "i", "nodes"),
        ("right", "i", "nodes"),
        ("feature", "i", "nodes"),
        ("bin", "i", "nodes"),
        ("missing_left", "i", "nodes"),
        ("budget", "i", "nodes"),
        ("generation", "q", "nodes"),
        ("value", "d", "nodes"),
        ("refreshed_value", "d", "nodes"),
        ("recent_gradient", "d", "nodes"),
        ("row_ids", "q", "rows"),
        ("stamps", "q", "rows"),
        ("targets", "d", "rows"),
        ("codes", "B", "rows", "features"),
        ("gradients", "d", "recent", "trees"),
        ("clock", "q", 11),
    ),
}


def read_independently(content):
    """[(store, layout, [(field, values)])] of a state."""
    at = 0

    def take(form, count):
        nonlocal at
        values = struct.unpack_from(f"<{count}{form}", content, at)
        at += struct.calcsize(f"<{count}{form}")
        return values

    parts = []
    (num_parts,) = take("Q", 1)
    for _ in range(num_parts):
        store, layout = take("B", 2)
        name, *fields = FORMS[layout]
        lengths, values = {}, []
        for field, form, length, *more in fields:
            if isinstance(length, int):
                values.append((field, take(form, length)))
                continue
            (count,) = take("Q", 1)
            extra = 1 if more[:1] == [1] else 0
            assert lengths.setdefault(length, count - extra) == count - extra
            width = count if "square" in more else lengths[more[0]] if more and isinstance(more[0], str) else 1
            values.append((field, take(form, count * width)))
        parts.append((STORES[store], name, values))
    assert at == len(content)
    return parts


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_an_independent_reader_agrees_field_by_field(path):
    content = path.read_bytes()
    parts = STATES.decode(content)
    assert [(part.store, part.layout.name) for part in parts] == [part[:2] for part in read_independently(content)]
    for part, (_, _, fields) in zip(parts, read_independently(content), strict=True):
        assert list(part.arrays) == [name for name, _ in fields]
        for name, values in fields:
            assert part.arrays[name].reshape(-1).tolist() == list(values), name


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_what_was_read_is_written_again_byte_for_byte(path):
    assert STATES.encode(STATES.decode(path.read_bytes())) == path.read_bytes()


def test_there_is_a_golden_file_for_every_layout():
    seen = {part.layout.name for path in GOLDEN for part in STATES.decode(path.read_bytes())}
    assert seen == {layout.name for layout in STATES.layouts.values()}
    assert len(GOLDEN) == 14


# --- bounded reading ---

LAYOUT = StateLayout(
    "tiny",
    1,
    (
        StateField("flag", "u1", (1,), "", maximum=1),
        StateField("x", "f8", ("rows",), ""),
        StateField("grid", "i4", ("rows", "rows"), "", minimum=-1),
        StateField("starts", "i8", ("rows+1",), "", minimum=0, maximum=9),
        StateField("open", "f8", (2,), "", finite=False),
    ),
)
TINY = StateRegistry(("only", "other"), {7: LAYOUT})


def tiny_state(rows=2):
    arrays = LAYOUT.allocate(rows=rows)
    arrays["x"][:] = np.arange(rows)
    arrays["open"][:] = (float("nan"), float("-inf"))
    return [StatePart("other", LAYOUT, arrays)]


def test_the_bytes_are_the_documented_ones():
    assert TINY.encode(tiny_state(1)) == (
        struct.pack("<QBBB", 1, 1, 7, 0)
        + struct.pack("<Qd", 1, 0.0)
        + struct.pack("<Qi", 1, 0)
        + struct.pack("<Qqq", 2, 0, 0)
        + struct.pack("<dd", float("nan"), float("-inf"))
    )


def test_every_truncation_is_an_error():
    content = TINY.encode(tiny_state())
    for length in range(len(content)):
        with pytest.raises(errors.StateSnapshotError, match="^byte [0-9]+: "):
            TINY.decode(content[:length])


def test_trailing_bytes_are_an_error():
    content = bytes(TINY.encode(tiny_state()))
    with pytest.raises(errors.StateSnapshotError, match=f"byte {len(content)}: expected the end, found 1 more bytes"):
        TINY.decode(content + b"\0")


# Offsets of the counts of a state with two rows: parts, x, grid, starts.
COUNTS = (0, 11, 35, 59)


@pytest.mark.parametrize("offset", COUNTS)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 2**31, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_count_that_does_not_fit_is_refused_before_anything_is_allocated(offset, count):
    content = bytearray(TINY.encode(tiny_state()))
    assert struct.unpack_from("<Q", content, offset)[0] == {0: 1, 59: 3}.get(offset, 2)
    if struct.unpack_from("<Q", content, offset)[0] == count:
        return
    struct.pack_into("<Q", content, offset, count)
    with pytest.raises(errors.StateSnapshotError, match="^byte [0-9]+: "):
        TINY.decode(bytes(content))


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (8, "B", 9, "a store code below 2, found 9"),
        (9, "B", 1, "byte 9: expected a layout code of \\[7\\], found 1"),
        (10, "B", 2, "byte 10: tiny, field flag: expected a number to 1, found 2"),
        (19, "d", float("nan"), "field x: expected a finite number, found nan"),
        (27, "d", float("inf"), "byte 27: tiny, field x: expected a finite number, found inf"),
        (43, "i", -2, "field grid: expected a number from -1, found -2"),
        (67, "q", 10, "field starts: expected a number from 0 to 9, found 10"),
        (75, "q", -1, "byte 75: tiny, field starts: expected a number from 0 to 9, found -1"),
    ],
)
def test_a_value_out_of_its_declared_bounds_is_named(offset, form, value, message):
    content = bytearray(TINY.encode(tiny_state()))
    struct.pack_into(f"<{form}", content, offset, value)
    with pytest.raises(errors.StateSnapshotError, match=message):
        TINY.decode(bytes(content))


def test_an_empty_state_is_eight_zero_bytes():
    assert TINY.encode([]) == bytes(8)
    assert TINY.decode(bytes(8)) == []


def test_every_part_is_told_as_soon_as_its_bytes_are_there():
    told = []
    parts = tiny_state(1) * 3
    content = TINY.encode(parts, lambda piece: told.append(bytes(piece)))
    assert b"".join(told) == content == TINY.encode(parts)
    assert [len(piece) for piece in told] == [8, *[71] * 3]


def test_a_dimension_has_to_be_shown_before_it_is_needed():
    layout = StateLayout("late", 1, (StateField("a", "f8", (2, "rows"), ""),))
    with pytest.raises(ValueError, match="late.a: no earlier field shows the dimension rows"):
        LayoutCodec(layout)


def test_arrays_that_do_not_fit_their_declaration_are_not_written():
    (part,) = tiny_state()
    part.arrays["x"] = part.arrays["x"].astype("f4")
    with pytest.raises(errors.StateLayoutError, match="field x: expected float64"):
        TINY.encode([part])


# --- rows that are copied only when they are encoded ---

ROWS = StateLayout(
    "rows",
    1,
    (
        StateField("axes", "f8", ("axes",), ""),
        StateField("x", "f8", ("rows", "axes"), "", minimum=0.0, maximum=1e6),
        StateField("y", "f8", ("rows",), "", finite=False),
        StateField("key", "i8", ("rows",), ""),
    ),
)
STATE_OF_ROWS = StateRegistry(("only",), {1: ROWS})


def stored_rows(slots, num_rows=5000):
    rows = np.arange(num_rows, dtype=float)
    slots = np.array(slots, np.int32)
    return [
        StatePart(
            "only",
            ROWS,
            {
                "axes": np.array([8.0, 9.0]),
                "x": SlotRows(np.stack([rows, rows + 0.5], axis=1), slots),
                "y": SlotRows(-rows, slots),
                "key": SlotRows(rows.astype("i8") * 3, slots),
            },
        )
    ]


def test_rows_are_written_in_the_order_of_their_slots():
    assert STATE_OF_ROWS.encode(stored_rows([2, 0, 4])) == (
        struct.pack("<QBBQdd", 1, 0, 1, 2, 8.0, 9.0)
        + struct.pack("<Qdddddd", 3, 2.0, 2.5, 0.0, 0.5, 4.0, 4.5)
        + struct.pack("<Qddd", 3, -2.0, -0.0, -4.0)
        + struct.pack("<Qqqq", 3, 6, 0, 12)
    )


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 1024, 1025, 4999])
def test_any_number_of_rows_is_written(count):
    slots = np.random.default_rng(count).permutation(5000)[:count]
    (part,) = STATE_OF_ROWS.decode(STATE_OF_ROWS.encode(stored_rows(slots)))
    assert part.arrays["x"].tolist() == [[slot, slot + 0.5] for slot in slots]
    assert part.arrays["y"].tolist() == [-slot for slot in slots]
    assert part.arrays["key"].tolist() == [3 * slot for slot in slots]


@pytest.mark.parametrize("slot", [-1, 5000])
def test_a_slot_outside_of_its_array_is_not_read(slot):
    with pytest.raises(errors.StateSnapshotError, match=f"slots from 0 to 4999, found {slot}"):
        STATE_OF_ROWS.encode(stored_rows([*range(600), slot]))


@pytest.mark.parametrize(("value", "message"), [(-1.0, "at least 0.0, found -1.0"), (np.nan, "finite numbers")])
def test_a_row_out_of_its_declared_bounds_is_not_written(value, message):
    parts = stored_rows(range(3000))
    parts[0].arrays["x"].array[2999, 1] = value
    with pytest.raises(errors.StateLayoutError, match=f"field x: expected {message}"):
        STATE_OF_ROWS.encode(parts)
    # A slot that nothing names may hold anything.
    STATE_OF_ROWS.encode(stored_rows(range(2999)))


@pytest.mark.parametrize("slots", [np.zeros(2, "i8"), np.zeros(4, "i4")[::2], np.zeros((1, 2), "i4")])
def test_slots_are_one_run_of_32_bits(slots):
    with pytest.raises(TypeError, match="int32 slots"):
        SlotRows(np.zeros(3), slots)


# --- values beside their bounds ---


def bounded(values, **declared):
    layout = StateLayout("bounded", 1, (StateField("x", "f8", ("rows",), "", **declared),))
    registry = StateRegistry(("only",), {1: layout})
    content = struct.pack("<QBBQ", 1, 0, 1, len(values)) + struct.pack(f"<{len(values)}d", *values)
    (part,) = registry.decode(content)
    assert registry.encode([part]) == content


INF, NAN = float("inf"), float("nan")
TINY_POSITIVE, LARGEST = 5e-324, 1.7976931348623157e308


@pytest.mark.parametrize("place", [0, 1, 1023, 1024, 2499])
@pytest.mark.parametrize(
    ("value", "declared", "accepted"),
    [
        (0.0, {"minimum": 0.0}, True),
        (-0.0, {"minimum": 0.0}, True),
        (0.0, {"maximum": 0.0, "minimum": -9.0}, True),
        (TINY_POSITIVE, {"minimum": 0.0}, True),
        (-TINY_POSITIVE, {"minimum": 0.0}, False),
        (LARGEST, {"minimum": 0.0}, True),
        (-LARGEST, {}, True),
        (INF, {}, False),
        (-INF, {}, False),
        (NAN, {}, False),
        (-NAN, {}, False),
        (INF, {"minimum": 0.0}, False),
        (INF, {"finite": False}, True),
        (-INF, {"finite": False}, True),
        (NAN, {"finite": False}, True),
        (-INF, {"finite": False, "minimum": 0.0}, False),
        (1.0000000000000002, {"minimum": 0.0, "maximum": 1.0}, False),
        (0.9999999999999999, {"minimum": 1.0, "maximum": 2.0}, False),
    ],
)
def test_a_number_is_judged_exactly_wherever_it_stands(value, declared, accepted, place):
    values = [declared.get("minimum", 0.0)] * 2500
    values[place] = value
    if accepted:
        bounded(values, **declared)
        return
    with pytest.raises(errors.StateSnapshotError, match=f"byte {18 + 8 * place}: .* found {value}"):
        bounded(values, **declared)
