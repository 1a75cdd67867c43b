"""Everything public says what it does and shows it: a docstring, with an example that pytest runs as a doctest."""

import importlib
import inspect
import pkgutil

import pytest

import fpmsdk

PACKAGES = ["fpmsdk", *(f"fpmsdk.{module.name}" for module in pkgutil.iter_modules(fpmsdk.__path__))]
# Modules with a command line; they have no `__all__`, what they define is public.
COMMANDS = ["fpmsdk.engine.conformance", "fpmsdk.engine.record", "fpmsdk.engine.recordings"]


def exported(package):
    """Name and object of every class and function in `__all__`; exceptions and constants need no example."""
    module = importlib.import_module(package)
    for name in getattr(module, "__all__", ()):
        item = getattr(module, name)
        if inspect.isroutine(item) or (inspect.isclass(item) and not issubclass(item, BaseException)):
            yield f"{package}.{name}", item


def methods(name, item):
    """Public methods that a class defines itself; its properties are described by the class."""
    for attribute, value in vars(item).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(function) and not attribute.startswith("_"):
            yield f"{name}.{attribute}", function


def functions(module_name):
    module = importlib.import_module(module_name)
    for name, item in vars(module).items():
        if inspect.isfunction(item) and item.__module__ == module_name and not name.startswith("_"):
            yield f"{module_name}.{name}", item


def public():
    for package in PACKAGES:
        for name, item in exported(package):
            yield name, item
            if inspect.isclass(item):
                yield from methods(name, item)
    for module in COMMANDS:
        yield from functions(module)


# A class that several packages export is looked at once, under its shortest name.
NAMES = {id(item): name for name, item in sorted(public(), key=lambda entry: -len(entry[0]))}
PUBLIC = {name: item for name, item in public() if NAMES[id(item)] == name}


def test_the_public_names_are_found():
    assert {"fpmsdk.replay_trace", "fpmsdk.Trace.read", "fpmsdk.perfdb.open_root"} <= PUBLIC.keys()
    assert "fpmsdk.errors.ConfigError" not in PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_a_docstring_with_an_example(name):
    text = PUBLIC[name].__doc__
    assert text, f"{name} has no docstring"
    assert ">>> " in text, f"the docstring of {name} has no example"
