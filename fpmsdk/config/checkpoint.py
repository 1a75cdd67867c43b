"""The `config.json` of a pinned checkpoint: a local directory, the local hub cache, or a download at its revision.

Only metadata is read, never weights or code. Source: fpm-interpolation.md section 6, field `architecture`.
"""

import os
from functools import lru_cache
from typing import Any

from fpmsdk.errors import ConfigError

_PATH = "fpm_profile.architecture"
_TIMEOUT_S = 10


def check_architecture(model: str, revision: str, architecture: str) -> None:
    """Check that a checkpoint has an architecture.

    Raises: `ConfigError` when its `config.json` cannot be had, declares none or another one.
    """
    config = read_checkpoint_config(model, revision)
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str) or not names[0].strip():
        raise ConfigError(f"{_PATH}: config.json of {model!r} declares no architectures", _PATH)
    if names[0] != architecture:
        raise ConfigError(
            f"{_PATH}: checkpoint {model!r} at {revision!r} is a {names[0]!r}, the profile says {architecture!r}", _PATH
        )


def read_checkpoint_config(model: str, revision: str) -> dict[str, Any]:
    """The `config.json` of a pinned checkpoint, its language model's part laid over the rest.

    Raises: `ConfigError` when it cannot be had or is no object.
    """
    local = os.path.expanduser(model)
    is_local = os.path.exists(local) or os.path.isabs(local) or model.startswith(("./", "../", "~"))
    try:
        config = _parsed(os.path.join(local, "config.json")) if is_local else _from_hub(model, revision)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{_PATH}: cannot verify it: config.json of {model!r} at {revision!r}: {error}; make the pinned checkpoint "
            "available as a local directory or in the hub cache",
            _PATH,
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{_PATH}: config.json of {model!r} must be a JSON object", _PATH)
    language = config.get("text_config")
    return config | language if isinstance(language, dict) else config


def _parsed(path: str) -> Any:
    # Read again only when the file is another one.
    state = os.stat(path)
    return _parsed_state(path, (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=64)
def _parsed_state(path: str, _state: tuple[int, ...]) -> Any:
    with open(path, "rb") as file:
        return _decoded(file.read())


def _from_hub(model: str, revision: str) -> Any:
    home = os.environ.get("HF_HOME", os.path.join(os.path.expanduser("~"), ".cache", "huggingface"))
    cache = os.environ.get("HF_HUB_CACHE", os.path.join(home, "hub"))
    cached = os.path.join(cache, "models--" + model.replace("/", "--"), "snapshots", revision, "config.json")
    if os.path.isfile(cached):
        return _parsed(cached)
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise OSError(f"not in the hub cache ({cached}), and HF_HUB_OFFLINE forbids a download")
    import urllib.request

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    with urllib.request.urlopen(f"{endpoint}/{model}/resolve/{revision}/config.json", timeout=_TIMEOUT_S) as response:
        return _decoded(response.read())


def _decoded(content: bytes) -> Any:
    import json  # most configurations pin no checkpoint

    return json.loads(content)
