"""Evidence for every kind: what was restored in a fresh interpreter is, bit for bit, what was never interrupted.

Source: snapshot.md section 10.
"""

from pathlib import Path

import pytest

from tests.snapshot.kinds import prepare
from tests.snapshot.processes import run_worker

NAMES = [
    "regression linear",
    "regression linear prefill",
    "regression linear decode",
    "regression linear rebuilt",
    "regression linear signed",
    "regression linear threshold",
    "regression linear threshold decode",
    "regression selected",
    "regression selected five",
    "regression spline",
    "regression spline decode",
    "regression spline periodic",
    "regression recursive",
    "regression recursive decode",
    "regression automatic",
    "op_level fixed",
    "op_level dynamic_local",
    "op_level hybrid",
    "op_level prefill",
    "op_level decode",
    "op_level bounded",
    "op_level uncorrected",
    "fpm_interpolation fixed",
    "fpm_interpolation dynamic_local",
    "fpm_interpolation hybrid",
    "fpm_interpolation in root",
    "execution_profile",
    "learned online",
    "learned online batches",
    "learned online leaf_only",
    "learned causal_selector",
    "learned frozen fixed",
    "learned frozen dynamic_local",
    "learned frozen hybrid",
    "learned frozen decode",
    "learned frozen uncorrected",
    "from_learned",
]
# Correction is off: there is no state that tuning could change.
STATELESS = ("op_level uncorrected", "execution_profile", "learned frozen uncorrected")


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("kinds"))


def test_every_kind_is_named(configs):
    assert sorted(configs) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_model_is_the_uninterrupted_one(configs, name, tmp_path):
    never_interrupted = run_worker("uninterrupted", 1, config=configs[name], folder=str(tmp_path))
    restored = run_worker("restored", 2, config=never_interrupted["config"], folder=str(tmp_path))
    assert restored["saved"] == never_interrupted["saved"]
    assert restored["continued"] == never_interrupted["continued"]
    assert restored["reports"] == never_interrupted["reports"]
    assert state(tmp_path / "restored") == state(tmp_path / "uninterrupted")
    if name not in STATELESS:
        assert state(tmp_path / "restored") != state(tmp_path / "first")
        # Without a difference from models that know less, equality would prove nothing.
        assert never_interrupted["saved"] != never_interrupted["untuned"]
        assert never_interrupted["continued"] != never_interrupted["only_continued"]
        assert never_interrupted["continued"] != never_interrupted["saved"]


def state(folder: Path):
    files = (folder / "state.bin", *sorted((folder / "online").glob("*")))
    return [(file.name, file.read_bytes()) for file in files]
