"""Starts fresh interpreters with a hash seed of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_worker(task, seed, **arguments):
    """The answer of one process of `tests.snapshot.worker`."""
    return run_module("tests.snapshot.worker", json.dumps({"task": task, **arguments}), seed=seed)


def run_module(module, *arguments, seed):
    environment = os.environ | {"PYTHONHASHSEED": str(seed)}
    command = [sys.executable, "-W", "error", "-m", module, *arguments]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
