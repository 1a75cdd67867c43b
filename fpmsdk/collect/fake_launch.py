"""What a fake engine was asked to do: flags and environment of its command, as a real one reads them.

Source: collector.md sections 3.1 and 11.1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from fpmsdk.collect.deployment_inputs import OFF
from fpmsdk.collect.grid import EngineLimits, Samples
from fpmsdk.collect.sampling import capture_sizes
from fpmsdk.collect.topology import Topology
from fpmsdk.documents.canonical import read_document
from fpmsdk.errors import OnboardError

# The document `{config, capability}` of the model, for a process that has no checkpoint.
MODEL_FILE = "FPMSDK_FAKE_MODEL"
FAULTS = "FPMSDK_FAKE_FAULTS"
NUM_BLOCKS = "FPMSDK_FAKE_NUM_BLOCKS"
SEED = "FPMSDK_FAKE_SEED"
LAUNCH = "FPMSDK_FAKE_LAUNCH"
VERSION = "FPMSDK_FAKE_VERSION"
BLOCK_SIZE = 16
_DEFAULT_BLOCKS = 16384
_DEFAULT_TOKENS = 8192
_DEFAULT_SEQS = 256
_LARGEST_DEFAULT_CAPTURE = 512


@dataclass(frozen=True)
class FakeFaults:
    """Ways in which a launch goes wrong, or differs from a plain one.

    Parameters
    ----------
    fail_at: `launch`, `mid`, `validate` or `teardown`.
    partial, rank_missing, hang, wrong_version, legacy: an unfinished sweep, no file of the last rank, an engine that
        never ends, another version than promised, an engine without measurement evidence.
    is_async: whether scheduling is asynchronous though it was to be synchronous.
    graph_downgrade: whether captured graphs are piecewise at most.
    drift: factor on every time. cv: spread of the times of a point, 0 for the law's own.
    duplicate_seeds: whether a prefill without cache is also measured as its own prefix.
    """

    fail_at: str = ""
    partial: bool = False
    rank_missing: bool = False
    is_async: bool = False
    graph_downgrade: bool = False
    drift: float = 1.0
    cv: float = 0.0
    hang: bool = False
    wrong_version: bool = False
    legacy: bool = False
    duplicate_seeds: bool = False

    @classmethod
    def from_words(cls, words: Sequence[str]) -> FakeFaults:
        """The faults of a command line: `--fail-at mid --drift 1.08`.

        Raises
        ------
        OnboardError: an unknown word.
        """
        found: dict[str, Any] = {}
        rest = list(words)
        while rest:
            word = rest.pop(0)
            name = {"async": "is_async"}.get(word.removeprefix("--"), word.removeprefix("--").replace("-", "_"))
            kind = cls.__dataclass_fields__[name].type if name in cls.__dataclass_fields__ else None
            if kind is None or not word.startswith("--"):
                raise OnboardError(f"fake engine: unknown fault {word!r}", FAULTS)
            if kind == "bool":
                value = rest.pop(0) if rest and rest[0] in ("true", "false") else "true"
                found[name] = value == "true"
            else:
                found[name] = rest.pop(0) if kind == "str" else float(rest.pop(0))
        return cls(**found)


@dataclass(frozen=True)
class FakeLaunch:
    """One launch of the fake engine. `output` is the result file of rank 0; paths are those of this machine."""

    phase: str
    output: Path
    model: str
    config: Mapping[str, Any]
    capability: Mapping[str, Any]
    topology: Topology
    limits: EngineLimits
    num_blocks: int
    samples: Samples
    points: Mapping[str, Any] | None
    flags: Mapping[str, str]
    environment: Mapping[str, str]
    faults: FakeFaults
    seed: int

    @property
    def results(self) -> Path:
        """The folder of the unit's results."""
        return self.output.parent

    @property
    def is_moe(self) -> bool:
        """Whether the model is a mixture of experts."""
        return bool(self.capability.get("is_moe"))

    @property
    def prefix_caching(self) -> bool:
        """Whether cached prefixes are kept."""
        return "--no-enable-prefix-caching" not in self.flags

    @property
    def version(self) -> str:
        """The version that the engine reports."""
        return "0.0.0" if self.faults.wrong_version else self.environment.get(VERSION, "0.27.0")

    @property
    def cudagraph_mode(self) -> str:
        """How passes are launched."""
        if not self.limits.captures and not self.limits.decode_captures:
            return "NONE"
        mode = str(_compilation(self.flags).get("cudagraph_mode", "FULL_AND_PIECEWISE"))
        return "PIECEWISE" if self.faults.graph_downgrade else mode

    def mode_of(self, phase: str) -> str:
        """How captured passes of a phase are launched."""
        if phase == "decode":
            return "PIECEWISE" if self.cudagraph_mode == "PIECEWISE" else "FULL"
        return {"FULL": "FULL", "FULL_DECODE_ONLY": "NONE"}.get(self.cudagraph_mode, "PIECEWISE")

    def switch(self, name: str, default: str) -> bool:
        """Whether an on/off variable is on."""
        return self.environment.get(name, default).lower() not in OFF


def read_launch(words: Sequence[str], environment: Mapping[str, str]) -> FakeLaunch:
    """Read the command of an engine and its environment.

    Raises
    ------
    OnboardError: a flag or variable that a launch needs is missing.
    """
    flags = read_flags(words)
    for name in ("--benchmark-mode", "--benchmark-output-path"):
        if name not in flags:
            raise OnboardError(f"fake engine: {name} is missing", name)
    model = read_document(environment[MODEL_FILE]) if MODEL_FILE in environment else {}
    capability = model.get("capability") or {"is_moe": "--enable-expert-parallel" in flags}
    config = model.get("config") or {}
    dp = int(flags.get("--data-parallel-size", 1))
    tp = int(flags.get("--tensor-parallel-size", 1))
    experts = tp * dp if "--enable-expert-parallel" in flags else 1
    is_moe = bool(capability.get("is_moe"))
    topology = Topology(tp=tp, dp=dp, moe_ep=experts, moe_tp=tp if is_moe and experts == 1 and dp == 1 else 1)
    points = flags.get("--benchmark-points-file")
    return FakeLaunch(
        phase=flags["--benchmark-mode"],
        output=Path(flags["--benchmark-output-path"]),
        model=flags.get("--model", ""),
        config=config,
        capability=capability,
        topology=topology,
        limits=_limits(flags, environment, config),
        num_blocks=_num_blocks(environment),
        samples=_samples(flags),
        points=None if points is None else read_document(points),
        flags=flags,
        environment=environment,
        faults=FakeFaults.from_words(environment.get(FAULTS, "").split()),
        seed=_seed(environment),
    )


def read_flags(words: Sequence[str]) -> dict[str, str]:
    """Flags by name; the value of a flag without one is empty.

    >>> read_flags(["--a", "1", "--b", "--c=2"])
    {'--a': '1', '--b': '', '--c': '2'}
    """
    flags: dict[str, str] = {}
    for place, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, sign, value = word.partition("=")
        following = words[place + 1] if place + 1 < len(words) else ""
        is_value = not sign and following and (not following.startswith("--"))
        flags[name] = value if sign else following if is_value else ""
    return flags


def _seed(environment: Mapping[str, str]) -> int:
    parts = (environment.get(SEED, "0"), environment.get("FPM_RUN_ID", ""), environment.get(LAUNCH, "0"))
    return xxhash.xxh64_intdigest("\0".join(parts).encode())


def _num_blocks(environment: Mapping[str, str]) -> int:
    return int(environment.get(NUM_BLOCKS, _DEFAULT_BLOCKS))


def _compilation(flags: Mapping[str, str]) -> dict[str, Any]:
    return dict(json.loads(flags.get("--compilation-config", "{}")))


def _limits(flags: Mapping[str, str], environment: Mapping[str, str], config: Mapping[str, Any]) -> EngineLimits:
    text = config.get("text_config") or config
    context = int(flags.get("--max-model-len", -1))
    # What fits is decided by the cache.
    fitting = min(int(text.get("max_position_embeddings") or _DEFAULT_TOKENS), _num_blocks(environment) * BLOCK_SIZE)
    seqs = int(flags.get("--max-num-seqs", _DEFAULT_SEQS))
    compilation = _compilation(flags)
    sizes = compilation.get("cudagraph_capture_sizes")
    if sizes is None:
        sizes = capture_sizes(min(2 * seqs, _LARGEST_DEFAULT_CAPTURE))
    eager = "--enforce-eager" in flags or compilation.get("cudagraph_mode") == "NONE"
    captures = () if eager else tuple(sizes)
    decode_only = compilation.get("cudagraph_mode") == "FULL_DECODE_ONLY"
    return EngineLimits(
        max_model_len=fitting if context == -1 else context,
        max_num_batched_tokens=int(flags.get("--max-num-batched-tokens", _DEFAULT_TOKENS)),
        max_num_seqs=seqs,
        block_size=BLOCK_SIZE,
        usable_blocks=_num_blocks(environment) - 1,
        captures=() if decode_only else captures,
        decode_captures=captures,
    )


def _samples(flags: Mapping[str, str]) -> Samples:
    defaults = Samples()
    return Samples(
        prefill_new_tokens=int(flags.get("--prefill-max-new-token-samples", defaults.prefill_new_tokens)),
        prefill_kv_tokens=int(flags.get("--prefill-max-kv-read-token-samples", defaults.prefill_kv_tokens)),
        prefix_batches=int(flags.get("--prefix-max-batch-size-samples", defaults.prefix_batches)),
        decode_kv_tokens=int(flags.get("--decode-max-kv-read-token-samples", defaults.decode_kv_tokens)),
        decode_batches=int(flags.get("--decode-max-batch-size-samples", defaults.decode_batches)),
    )
