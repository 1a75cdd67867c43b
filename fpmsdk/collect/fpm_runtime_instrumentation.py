"""The verified importer of observers: it runs inside an engine's processes, with the standard library alone.

An engine is started with `fpm_runtime_instrumentation.ObservedWorker` and `.ObservedInstrumentedScheduler`. Both are
looked up here, in the main process and again in every spawned one. All declared files are read once, their digests are
compared with what the launch froze, and modules are executed from exactly those bytes. What was imported is written
into a receipt beside the observations. This proves where code came from; it confines nothing that the code does.
Source: collector.md section 8.3.
"""

import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import socket
import sys
from types import ModuleType
from typing import Any

IMPORTS_SCHEMA = "aisimulate-runtime-instrumentation-imports/v1"
_CLASS_FIELDS = {"ObservedWorker": "worker_class", "ObservedInstrumentedScheduler": "scheduler_class"}
_sessions: list["_Session"] = []  # of this process: none, or one


class ImportRefused(RuntimeError):
    """The observers are not those that the launch froze."""


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


class _Session(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The verified bytes of one bundle, as a finder and loader of its modules, and the receipt of their import."""

    def __init__(self) -> None:
        with open(os.environ["AISIMULATE_RUNTIME_CONTEXT"], encoding="utf-8") as file:
            context = json.load(file)
        self.manifest_path = os.path.realpath(os.environ["AISIMULATE_RUNTIME_INSTRUMENTATION"])
        self.root = os.path.dirname(self.manifest_path)
        self.folder = os.environ["AISIMULATE_RUNTIME_OBSERVATION_DIR"]
        with open(__file__, "rb") as file:
            loader_sha256 = _sha256(file.read())
        self.receipt: dict[str, Any] = {
            "schema_version": IMPORTS_SCHEMA,
            "attempt_id": context["attempt_id"],
            "configuration": context["configuration"],
            "phase": context["phase"],
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "root": self.root,
            "status": "verifying",
            "expected_bundle_sha256": context["bundle_sha256"],
            "loader_sha256": loader_sha256,
            "imports": {},
            "classes": {},
        }
        with self.failing_closed():
            self.manifest, self.sources = self.read()
            files = {name: _sha256(content) for name, content in self.sources.items()}
            found = _sha256(_canonical({"manifest": self.manifest, "files": files}).encode())
            self.receipt.update(files=files, bundle_sha256=found)
            if found != context["bundle_sha256"]:
                raise ImportRefused(f"bundle digest {found} is not the frozen {context['bundle_sha256']}")
            expected = {"schema_version": IMPORTS_SCHEMA, "loader_sha256": loader_sha256}
            if context.get("instrumentation_binding") != expected:
                raise ImportRefused("the importer is not the one that the launch froze")
            self.modules = dict(self.module_of(name) for name in files if name.endswith(".py"))
            loaded = sorted(self.modules.keys() & sys.modules.keys())
            if loaded:
                raise ImportRefused(f"{loaded[0]} was imported before it could be verified")
        sys.meta_path.insert(0, self)

    def read(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        with open(self.manifest_path, encoding="utf-8") as file:
            manifest = json.load(file)
        sources = {}
        for name in manifest["files"]:
            place = os.path.join(self.root, name)
            if os.path.realpath(place) != place:
                raise ImportRefused(f"{name} leads out of the frozen bundle")
            with open(place, "rb") as file:
                sources[name] = file.read()
        return manifest, sources

    @staticmethod
    def module_of(name: str) -> tuple[str, str]:
        parts = name[: -len(".py")].split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts), name

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        name = self.modules.get(fullname)
        if name is None:
            return None
        origin = os.path.join(self.root, name)
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=origin)
        spec.has_location = True
        if name.endswith("__init__.py"):
            spec.submodule_search_locations = [os.path.dirname(origin)]
        return spec

    def exec_module(self, module: ModuleType) -> None:
        name = self.modules[module.__name__]
        origin = os.path.join(self.root, name)
        with self.failing_closed():
            # The bytes that were verified, never a compiled file from elsewhere.
            exec(compile(self.sources[name], origin, "exec"), module.__dict__)
        self.receipt["imports"][module.__name__] = {
            "file": name,
            "path": origin,
            "sha256": self.receipt["files"][name],
        }
        self.write()

    def observed(self) -> dict[str, Any]:
        with self.failing_closed():
            if self.receipt["status"] == "failed":
                raise ImportRefused(self.receipt["error"])
            if self.read() != (self.manifest, self.sources):
                raise ImportRefused("the bundle changed after it was imported")
            for name, told in self.receipt["imports"].items():
                module = sys.modules.get(name)
                if module is None or os.path.realpath(module.__file__ or "") != told["path"]:
                    raise ImportRefused(f"{name} was replaced after it was imported")
        self.write()
        copied: dict[str, Any] = json.loads(_canonical(self.receipt))
        return copied

    def select(self, name: str) -> type:
        field = _CLASS_FIELDS[name]
        with self.failing_closed():
            module_name, _, class_name = self.manifest[field].rpartition(".")
            actual = getattr(importlib.import_module(module_name), class_name)
            if not isinstance(actual, type) or actual.__module__ not in self.receipt["imports"]:
                raise ImportRefused(f"{self.manifest[field]} is no class of the frozen bundle")
            self.receipt["classes"][field] = self.manifest[field]
            self.receipt["status"] = "verified"
        self.observed()
        # A subclass under this module's name: a spawned process that unpickles it comes through here again.
        return type(name, (actual,), {"__module__": __name__})

    def failing_closed(self) -> "_FailingClosed":
        return _FailingClosed(self)

    def write(self) -> None:
        if self.receipt["pid"] != os.getpid():
            # A forked process has the verified modules of its parent and imported nothing itself.
            self.receipt.update(inherited_from_pid=self.receipt["pid"], pid=os.getpid(), hostname=socket.gethostname())
        os.makedirs(self.folder, exist_ok=True)
        name = f"runtime-instrumentation-imports-{self.receipt['hostname']}-{self.receipt['pid']}.json"
        target = os.path.join(self.folder, name)
        with open(f"{target}.tmp", "w", encoding="utf-8") as file:
            file.write(_canonical(self.receipt) + "\n")
        os.replace(f"{target}.tmp", target)


class _FailingClosed:
    """Note whatever goes wrong in the receipt before it goes on."""

    def __init__(self, session: _Session) -> None:
        self.session = session

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, fault: BaseException | None, trace: Any) -> None:
        if fault is not None:
            self.session.receipt.update(status="failed", error=f"{type(fault).__name__}: {fault}")
            self.session.write()


def observed_binding() -> dict[str, Any]:
    """The receipt as it stands, verified once more; observers put it into every record they write.

    Raises
    ------
    ImportRefused: nothing was imported through here, or something changed since.
    """
    if not _sessions:
        raise ImportRefused("the observers were not loaded through fpm_runtime_instrumentation")
    return _sessions[0].observed()


def __getattr__(name: str) -> Any:
    if name not in _CLASS_FIELDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _sessions:
        _sessions.append(_Session())
    selected = globals()[name] = _sessions[0].select(name)
    return selected
