"""Writes the golden states: `python -m tests.snapshot.golden`. Only after a new `STATE_LAYOUT_VERSION`."""

import tempfile
from pathlib import Path

import msgspec

from fpmsdk import ForwardPassPerfModel
from tests.snapshot.kinds import iterations, prepare

FOLDER = Path(__file__).parents[1] / "vectors" / "snapshots"
NAMES = {
    "regression_linear": "regression linear",
    "regression_linear_threshold": "regression linear threshold",
    "regression_selected": "regression selected",
    "regression_spline": "regression spline",
    "regression_recursive": "regression recursive",
    "regression_automatic": "regression automatic",
    "op_level_fixed": "op_level fixed",
    "op_level_dynamic_local": "op_level dynamic_local",
    "op_level_hybrid": "op_level bounded",
    "fpm_interpolation": "fpm_interpolation hybrid",
    "execution_profile": "execution_profile",
    "learned_online": "learned online batches",
    "learned_causal_selector": "learned causal_selector",
    "learned_frozen": "learned frozen hybrid",
}


def main():
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        configs = prepare(Path(folder) / "data")
        for name, kind in NAMES.items():
            model = ForwardPassPerfModel.best_available(configs[kind])
            model.tune_with_fpms([[rank] for rank in iterations(configs[kind], "train", 150)])
            model.save_state_snapshot(Path(folder) / name)
            (FOLDER / f"{name}.bin").write_bytes(state_of(Path(folder) / name))


def state_of(folder):
    """The state in a snapshot; that of a learner alone lies in its checkpoint."""
    content = (folder / "state.bin").read_bytes()
    if content == bytes(8) and (folder / "online").exists():
        return msgspec.msgpack.decode((folder / "online" / "state.bin").read_bytes())["parts"]
    return content


if __name__ == "__main__":
    main()
