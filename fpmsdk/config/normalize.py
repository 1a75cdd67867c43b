"""From what a caller wrote to the canonical configuration: parse, validate, resolve, serialise.

`normalize_config` is strict and looks at the machine only to see that systems paths exist.
`normalize_request` is the layer above it for what people write by hand: presets, `default`, `~`, Python
infinities.
Source: fpm-model.md section 3.3.
"""

import marshal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from fpmsdk._ext.plain import PlainTemplate
from fpmsdk.config.checkpoint import check_architecture
from fpmsdk.config.estimator import AUTOMATIC, RECURSIVE, SPLINE
from fpmsdk.config.fields import CONFIG
from fpmsdk.config.learned_source import pin_learned_source
from fpmsdk.config.parse import parse_document, parse_text
from fpmsdk.config.request import expand_request, resolve_request
from fpmsdk.config.state_snapshot import pin_state_snapshot
from fpmsdk.config.validate import check_systems_paths, validate
from fpmsdk.config.validate_estimator import fitted_kinds
from fpmsdk.errors import ConfigError

if TYPE_CHECKING:
    from fpmsdk.config.model import ForwardPassPerfModelConfig

ConfigInput: TypeAlias = "ForwardPassPerfModelConfig | Mapping[str, Any] | str"


def no_architecture(_name: str) -> bool:
    """A registry without architectures."""
    return False


def normalize_config(config: ConfigInput, is_registered: Callable[[str], bool] = no_architecture) -> dict[str, Any]:
    """Return the full canonical form of a configuration, or say what is wrong with it.

    Parameters: `config`, a mapping, JSON text, or a `ForwardPassPerfModelConfig`. Systems paths must exist as
    written. `is_registered` tells whether an architecture has an operator graph; with a profile, the method `auto`
    depends on it.
    Returns: a new dict of every field in serialisation order, aliases and defaults resolved; normalising it
    again gives the same.
    Raises: `ConfigError` for unknown, repeated, missing or ill-typed fields (`path` names the place) and for
    rules that do not hold; `PerfDataNotAvailableError` when a learned source cannot be read;
    `StateSnapshotIOError` and `StateSnapshotError` when a state snapshot without `sha256` cannot be pinned.
    Source: fpm-model.md section 3.

    >>> config = {"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode", "tp_size": 4}
    >>> normalize_config(config)["tp"]
    4
    >>> normalize_config(config | {"tp": 4})
    Traceback (most recent call last):
        ...
    fpmsdk.errors.ConfigError: invalid forward-pass config at duplicate field `tp`
    """
    document = _document(config)
    key = _key(document, is_registered)
    if (accepted := _accepted.get(key)) is not None:
        known: dict[str, Any] = accepted.copy()
        _check_surroundings(known)
        return known
    parsed = _checked(document)
    _resolve(parsed, is_registered)
    canonical = CONFIG.write(parsed)
    _remember(key, canonical)
    return canonical


# Sweeps and planners build many models from few configurations. One that was accepted is not read again; what lies
# outside of it is looked at every time.
_KEPT = 64
_accepted: dict[Any, PlainTemplate] = {}


def _key(document: Any, is_registered: Callable[[str], bool]) -> Any:
    try:
        # Format 0 depends on the values alone, not on how their objects are shared.
        return marshal.dumps(document, 0), is_registered
    except ValueError:
        return None  # not only plain values


def _remember(key: Any, canonical: dict[str, Any]) -> None:
    # A relative path of a snapshot means another file from another working directory, and what a learned source pins is
    # the file of now.
    is_pinned = canonical["estimator_config"].get("state_snapshot") is not None
    if key is None or is_pinned or canonical["estimation_mode"] == "fpm_learned":
        return
    if len(_accepted) >= _KEPT:
        _accepted.clear()
    _accepted[key] = PlainTemplate(canonical)


def _check_surroundings(config: dict[str, Any]) -> None:
    check_systems_paths(config)
    if (profile := config["fpm_profile"]) is not None:
        check_architecture(profile["model"], profile["model_revision"], profile["architecture"])


def check_config(config: ConfigInput) -> dict[str, Any]:
    """Return a configuration with defaults filled in and every rule checked, but nothing resolved or opened.

    Parameters and errors as `normalize_config`, except that no file is ever needed. The method stays
    `auto`, and non-finite feature weights are floats: use it to read fields, `normalize_config` to store or
    send them.

    Source: fpm-model.md section 3.3.

    Example
    -------
    >>> check_config({"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode"})["estimation_mode"]
    'auto'
    """
    return _checked(_document(config))


def _document(config: ConfigInput) -> Any:
    if isinstance(config, str):
        return parse_text(config)
    return expand_request(config.document()) if hasattr(config, "document") else config


def _checked(document: Any) -> dict[str, Any]:
    parsed = parse_document(document)
    validate(parsed)
    return parsed


def normalize_request(config: ConfigInput, is_registered: Callable[[str], bool] = no_architecture) -> dict[str, Any]:
    """Return the canonical form of what a user wrote, systems paths and presets resolved on this machine.

    As `normalize_config` after `request_document`. This is the form a model is built from.
    Parameters: `config` and `is_registered` as for `normalize_config`.
    Returns: a new dict of every field in serialisation order.
    Raises: as both.
    Source: fpm-model.md sections 2.4 and 3.1.

    >>> config = {"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode"}
    >>> written = normalize_request(config | {"transfer_policy": "balanced", "systems_paths": ["/."]})
    >>> written["transfer_policy"], written["systems_paths"], written["tp"]
    (['xquant', 'xshape'], ['/'], 1)
    """
    return normalize_config(request_document(config), is_registered)


def request_document(config: ConfigInput) -> Any:
    """Return the document that `config` stands for, in the strict form, before any check of its fields.

    `systems_paths` follows `resolve_systems_paths` (empty stays empty for `fpm_regression` and
    `fpm_learned`), `transfer_policy` may be preset text, non-finite feature weights may be Python floats.
    Raises: `SystemsPathError` for an entry that is not a directory, `ConfigError` for malformed text or an
    unknown transfer preset.
    Source: fpm-model.md section 3.1, clients.md section 2.2.

    >>> request_document({"systems_paths": ("/", "/."), "transfer_policy": "balanced"})
    {'systems_paths': ['/'], 'transfer_policy': ['xquant', 'xshape']}
    """
    if isinstance(config, str):
        document = parse_text(config)
    elif isinstance(config, Mapping) or not hasattr(config, "to_dict"):
        document = config
    else:  # a ForwardPassPerfModelConfig; its class need not be loaded to see that
        return config.to_dict()
    return resolve_request(document) if isinstance(document, Mapping) else document


def _resolve(config: dict[str, Any], is_registered: Callable[[str], bool]) -> None:
    """Fill in place what follows from other fields, from a profile and from pinned files."""
    estimator = config["estimator_config"]
    registered = None
    if config["fpm_profile"] is not None:
        from fpmsdk.config.profile_identity import apply_profile  # the document model loads with the first profile

        registered = apply_profile(config, is_registered)
    _resolve_method(config, estimator["fpm_interpolation"], registered)
    fit = estimator["fpm_regression"]["fit"]
    if fit["kind"] == "automatic" and fit["automatic"] is None:
        fit["automatic"] = AUTOMATIC.read({})
    kinds = fitted_kinds(fit)
    for kind, block in (("spline", SPLINE), ("recursive", RECURSIVE)):
        if kind in kinds and fit[kind] is None:
            fit[kind] = block.read({})
    if config["speculation"] is not None and config["speculation"]["kind"] == "none":
        config["speculation"] = None
    if config["estimation_mode"] == "fpm_learned":
        pin_learned_source(estimator)
        if estimator["correction"]["mode"] == "auto":
            estimator["correction"]["mode"] = "hybrid"
    if estimator["state_snapshot"] is not None:
        pin_state_snapshot(estimator["state_snapshot"])


def _resolve_method(config: dict[str, Any], interpolation: dict[str, Any], registered: bool | None) -> None:
    """Choose the lookup method; without a profile nobody knows whether the architecture is registered."""
    path = "estimator_config.fpm_interpolation.method"
    method = interpolation["method"]
    if method == "auto":
        method = "direct" if registered is False else "sol"
    if method == "direct" and registered is None:
        raise ConfigError(f"invalid engine config: {path}: direct needs an fpm_profile", path)
    if method == "direct" and config["database_mode"] != "SILICON":
        raise ConfigError(
            f"invalid engine config: {path}: direct needs database_mode SILICON, found {config['database_mode']!r}",
            path,
        )
    if method == "sol" and registered is False:
        raise ConfigError(
            f"invalid engine config: {path}: sol needs an architecture with an operator graph; use direct", path
        )
    interpolation["method"] = method
