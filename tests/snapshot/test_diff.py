"""What differs between two saved states, for every kind."""

import pytest

from fpmsdk import ForwardPassPerfModel
from fpmsdk.perfmodel.state_diff import diff_snapshots
from tests.snapshot.kinds import iterations, prepare
from tests.snapshot.test_evidence import NAMES, STATELESS


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("kinds"))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in STATELESS])
def test_a_state_differs_from_that_after_one_more_observation_alone(name, configs, tmp_path):
    model = ForwardPassPerfModel.best_available(configs[name])
    frames = iterations(configs[name], "train", 30)
    model.tune_with_fpms([[rank] for rank in frames[:-1]])
    model.save_state_snapshot(tmp_path / "before")
    assert diff_snapshots(tmp_path / "before", tmp_path / "before")["equal"]
    model.tune_with_fpms([[frames[-1]]])
    model.save_state_snapshot(tmp_path / "after")
    found = diff_snapshots(tmp_path / "before", tmp_path / "after")
    assert not found["equal"] and found["identity"] is None
    changed = [store for store in found["stores"] if store["changed"]]
    assert changed and all(store["fields"] and store["only"] is None for store in changed)
