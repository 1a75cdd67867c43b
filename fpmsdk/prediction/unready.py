"""Why a model cannot price a replay, in words that say what to do.

Source: predict-recommend.md section 12.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fpmsdk.perfmodel.model import ForwardPassPerfModel


def reason_of_unready(model: ForwardPassPerfModel) -> str | None:
    """What the model lacks to price a pass; None when it is ready."""
    report = model.diagnostics()
    if report["readiness"] == "ready":
        return None
    config = (report["provenance"] or {}).get("config") or {}
    name = f"{config.get('model')} on {config.get('system')}"
    if report["source"] == "fpm_regression" or config.get("estimation_mode") == "fpm_regression":
        return (
            f"fpm_regression for {name}: training observations required; name a saved model with "
            "estimator_config.state_snapshot, or use op_level or fpm_interpolation"
        )
    failures = (report["provenance"] or {}).get("selection_failures") or []
    reasons = "; ".join(dict.fromkeys(failures)) or "no estimator has data for it"
    return f"no timing data for {name}: {reasons}"
