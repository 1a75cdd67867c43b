"""The unmodified Dynamo Planner on fpmsdk: its import of `aisimulate_core` finds fpmsdk.

    from fpmsdk.compat import dynamo
    dynamo.install()                      # before anything imports dynamo.planner
    from dynamo.planner... import ...

The modules that take the place of the other package are the files below `fpmsdk/compat/aisimulate_core`. A process that
cannot be changed finds them through a distribution that consists of the name alone, see `alias_directory`.

Source: clients.md section 1.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path

NAME = "aisimulate_core"
_MODULES = str(Path(__file__).parent)


def install() -> None:
    """Let `aisimulate_core` mean fpmsdk in this process; a second call changes nothing.

    Raises
    ------
    RuntimeError: another `aisimulate_core` is imported already; part of the process would go on using it.

    Example
    -------
    >>> import sys
    >>> before = set(sys.modules)
    >>> install()
    >>> from aisimulate_core.sdk import RustForwardPassPerfModel
    >>> RustForwardPassPerfModel.__module__
    'fpmsdk.perfmodel.model'
    >>> for name in set(sys.modules) - before:
    ...     if name.startswith("aisimulate_core"):
    ...         del sys.modules[name]
    """
    loaded = sorted(name for name in sys.modules if name == NAME or name.startswith(NAME + "."))
    foreign = [name for name in loaded if not _is_ours(name)]
    if foreign:
        where = getattr(sys.modules[foreign[0]], "__file__", None) or "unknown place"
        raise RuntimeError(
            f"{foreign[0]} is already imported from {where}; call fpmsdk.compat.dynamo.install() before anything "
            "imports it, or start a new process"
        )
    if NAME in sys.modules:
        return
    spec = PathFinder.find_spec(NAME, [_MODULES])
    assert isinstance(spec, ModuleSpec), f"{_MODULES} is incomplete; reinstall fpmsdk"
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)


def alias_directory() -> Path:
    """Directory that makes `aisimulate_core` mean fpmsdk in processes that have it on PYTHONPATH.

    It holds nothing else, and it is also a distribution: `pip install DIRECTORY`.

    Example
    -------
    >>> sorted(entry.name for entry in (alias_directory() / "aisimulate_core").iterdir() if entry.suffix == ".py")
    ['__init__.py']
    """
    return Path(__file__).parent / "distribution"


def _is_ours(name: str) -> bool:
    file = getattr(sys.modules[name], "__file__", None)
    return file is not None and (Path(file).is_relative_to(_MODULES) or hasattr(sys.modules[NAME], "FPMSDK_ALIAS"))
