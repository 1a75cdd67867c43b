"""The engine of this machine: which command starts it, and which versions it has.

Source: collector.md sections 4 (provenance) and 4.3.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fpmsdk.errors import MissingCapabilityError, OnboardError

LOCAL_ENGINE = "FPMSDK_LOCAL_ENGINE"
FAKE_MODULE = "fpmsdk.fake_engine"
_MODULE = "dynamo.vllm"
_PROBE_TIMEOUT_S = 120.0
# Answered from the installed files alone: importing an engine takes longer than starting a cell may.
_PROBE = """
import importlib.util, json
from importlib.metadata import packages_distributions, version
owners = packages_distributions()
def found(package, module):
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except ModuleNotFoundError:
        return None
    names = owners.get(package, ())
    return next((version(name) for name in names if name.lower().startswith(("vllm", "ai-dynamo", "ai_dynamo"))), None)
print(json.dumps({"vllm": found("vllm", "vllm"), "dynamo": found("dynamo", "dynamo.vllm")}))
"""


@dataclass(frozen=True)
class EngineRuntime:
    """What stands in for `python3 -m dynamo.vllm` on this machine.

    Parameters
    ----------
    command: words that start the engine; its arguments follow them.
    vllm_version, dynamo_version: of what is installed where it runs; None for the fake engine, which has none.
    """

    command: tuple[str, ...]
    vllm_version: str | None
    dynamo_version: str | None

    @property
    def is_fake(self) -> bool:
        """Whether its times are made up."""
        return FAKE_MODULE in self.command


def find_engine(environment: Mapping[str, str]) -> EngineRuntime:
    """The engine that `FPMSDK_LOCAL_ENGINE` names, or the one beside this package.

    Parameters
    ----------
    environment: variables. `FPMSDK_LOCAL_ENGINE` is the folder of a Python environment, an interpreter, or a whole
        command with an interpreter in it, such as `numactl -N 0 /opt/vllm/bin/python -m dynamo.vllm`. Without it the
        engine is that of this interpreter. It is never the fake one unless it is named.

    Raises
    ------
    MissingCapabilityError: none is named and none is installed here.
    OnboardError: what is named is no engine, or lacks vLLM or Dynamo.

    Source: collector.md section 4.3.
    """
    named = shlex.split(environment.get(LOCAL_ENGINE, ""))
    if not named:
        beside = _versions(sys.executable)
        if None in beside.values():
            raise MissingCapabilityError(
                f"executor local: {LOCAL_ENGINE} is not set, and {sys.executable} has no {_missing(beside)}; set it to "
                f"the folder of a Python environment with vLLM and ai-dynamo, or to the command that stands in for "
                f"`python3 -m {_MODULE}`, or use the executor fake to try the stages with made-up timings"
            )
        return EngineRuntime((sys.executable, "-m", _MODULE), beside["vllm"], beside["dynamo"])
    command = _command(named)
    if FAKE_MODULE in command:
        return EngineRuntime(command, None, None)
    python = next((word for word in command if Path(word).name.startswith("python")), None)
    if python is None:
        raise _refused(f"no Python interpreter in {shlex.join(command)!r}, whose versions could be read")
    found = _versions(python)
    if None in found.values():
        raise _refused(f"{python} has no {_missing(found)}")
    return EngineRuntime(command, found["vllm"], found["dynamo"])


def _command(named: list[str]) -> tuple[str, ...]:
    if len(named) > 1:
        return tuple(named)
    place = Path(named[0]).expanduser()
    # An interpreter of an environment is a link, which has to stay one: the environment is found by its place.
    python = Path(os.path.abspath(place / "bin" / "python" if place.is_dir() else place))
    if not python.is_file() or not python.name.startswith("python"):
        raise _refused(f"{place} is neither a Python environment nor an interpreter")
    return str(python), "-m", _MODULE


def _versions(python: str) -> dict[str, str | None]:
    if shutil.which(python) is None:
        raise _refused(f"{python} is not there, or cannot be run")
    try:
        # Elsewhere than in the folder of this process, whose modules would be found first.
        answer = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True, cwd="/"
        )
        found: dict[str, str | None] = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as fault:
        raise _refused(f"{python} does not tell which packages it has: {fault}") from fault
    return found


def _missing(found: Mapping[str, str | None]) -> str:
    names = {"vllm": "vllm", "dynamo": "ai-dynamo (dynamo.vllm)"}
    return " and no ".join(names[name] for name, version in found.items() if version is None)


def _refused(found: str) -> OnboardError:
    return OnboardError(
        f"{LOCAL_ENGINE}: {found}; expected the folder of a Python environment with vLLM and ai-dynamo, its "
        f"interpreter, or a command like `/opt/vllm/bin/python -m {_MODULE}`",
        LOCAL_ENGINE,
    )
