"""`fpmsdk doctor`: what is installed, where data and caches are, and how fast the compiled code runs here."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pkgutil
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from fpmsdk.cli.console import NEGATIVE_RESULT, JsonOption, show

_DEPENDENCIES = (
    "ijson",
    "msgspec",
    "numpy",
    "packaging",
    "platformdirs",
    "pyarrow",
    "pydantic",
    "pyyaml",
    "rich",
    "typer",
    "xxhash",
)


def doctor(json: JsonOption = False) -> None:
    """Check this installation.

    Exits with 1 when a compiled module or a dependency is missing.
    """
    extensions = _extensions()
    document: dict[str, Any] = {
        "versions": _versions(),
        "cache_directory": _cache_directory(),
        "data_roots": _data_roots(),
        "compiled_extensions": extensions,
    }
    broken = [name for name, state in extensions.items() if state != "ok"]
    broken += [name for name, version in document["versions"].items() if version is None]
    document["timing"] = {} if broken else _timing()
    document["healthy"] = not broken
    show(document, json, *(_table(title, rows) for title, rows in document.items() if isinstance(rows, dict)))
    if broken:
        typer.echo(f"broken: {', '.join(broken)}; install fpmsdk again", err=True)
        raise typer.Exit(NEGATIVE_RESULT)


def _table(title: str, rows: dict[str, Any]) -> Table:
    table = Table(title=title.replace("_", " "), show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else str(value))
    return table


def _versions() -> dict[str, str | None]:
    from fpmsdk import __version__

    versions: dict[str, str | None] = {
        "fpmsdk": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in _DEPENDENCIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _cache_directory() -> dict[str, str]:
    from fpmsdk.paths import CACHE_VARIABLE, cache_dir

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        directory = cache_dir()
    found = {
        "directory": "none is writable" if directory is None else str(directory),
        CACHE_VARIABLE: os.environ.get(CACHE_VARIABLE, "not set"),
    }
    return found | ({"warning": str(caught[0].message)} if caught else {})


def _data_roots() -> dict[str, str]:
    from fpmsdk.config.systems import ENVIRONMENT, installed_systems_roots

    roots = {}
    for variable in ENVIRONMENT:
        path = os.environ.get(variable)
        missing = path is not None and not Path(path).is_dir()
        roots[variable] = "not set" if path is None else f"{path}{' (no such directory)' if missing else ''}"
    return roots | {distribution: root or "no data" for distribution, root in installed_systems_roots().items()}


def _extensions() -> dict[str, str]:
    import fpmsdk._ext

    states = {}
    for module in pkgutil.iter_modules(fpmsdk._ext.__path__):
        try:
            importlib.import_module(f"fpmsdk._ext.{module.name}")
            states[module.name] = "ok"
        except ImportError as fault:
            states[module.name] = f"does not load: {fault}"
    return states or {"none": "no compiled module is installed"}


def _timing() -> dict[str, float]:
    """Microseconds of each call on this machine, over the sample telemetry."""
    import msgspec

    from fpmsdk import ForwardPassPerfModel, FpmBatch, replay_trace, sample
    from fpmsdk.metrics import decode_frame

    frames = sample.eval_frames()[:1000]
    batch = FpmBatch.from_frames(frames)
    dicts = [msgspec.to_builtins(decode_frame(frame)) for frame in frames]
    model = ForwardPassPerfModel.best_available(sample.MODEL)
    model.tune_with_fpms(batch)
    each = 1e6 / len(frames)

    def estimate(iterations: list[Any]) -> Callable[[], object]:
        return lambda: [model.estimate_forward_pass_time_ms(iteration) for iteration in iterations]

    run = sample.eval_run()
    replay = replay_trace(run.trace, launch=sample.launch(run), timing=model)
    return {
        "estimate from a dict, us": _best(estimate(dicts)) * each,
        "estimate from a frame, us": _best(estimate(frames)) * each,
        "estimate in a batch, us": _best(lambda: model.estimate_many(batch)) * each,
        "tune in a batch, us": _best(lambda: model.tune_with_fpms(batch)) * each,
        "diagnostics, us": _best(model.diagnostics) * 1e6,
        "replay of a pass, us": replay.summary["wall_time_ms"] * 1e3 / len(replay.passes),
    }


def _best(call: Callable[[], object], rounds: int = 5) -> float:
    elapsed = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        elapsed.append(time.perf_counter() - begun)
    return min(elapsed)
