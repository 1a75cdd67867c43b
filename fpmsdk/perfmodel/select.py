"""Which estimator a configuration selects: candidate order, safe failures, provenance.

Source: fpm-model.md section 4.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from fpmsdk._ext.estimator import Estimator
from fpmsdk.errors import MissingCapabilityError, PerfDataNotAvailableError
from fpmsdk.perfmodel.regression import build_regression

# Candidates of mode `auto`, best first.
PRIORITY = ("op_level", "fpm_interpolation", "fpm_regression")

# Names under which a failed candidate is reported.
REPORTED_NAMES = {"op_level": "OpLevel", "fpm_interpolation": "FpmInterpolation"}

# Failures after which the next candidate is tried; every other one is a fault that must not be hidden.
FALLBACK_SAFE = (MissingCapabilityError, PerfDataNotAvailableError, OSError)


class Selection(NamedTuple):
    """The estimator that was built and why.

    `config` is the canonical configuration that repeats this selection, `failures` lists the candidates before it.
    """

    estimator: Estimator
    mode: str
    requested_mode: str
    config: dict[str, Any]
    systems_root: str | None
    failures: tuple[str, ...]

    @property
    def warning(self) -> str | None:
        """The failures as one line, None when the first candidate was taken."""
        return "; ".join(self.failures) or None

    def provenance(self) -> dict[str, Any]:
        """The record that `diagnostics()` reports."""
        return {
            "config": self.config,
            "selected_systems_root": self.systems_root,
            "requested_estimation_mode": self.requested_mode,
            "selected_estimation_mode": self.mode,
            "selection_failures": list(self.failures),
        }


def candidates(mode: str, fallback_policy: str) -> tuple[str, ...]:
    """Modes to try in order.

    Example
    -------
    >>> candidates("fpm_interpolation", "allow")
    ('fpm_interpolation', 'op_level', 'fpm_regression')
    """
    if mode == "auto":
        return PRIORITY
    if fallback_policy == "deny":
        return (mode,)
    others = PRIORITY if fallback_policy == "allow" else ("fpm_regression",)
    return (mode, *(other for other in others if other != mode))


def select(config: dict[str, Any]) -> Selection:
    """Build the first candidate that can be built.

    Parameters
    ----------
    config: result of `fpmsdk.config.normalize_request`.

    Raises
    ------
    The failure of the last candidate when none can be built, and at once any failure that is not safe to skip.
    """
    requested = config["estimation_mode"]
    order = candidates(requested, config["fallback_policy"])
    failures: list[str] = []
    for mode in order:
        try:
            estimator = BUILDERS[mode](config)
        except FALLBACK_SAFE as error:
            if mode == order[-1]:
                raise
            failures.append(f"{REPORTED_NAMES[mode]}: {error}")
            continue
        pinned = config | {"estimation_mode": mode, "fallback_policy": "deny"}
        return Selection(estimator, mode, requested, pinned, None, tuple(failures))
    raise AssertionError("candidates() returns at least one mode")


def _no_native_engine(config: dict[str, Any]) -> Estimator:
    raise MissingCapabilityError(
        "estimation from the public performance database and from whole-forward tables is not part of this "
        "release; use estimation_mode 'fpm_regression'"
    )


BUILDERS: dict[str, Callable[[dict[str, Any]], Estimator]] = {
    "op_level": _no_native_engine,
    "fpm_interpolation": _no_native_engine,
    "fpm_regression": build_regression,
}
