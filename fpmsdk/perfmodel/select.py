"""Which estimator a configuration selects: candidate order, safe failures, provenance.

Source: fpm-model.md section 4.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from fpmsdk.errors import (
    MissingCapabilityError,
    PerfDataNotAvailableError,
    UnknownSystemError,
    UnlistedVersionError,
    UnsupportedAttentionBackendError,
    UnsupportedModelError,
)
from fpmsdk.perfmodel.kind import Kind, Verified
from fpmsdk.perfmodel.regression import RegressionKind
from fpmsdk.snapshot.identity import is_from_learned

NOTHING_READ: Verified = {}

# Candidates of mode `auto`, best first.
PRIORITY = ("op_level", "fpm_interpolation", "fpm_regression")

# Names under which a failed candidate is reported.
REPORTED_NAMES = {"op_level": "OpLevel", "fpm_interpolation": "FpmInterpolation"}

# Failures after which the next candidate is tried; every other one is a fault that must not be hidden.
FALLBACK_SAFE = (
    MissingCapabilityError,
    OSError,
    PerfDataNotAvailableError,
    UnknownSystemError,
    UnlistedVersionError,
    UnsupportedAttentionBackendError,
    UnsupportedModelError,
)


class Selection(NamedTuple):
    """The model kind that was built and why.

    `config` is the canonical configuration that repeats this selection, `failures` lists the candidates before it.
    """

    kind: Kind
    requested_mode: str
    config: dict[str, Any]
    systems_root: str | None
    failures: tuple[str, ...]

    @property
    def warning(self) -> str | None:
        """The failures as one line, None when the first candidate was taken."""
        return "; ".join(self.failures) or None

    def provenance(self) -> dict[str, Any] | None:
        """The record that `diagnostics()` reports; None for a model that was built from an artifact alone."""
        if is_from_learned(self.config):
            return None
        return {
            "config": self.config,
            "selected_systems_root": self.systems_root,
            "requested_estimation_mode": self.requested_mode,
            "selected_estimation_mode": self.kind.mode,
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


def select(config: dict[str, Any], verified: Verified = NOTHING_READ) -> Selection:
    """Build the first candidate that can be built.

    Parameters
    ----------
    config: result of `fpmsdk.config.normalize_request`.
    verified: contents of files that must not be read again.

    Raises
    ------
    The failure of the last candidate when none can be built, and at once any failure that is not safe to skip.
    """
    requested = config["estimation_mode"]
    order = candidates(requested, config["fallback_policy"])
    failures: list[str] = []
    for mode in order:
        try:
            built = BUILDERS[mode](config, verified)
        except FALLBACK_SAFE as error:
            if mode == order[-1]:
                raise
            failures.append(f"{REPORTED_NAMES[mode]}: {error}")
            continue
        pinned = built.config | {"estimation_mode": mode, "fallback_policy": "deny"}
        return Selection(built.kind, requested, pinned, built.systems_root, tuple(failures))
    raise AssertionError("candidates() returns at least one mode")


class _Built(NamedTuple):
    kind: Kind
    config: dict[str, Any]
    systems_root: str | None


def _regression(config: dict[str, Any], _verified: Verified) -> _Built:
    return _Built(RegressionKind(config), config, None)


def _op_level(config: dict[str, Any], verified: Verified) -> _Built:
    # The op graph and the performance database load with the first native model.
    from fpmsdk.perfmodel.oplevel import build_op_level

    return _first_root(config, verified, build_op_level)


def _fpm_interpolation(config: dict[str, Any], verified: Verified) -> _Built:
    from fpmsdk.perfmodel.wholeforward import build_whole_forward

    return _first_root(config, verified, build_whole_forward)


def _learned(config: dict[str, Any], verified: Verified) -> _Built:
    from fpmsdk.perfmodel.learned import build_learned

    return _Built(build_learned(config, verified), config, None)


def _first_root(
    config: dict[str, Any],
    verified: Verified,
    build: Callable[[dict[str, Any], str, Verified], tuple[Kind, dict[str, Any]]],
) -> _Built:
    from fpmsdk.config.systems import HOW_TO_GET_DATA

    failure: Exception = UnknownSystemError(f"failed to find performance data roots; {HOW_TO_GET_DATA}")
    for root in config["systems_paths"]:
        try:
            kind, pinned = build(config, root, verified)
        except FALLBACK_SAFE as error:
            failure = error
            continue
        return _Built(kind, pinned, root)
    raise failure


BUILDERS: dict[str, Callable[[dict[str, Any], Verified], _Built]] = {
    "op_level": _op_level,
    "fpm_interpolation": _fpm_interpolation,
    "fpm_regression": _regression,
    "fpm_learned": _learned,
}
