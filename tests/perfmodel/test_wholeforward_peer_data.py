"""Whole-forward lookups of a registered model, carried over by the roofline of its operators, beside the peer's."""

import os
import shutil
from pathlib import Path

import pytest

from fpmsdk import ForwardPassPerfModel
from fpmsdk.errors import PerfDataNotAvailableError
from tests.perfdb.pairs import VERSION, row, write_pair
from tests.perfmodel.deployments import rank
from tests.vectors import load_vectors

VECTORS = load_vectors("fpm_interpolation_peer")
MODEL = "Qwen/Qwen3-32B"


@pytest.mark.peer_data
def test_answers_for_a_registered_model_are_those_of_the_peer(tmp_path):
    public = Path(os.environ["FPMSDK_TEST_SYSTEMS_013"])
    root = tmp_path / "systems"
    root.mkdir()
    shutil.copy(public / "h200_sxm.yaml", root)
    (tmp_path / "model_configs").symlink_to(public.parent / "model_configs")
    rows = [
        row(kind, *at, latency_ms, model=MODEL, system="h200_sxm")
        for kind, *at, latency_ms in VECTORS["table"]["models"]["flat"]
    ]
    write_pair(root / "data" / "h200_sxm" / "vllm" / VERSION, rows, system="h200_sxm")
    model = ForwardPassPerfModel.best_available(
        {
            "model": MODEL,
            "system": "h200_sxm",
            "backend": "vllm",
            "backend_version": VERSION,
            "worker_type": "aggregated",
            "estimation_mode": "fpm_interpolation",
            "systems_paths": [str(root)],
        }
    )
    assert model.diagnostics()["provenance"]["config"]["estimator_config"]["fpm_interpolation"] == {"method": "sol"}
    for counts, expected in VECTORS["sol_registered_model"]["rows"]:
        if isinstance(expected, dict):
            with pytest.raises(PerfDataNotAvailableError) as caught:
                model.estimate_forward_pass_time_ms(rank(*counts))
            assert expected["contains"] in str(caught.value)
        else:
            assert model.estimate_forward_pass_time_ms(rank(*counts)) == expected
