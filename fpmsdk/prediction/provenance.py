"""What prices the passes of a role, and which data it reads.

Source: predict-recommend.md section 4 (step 6).
"""

from __future__ import annotations

from typing import Any

from fpmsdk.prediction.config import PredictConfig
from fpmsdk.prediction.deployment import SizedRole

_IDENTITY = ("model", "system", "backend", "backend_version", "tp", "attention_dp", "moe_tp_size", "moe_ep_size")


def provenance_of(config: PredictConfig, role: SizedRole) -> dict[str, Any]:
    """Estimator, source and version of the data of one role.

    Parameters
    ----------
    role: of the configuration.

    Returns
    -------
    `estimator` (the estimation mode, or the formula), `timing_source`, `data_version` (the revision of the model that
    a profile names, else None with a `data_version_reason`); of an estimator also `requested_estimation_mode`,
    `systems_root`, `selection_failures` and `data_identity`, the deployment whose data it reads.
    """
    if role.model is None:
        return {"data_version": None, "estimator": role.timing["type"], "timing_source": "configured"}
    record = role.model.diagnostics()["provenance"]
    canonical = record["config"]
    profile = config.engine.fpm_profile
    # A profile names the revision of the model that was measured.
    version = None if profile is None else profile.get("model_revision")
    found: dict[str, Any] = {
        "data_version": version,
        "estimator": record["selected_estimation_mode"],
        "timing_source": "aic",
        "requested_estimation_mode": record["requested_estimation_mode"],
        "systems_root": record["selected_systems_root"],
        "selection_failures": record["selection_failures"],
        "data_identity": {name: canonical[name] for name in _IDENTITY},
    }
    if version is None:
        found["data_version_reason"] = "no fpm_profile names the revision of the model that was measured"
    if (snapshot := canonical["estimator_config"].get("state_snapshot")) is not None:
        found["state_snapshot"] = snapshot
    return found
