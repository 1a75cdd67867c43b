"""Declared state layouts: committed digests, growth and checks."""

import numpy as np
import pytest

from fpmsdk import ForwardPassPerfModel, FpmBatch, errors, sample
from fpmsdk.perfmodel.correction import DYNAMIC_STORE, FIXED_STORE
from fpmsdk.perfmodel.online_state import CAUSAL_SELECTOR, ONLINE_MODEL, ONLINE_STORE
from fpmsdk.perfmodel.recursive_layouts import CHOICE, RECURSIVE_STORE
from fpmsdk.perfmodel.regression_layouts import LINEAR_STORE
from fpmsdk.perfmodel.spline_layout import SPLINE_STORE
from fpmsdk.snapshot import StateField, StateLayout

# One digest per layout version. A change of the declaration needs a new version and a new line here.
DIGESTS = {
    ("linear_store", 1): "fbaf08e8aece217f36c271c0947d423e69f07e68d8117d8f16b0a13f12802ea8",
    ("fixed_correction", 1): "bd1b93fad6f8157b1c5b24795ec77fe873c72d1ca5b7a1fc4312cd8690d6e7b4",
    ("dynamic_local_correction", 1): "887daf2c3e1c916a71418f4c652b806ae2d64f4732f79e8b5b26fd3ddb9ab633",
    ("linear_store", 2): "c7263ad9efef4e8543f891d0fdc264a56be219af40b853c298d107903007e2f9",
    ("fixed_correction", 2): "db058648d5fea612e4bdf6dfa3281ac7104a158946722a805dc7abb8a2fe698f",
    ("spline_store", 1): "74b64ef1c7da4a70463cb16ce803add630e757c8b289d4719ba0b06b2d33d034",
    ("dynamic_local_correction", 2): "a9a9d3f9f8923027b123bf3b7aff925601129eed7502ca8860e0038edece621d",
    ("recursive_store", 1): "b10a11da6d718ffdacd71a19720ecd02eaafb0b639a784322029bbec6505fb9d",
    ("automatic_choice", 1): "bbfb225c4847fa449261714c3947a7a38ac5a35e85126dc9c950bbc713f70ca9",
    ("online_model", 1): "bf943bd2a3d404c35c0e483fd604ff8715a9c3eefc0e7409501572879af40d16",
    ("online_store", 1): "2827606416b028546db2ecfd149c88c177f31fc35a01f693351e017e8f4c1244",
    ("causal_selector", 1): "a613f43b2b8952bfad6583b12fe597c24a08814c09128212d6d0861b9cb8155c",
}
LAYOUTS = [
    *(LINEAR_STORE, SPLINE_STORE, RECURSIVE_STORE, CHOICE, FIXED_STORE, DYNAMIC_STORE),
    *(ONLINE_MODEL, ONLINE_STORE, CAUSAL_SELECTOR),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_declaration_does_not_change_within_a_version(layout):
    assert layout.digest() == DIGESTS[layout.name, layout.version]


@pytest.mark.parametrize(
    "changed",
    [
        StateField("a", "f4", ("rows",), ""),
        StateField("b", "f8", ("rows",), ""),
        StateField("a", "f8", ("rows+1",), ""),
        StateField("a", "f8", ("rows",), "", minimum=0.0),
        StateField("a", "f8", ("rows",), "", maximum=0.0),
        StateField("a", "f8", ("rows",), "", finite=False),
    ],
)
def test_the_digest_sees_every_part_of_a_field_but_its_description(changed):
    original = StateLayout("x", 1, (StateField("a", "f8", ("rows",), ""),))
    assert StateLayout("x", 1, (changed,)).digest() != original.digest()
    assert StateLayout("x", 1, (StateField("a", "f8", ("rows",), "described"),)).digest() == original.digest()


LAYOUT = StateLayout(
    "x",
    1,
    (
        StateField("values", "f8", ("rows", "axes"), "", minimum=0.0, maximum=9.0),
        StateField("starts", "i8", ("rows+1",), ""),
        StateField("clock", "i8", (2,), ""),
    ),
)


def test_growing_keeps_every_element_and_never_shrinks():
    arrays = LAYOUT.allocate(rows=2, axes=3)
    arrays["values"][:] = [[1, 2, 3], [4, 5, 6]]
    arrays["starts"][:] = [7, 8, 9]
    grown = LAYOUT.grow(arrays, rows=4, axes=1)
    assert LAYOUT.dims(grown) == {"rows": 4, "axes": 3}
    assert grown["values"].tolist() == [[1, 2, 3], [4, 5, 6], [0, 0, 0], [0, 0, 0]]
    assert grown["starts"].tolist() == [7, 8, 9, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("clock"), "expected fields"),
        (lambda a: a.update(values=a["values"].astype("f4")), "field values: expected float64"),
        (lambda a: a.update(starts=np.zeros(2, "i8")), "field starts: expected int64 with shape \\(3,\\)"),
        (lambda a: a["values"].fill(np.nan), "field values: expected finite numbers"),
        (lambda a: a["values"].fill(-1.0), "field values: expected at least 0.0, found -1.0"),
        (lambda a: a["values"].fill(10.0), "field values: expected at most 9.0, found 10.0"),
    ],
)
def test_state_that_does_not_fit_is_named(change, message):
    arrays = LAYOUT.allocate(rows=2, axes=1)
    change(arrays)
    with pytest.raises(errors.StateLayoutError, match=message):
        LAYOUT.check(arrays)


def test_the_state_of_a_tuned_model_fits_its_declaration():
    config = {"model": "m", "system": "s", "backend": "vllm", "worker_type": "aggregated"}
    model = ForwardPassPerfModel.best_available(config | {"estimation_mode": "fpm_regression"})
    model.tune_with_fpms(FpmBatch.from_frames(sample.train_frames()[:2000]))
    for store in model._estimator.stores().values():
        LINEAR_STORE.check(store.arrays)
