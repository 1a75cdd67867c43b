"""Instrumentation of a made-up engine, written out file by file."""

import json

_OBSERVER = """class Worker:
    def told(self):
        return "observed"


class InstrumentedScheduler:
    pass
"""
MANIFEST = {
    "schema_version": "aisimulate-runtime-instrumentation/v1",
    "runtime": {
        "framework": "vllm",
        "version": "0.27.0",
        "source_revision": "4" * 40,
        "source_files": {"vllm/v1/worker/gpu_worker.py": "5" * 64},
    },
    "files": ["instrumentation/__init__.py", "instrumentation/observer.py", "instrumentation/notes.md"],
    "worker_class": "instrumentation.observer.Worker",
    "scheduler_class": "instrumentation.observer.InstrumentedScheduler",
    "observation_schema": "aisimulate-runtime-observation/v1",
    "source_notes": "instrumentation/notes.md",
}


def write_bundle(folder):
    """The path of the manifest of a small sound bundle, written into `folder`."""
    package = folder / "instrumentation"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "observer.py").write_text(_OBSERVER)
    (package / "notes.md").write_text("Read at the pinned revision.\n")
    (folder / "manifest.json").write_text(json.dumps(MANIFEST))
    return folder / "manifest.json"
