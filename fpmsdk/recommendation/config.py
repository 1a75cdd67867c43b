"""The configuration file of a search: that of a prediction, with domains for some values, a goal and a budget.

Source: predict-recommend.md sections 2, 7 and 8.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from fpmsdk.documents.strict import StrictDocument
from fpmsdk.errors import OnboardError
from fpmsdk.prediction.config import ROLES, PredictConfig
from fpmsdk.prediction.documents import SourceDocument, read_document
from fpmsdk.recommendation.domains import INTEGER, NUMBER, TEXT, Choices, Domain, parse_domain
from fpmsdk.recommendation.goal import Optimization, Optimizer, check_goal
from fpmsdk.recommendation.parallelism import Layouts, Sizes, parse_layouts
from fpmsdk.recommendation.paths import get, put, put_sizes

# What predictions serve with.
BACKENDS = ("vllm",)

# What a search takes that leaves traffic out.
DEFAULT_TRAFFIC = {
    "source": {"type": "synthetic", "input_tokens": 1024, "output_tokens": 128},
    "load": {"type": "concurrency", "concurrency": 10},
    "stop": {"requests": 100},
}

_LOADS = {
    "concurrency": INTEGER,
    "requests_per_second": NUMBER,
    "sessions_per_second": NUMBER,
    "speedup": NUMBER,
    "fraction": NUMBER,
}
_KNOBS = {
    "scheduler.max_batched_tokens": INTEGER,
    "scheduler.max_sequences": INTEGER,
    "kv_cache.block_size": INTEGER,
    "kv_cache.capacity.memory_fraction": NUMBER,
}
# Limits that are searched where neither the file nor a profile states one.
_TOKENS = {"decode": Choices((8192,))}
_SEQUENCES = {"prefill": Choices((1, 2, 4, 8, 16, 32, 64, 128, 256))}

_PART = re.compile(r"[^.\[\]]+")


class _Search(StrictDocument):
    optimization: Optimization
    optimizer: Optimizer = Optimizer()


class RecommendConfig(Struct, frozen=True, dict=True):
    """A whole configuration of a search.

    document: as read, overrides applied and paths absolute.
    optimization: what is sought.
    optimizer: how, and for how long.
    modes, backends: that are searched, in the order of the file.
    notes: what was assumed because the file leaves it out, one line each.

    Source: predict-recommend.md section 2.

    >>> config = RecommendConfig.from_source({
    ...     "engine": {"model": "org/m", "hardware": "h200_sxm", "backend": "vllm", "mode": "aggregated", "workers": {
    ...         "aggregated": {"scheduler": {"max_sequences": {"choices": [8, 16]}, "max_batched_tokens": 512}}}},
    ...     "traffic": {"source": {"type": "synthetic"}, "load": {"type": "concurrency", "concurrency": 4},
    ...                 "stop": {"requests": 8}},
    ...     "optimization": {"target": "throughput"}})
    >>> [(path, domain.count) for path, domain in config.knobs("aggregated")]
    [('engine.workers.aggregated.scheduler.max_sequences', 2)]
    >>> config.template("aggregated")["engine"]["workers"]["aggregated"]["scheduler"]["max_sequences"]
    8
    """

    document: Mapping[str, Any]
    optimization: Optimization
    optimizer: Optimizer
    modes: tuple[str, ...]
    backends: tuple[str, ...]
    notes: tuple[str, ...]
    source: SourceDocument

    @classmethod
    def from_source(cls, source: SourceDocument | Mapping[str, Any]) -> RecommendConfig:
        """The configuration that a file or a mapping holds.

        Parameters
        ----------
        source: a file as read, or its content.

        Raises
        ------
        OnboardError: it is no such configuration; one line for every faulty field.

        Source: predict-recommend.md sections 2.1, 2.2 and 2.7.
        """
        read = source if isinstance(source, SourceDocument) else read_document(dict(source))
        try:
            return cls._parsed(read)
        except OnboardError as fault:
            raise located(fault, read) from None

    @classmethod
    def _parsed(cls, source: SourceDocument) -> RecommendConfig:
        document = source.document
        if document.get("optimization") is None:
            raise OnboardError(
                "optimization: missing; a search needs a goal: add optimization: {target: throughput}", "optimization"
            )
        own = {name: document[name] for name in ("optimization", "optimizer") if document.get(name) is not None}
        search = structs.replace(source, document=own).checked(_Search)
        engine = document.get("engine")
        if not isinstance(engine, Mapping):
            raise OnboardError(f"engine: found {engine!r}, accepted is a mapping", "engine")
        notes: list[str] = []
        modes = _modes(engine, notes)
        backends = _texts(engine.get("backend", BACKENDS[0]), "engine.backend", BACKENDS)
        if document.get("traffic") is None:
            notes.append(
                "no traffic is configured: assuming synthetic requests of 1024 input and 128 output tokens, "
                "concurrency 10, 100 requests; state the traffic section for your workload"
            )
        config = cls(document, search.optimization, search.optimizer, modes, backends, tuple(notes), source)
        config._check()
        return config

    # --- what is searched ---

    def knobs(self, mode: str) -> tuple[tuple[str, Domain], ...]:
        """Knobs of a mode with more than one value: dotted path and domain, sorted by path."""
        return tuple((path, domain) for path, domain in sorted(self.domains(mode).items()) if domain.count != 1)

    def domains(self, mode: str) -> dict[str, Domain]:
        """What every value that may be a domain can be, by dotted path, constants among them."""
        traffic = self.document.get("traffic") or DEFAULT_TRAFFIC
        load = traffic.get("load") if isinstance(traffic, Mapping) else None
        found = {}
        for name, kind in _LOADS.items():
            if isinstance(load, Mapping) and load.get(name) is not None:
                path = f"traffic.load.{name}"
                found[path] = parse_domain(load[name], path, kind)
        for role in ROLES[mode]:
            found |= self._role_domains(role)
        return found

    def _role_domains(self, role: str) -> dict[str, Domain]:
        found: dict[str, Domain] = {}
        for name, kind in _KNOBS.items():
            path = f"engine.workers.{role}.{name}"
            value = get(self.document, path)
            if value is not None:
                found[path] = parse_domain(value, path, kind)
        if self.profile is None:
            scheduler = f"engine.workers.{role}.scheduler"
            found.setdefault(f"{scheduler}.max_batched_tokens", _TOKENS.get(role, Choices((8192, 16384, 32768))))
            found.setdefault(f"{scheduler}.max_sequences", _SEQUENCES.get(role, Choices((256, 512, 1024))))
        return found

    def layouts(self, role: str) -> Layouts:
        """Which parallel sizes of a role are searched."""
        path = f"engine.workers.{role}.parallelism"
        return parse_layouts(get(self.document, path), path)

    # --- what every candidate has ---

    @property
    def profile(self) -> Mapping[str, Any] | None:
        """The embedded profile."""
        profile: Mapping[str, Any] | None = self.document["engine"].get("fpm_profile")
        return profile

    @property
    def hardware(self) -> str:
        """The system of roles that name none."""
        hardware = self.document["engine"].get("hardware")
        return self.optimization.hardware or "" if hardware == "auto" else hardware

    def version(self, backend: str) -> str | None:
        """The version of a backend; None for the newest."""
        versions = self.document["engine"].get("backend_version")
        return versions.get(backend) if isinstance(versions, Mapping) else versions

    def template(self, mode: str, backend: str | None = None) -> dict[str, Any]:
        """The configuration of a prediction with the first value of each domain.

        Parameters
        ----------
        backend: that serves; None for the first one.

        Returns
        -------
        A new document; nested values that no candidate changes may be shared.
        """
        return copy.copy(self._templates[mode, backend or self.backends[0]])

    @functools.cached_property
    def _templates(self) -> dict[tuple[str, str], dict[str, Any]]:
        return {(mode, backend): self._template(mode, backend) for mode in self.modes for backend in self.backends}

    def _template(self, mode: str, backend: str) -> dict[str, Any]:
        document = {name: part for name, part in self.document.items() if name not in ("optimization", "optimizer")}
        document.setdefault("traffic", DEFAULT_TRAFFIC)
        if document["traffic"] is None:
            document["traffic"] = DEFAULT_TRAFFIC
        engine = dict(document["engine"]) | {"mode": mode, "backend": backend, "hardware": self.hardware}
        if isinstance(engine.get("backend_version"), Mapping):
            engine["backend_version"] = self.version(backend)
        workers = engine.get("workers")
        if isinstance(workers, Mapping) and len(self.modes) > 1:
            others = {role for other in self.modes if other != mode for role in ROLES[other]}
            engine["workers"] = {role: worker for role, worker in workers.items() if role not in others}
            if mode == "aggregated":
                engine.pop("kv_transfer", None)
        document["engine"] = engine
        for path, domain in self.domains(mode).items():
            document = put(document, path, domain.lowest if domain.count is None else domain.at(0))
        for role in ROLES[mode]:
            document = put_sizes(document, role, self._first_sizes(role, backend))
        return document

    def _first_sizes(self, role: str, backend: str) -> Sizes:
        layouts = self.layouts(role)
        if layouts.kind == "list":
            return layouts.entries[0]
        known = [] if self.profile is None else list(self._measured(role, backend))
        named = {name: int(domain.lowest) for name, domain in layouts.domains.items()}
        fitting = (sizes for sizes in known if all(sizes[name] == named.get(name, sizes[name]) for name in sizes))
        return Sizes(**{**next(fitting, {}), **named})

    def _measured(self, role: str, backend: str) -> Iterator[dict[str, int]]:
        system = get(self.document, f"engine.workers.{role}.hardware") or self.hardware
        names = {
            "tensor": "tp",
            "pipeline": "pp",
            "attention_data": "dp",
            "moe_tensor": "moe_tp",
            "moe_expert": "moe_ep",
        }
        deployments = (self.profile or {}).get("deployments")
        for deployment in deployments if isinstance(deployments, list) else ():
            if not isinstance(deployment, Mapping) or deployment.get("worker_type") not in (None, role):
                continue
            if (deployment.get("system"), deployment.get("backend_version")) == (system, self.version(backend)):
                yield {name: deployment.get(column, 1) for name, column in names.items()}

    # --- checks ---

    def _check(self) -> None:
        """Check the documents of all predictions, at the ends of every domain."""
        engine = self.document["engine"]
        if engine.get("hardware") == "auto" and self.optimization.hardware is None:
            raise OnboardError(
                "optimization.hardware: missing; engine.hardware auto takes the system from there",
                "optimization.hardware",
            )
        _check_versions(engine.get("backend_version"), self.backends)
        for mode, backend in self._templates:
            template = self._templates[mode, backend]
            if path := next(_domains_within(template), None):
                raise OnboardError(f"{path}: takes no domain; give one value", path)
            self._check_prediction(template)
            check_goal(self.document, self.optimization, template)
            for path, domain in self.domains(mode).items():
                for value in domain.extremes():
                    if value != get(template, path):
                        self._check_prediction(put(template, path, value))

    def _check_prediction(self, document: dict[str, Any]) -> None:
        structs.replace(self.source, document=document).checked(PredictConfig)


def read_recommend_config(
    path: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()
) -> RecommendConfig:
    """The configuration of a search that a YAML file holds.

    Parameters
    ----------
    path: the file, or a mapping of its content.
    overrides: `PATH=YAML`, applied in order.

    Raises
    ------
    OnboardError: no such configuration; one line for every faulty field.
    OSError: the file cannot be read.

    Source: predict-recommend.md section 2.
    """
    return RecommendConfig.from_source(read_document(path, overrides))


def _domains_within(value: Any, path: str = "") -> Iterator[str]:
    """Where a prediction has a domain, which it should not."""
    if not isinstance(value, Mapping):
        return
    if set(value) in ({"choices"}, {"range"}):
        yield path
        return
    for name, item in value.items():
        yield from _domains_within(item, f"{path}.{name}" if path else str(name))


def _modes(engine: Mapping[str, Any], notes: list[str]) -> tuple[str, ...]:
    workers = engine.get("workers")
    given = set(workers) if isinstance(workers, Mapping) else set()
    if engine.get("mode") is not None:
        modes = _texts(engine["mode"], "engine.mode", tuple(ROLES))
        if "disaggregated" in modes and not given.issuperset(ROLES["disaggregated"]):
            raise OnboardError(
                "engine.workers: mode disaggregated needs prefill and decode workers; add workers: {prefill: "
                "{parallelism: {preset: default}}, decode: {parallelism: {preset: default}}}",
                "engine.workers",
            )
        return modes
    modes = tuple(mode for mode, roles in ROLES.items() if given.issuperset(roles)) or ("aggregated",)
    if modes != tuple(ROLES):
        (other,) = (mode for mode in ROLES if mode not in modes)
        notes.append(
            f"engine.mode is left out: only {modes[0]} deployments are searched, as engine.workers has not "
            f"{' and '.join(ROLES[other])}"
        )
    return modes


def _texts(value: Any, path: str, accepted: tuple[str, ...]) -> tuple[str, ...]:
    domain = parse_domain(value, path, TEXT)
    assert isinstance(domain, Choices)
    for item in domain.values:
        if item not in accepted:
            raise OnboardError(f"{path}: found {item!r}, accepted are {', '.join(accepted)}", path)
    return tuple(str(item) for item in domain.values)


def _check_versions(versions: Any, backends: tuple[str, ...]) -> None:
    path = "engine.backend_version"
    if isinstance(versions, Mapping):
        if unknown := [name for name in versions if name not in backends]:
            raise OnboardError(
                f"{path}: found a version of {', '.join(map(str, unknown))}; searched are {', '.join(backends)}", path
            )
    elif versions is not None and len(backends) > 1:
        example = ", ".join(f"{backend}: ..." for backend in backends)
        raise OnboardError(
            f"{path}: found {versions!r} for {len(backends)} backends; give one of each: {{{example}}}", path
        )


def located(fault: OnboardError, source: SourceDocument) -> OnboardError:
    """The fault with file and line in front, where its text begins with its dotted path.

    >>> str(located(OnboardError("a.b: too large", "a.b"), SourceDocument({}, "x.yaml", {("a", "b"): 3})))
    'x.yaml:3: a.b: too large'
    """
    text = str(fault)
    if fault.path in ("", source.where) or not text.startswith(f"{fault.path}: "):
        return fault
    place = (int(part) if part.isdigit() else part for part in _PART.findall(fault.path))
    return source.fault(tuple(place), text.removeprefix(f"{fault.path}: "))
