"""`fpmsdk warmup`: prepare every cache, so that an image starts warm and a read-only install need not write.

`WARMERS` is the registry: whoever caches something adds the function that fills it.
"""

import compileall
import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

from rich.table import Table

import fpmsdk
from fpmsdk.cli.console import JsonOption, progress, show


def warmup(json: JsonOption = False) -> None:
    """Create the cache directory and fill every cache."""
    done: dict[str, str] = {}
    with progress("warming up", len(WARMERS)) as advance:
        for name, fill in WARMERS.items():
            done[name] = fill()
            advance(1)
    table = Table(title="warm")
    table.add_column("cache")
    table.add_column("state")
    for name, state in done.items():
        table.add_row(name, state)
    show({"caches": done}, json, table)


def _cache_directory() -> str:
    from fpmsdk.paths import cache_dir

    directory = cache_dir()
    return "none is writable" if directory is None else str(directory)


def _bytecode() -> str:
    package = Path(fpmsdk.__file__).parent
    complete = compileall.compile_dir(package, quiet=2)
    return "compiled" if complete else "the package directory is read-only"


def _compiled_modules() -> str:
    import fpmsdk._ext

    names = [module.name for module in pkgutil.iter_modules(fpmsdk._ext.__path__)]
    for name in names:
        importlib.import_module(f"fpmsdk._ext.{name}")
    return f"{len(names)} load"


WARMERS: dict[str, Callable[[], str]] = {
    "cache directory": _cache_directory,
    "bytecode": _bytecode,
    "compiled modules": _compiled_modules,
}
