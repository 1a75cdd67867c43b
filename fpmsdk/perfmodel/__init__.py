"""The forward-pass performance model: selection, estimators, corrections, readiness."""
