"""`fpmsdk warmup`: prepare every cache, so that an image starts warm and a read-only install need not write.

`WARMERS` is the registry: whoever caches something adds the function that fills it.
"""

import compileall
import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

import fpmsdk
from fpmsdk.cli.console import JsonOption, progress, show
from fpmsdk.errors import SystemsPathError

SystemOption = Annotated[
    list[str] | None,
    typer.Option("--system", help="Compile the performance tables of this system; may be repeated."),
]


def warmup(system: SystemOption = None, json: JsonOption = False) -> None:
    """Create the cache directory and fill every cache."""
    done: dict[str, str] = {}
    tables = {f"tables of {name}": partial(_tables, name) for name in system or ()}
    warmers = WARMERS | tables
    with progress("warming up", len(warmers)) as advance:
        for name, fill in warmers.items():
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


def _tables(system: str) -> str:
    from fpmsdk.config.systems import HOW_TO_GET_DATA, default_systems_root
    from fpmsdk.perfdb.warm import compile_tables

    root = default_systems_root()
    if root is None:
        raise SystemsPathError(f"no performance data found; {HOW_TO_GET_DATA}")
    return f"{compile_tables(root, system)} compiled"


WARMERS: dict[str, Callable[[], str]] = {
    "cache directory": _cache_directory,
    "bytecode": _bytecode,
    "compiled modules": _compiled_modules,
}
