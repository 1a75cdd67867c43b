"""The folder of one real journey: where things are, how the commands are called, and what each step found.

A step is done once its result is there; a second call of the journey goes on with the first that is not.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
SYSTEM, LABEL, VERSION = "local_cpu", "tp1", "0.31.0"
# The scheduler of the engine that is measured and served. Its cache it sizes itself, as a share of the memory.
LIMITS = {"context_length": 2048, "max_num_tokens": 512, "max_batch_size": 16, "gpu_memory_utilization": 0.1}
# A plan needs a system: this machine with its memory. No time is derived from the description, and an SM it has none.
DESCRIPTION = {
    "data_dir": f"data/{SYSTEM}",
    "gpu": {
        "mem_bw": 2.0e10,
        "bfloat16_tc_flops": 1.0e11,
        "mem_capacity": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    },
    "node": {"num_gpus_per_node": 1, "intra_node_bw": 1.0e10, "inter_node_bw": 1.0e9},
    "misc": {"nccl_mem": {1: 0}, "other_mem": 0},
}
_COMMAND = "from fpmsdk.cli import main; main()"


class Work:
    """One journey: `folder` has everything it writes, `engine` is the environment of the engine, `model` a folder."""

    def __init__(self, folder: Path, engine: Path, model: Path) -> None:
        self.folder, self.engine, self.model = folder.absolute(), engine.absolute(), model.absolute()
        self.session = self.folder / "session.json"
        self.request, self.collection = self.folder / "request.yaml", self.folder / "collection"
        self.quality, self.resolved = self.folder / "quality", self.folder / "resolved"
        self.serving = self.folder / "serving"
        self.results = self.folder / "results"
        self.results.mkdir(parents=True, exist_ok=True)
        systems = self.folder / "systems"
        systems.mkdir(exist_ok=True)
        (systems / f"{SYSTEM}.yaml").write_text(yaml.safe_dump(DESCRIPTION))

    @property
    def collected(self) -> Path:
        """The plan that was collected: where the engine's version was bound to it, if it was."""
        bound = self.collection / "runtime-resolved"
        return bound if bound.exists() else self.collection

    @property
    def environment(self) -> dict[str, str]:
        """What commands and engines see beside the shell's own variables."""
        return {
            **os.environ,
            "FPMSDK_SYSTEMS_PATH": str(self.folder / "systems"),
            "FPMSDK_LOCAL_ENGINE": str(self.engine),
            "FPM_COLLECTOR_SOURCE_REVISION": os.environ.get("FPM_COLLECTOR_SOURCE_REVISION", "0" * 40),
            "HF_HUB_OFFLINE": "1",
            # What the first launch compiles, the others load: every launch runs the same code.
            "VLLM_CACHE_ROOT": str(self.folder / "vllm-cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor-cache"),
        }

    def onboard(self, *words: object, update: Any = None, codes: Iterable[int] = (0,)) -> Any:
        """What `fpmsdk onboard WORDS` prints, as JSON where it is; it must end with one of the codes."""
        command = [sys.executable, "-c", _COMMAND, "onboard", *map(str, words)]
        told = None if update is None else json.dumps(update)
        ran = subprocess.run(
            command, input=told, env=self.environment, stdout=subprocess.PIPE, text=True, check=False, cwd=self.folder
        )
        if ran.returncode not in codes:
            sys.exit(f"onboard {' '.join(map(str, words))}: exit code {ran.returncode}\n{ran.stdout}")
        try:
            return json.loads(ran.stdout)
        except json.JSONDecodeError:
            return ran.stdout

    def save(self, update: dict[str, Any], *options: object) -> Any:
        """Change the session."""
        revision = ()
        if self.session.exists():
            revision = ("--expect-revision", json.loads(self.session.read_text())["revision"])
        return self.onboard("checkpoint", "--file", self.session, "--update", "-", *revision, *options, update=update)

    def accept(self) -> None:
        """Accept the draft of the one configuration."""
        self.save({}, "--accept-profile", LABEL)

    def fresh(self, folder: Path) -> Path:
        """A folder that an interrupted step may have left, without what is in it."""
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def run(self, name: str, step: Any) -> dict[str, Any]:
        """The result of a step: that of an earlier call, or of calling it now."""
        kept = self.results / f"{name}.json"
        if kept.exists():
            found: dict[str, Any] = json.loads(kept.read_text())
            return found
        print(f"{name} ...", flush=True)
        begun = time.monotonic()
        found = {"result": step(self), "seconds": round(time.monotonic() - begun, 1)}
        kept.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        print(f"{name}: {found['seconds']:.0f} s", flush=True)
        return found


def digest_of(path: Path) -> dict[str, Any]:
    """SHA-256 and bytes of a file."""
    content = path.read_bytes()
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
