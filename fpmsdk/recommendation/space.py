"""Which deployments a configuration searches: those that fit the GPUs, the model and the memory; and why not others.

Source: predict-recommend.md sections 6.1 to 6.4.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct, field

from fpmsdk.config.profile import FpmModelProfile, load_fpm_profile
from fpmsdk.config.systems import resolve_systems_paths
from fpmsdk.errors import ConfigError, OnboardError
from fpmsdk.prediction.config import ROLES
from fpmsdk.recommendation.branches import SEED_OFFSETS, Arm, Branch, Space
from fpmsdk.recommendation.candidate import Sample
from fpmsdk.recommendation.config import RecommendConfig, located
from fpmsdk.recommendation.kv_filter import CacheFilter, Verdict
from fpmsdk.recommendation.menu import asked_shapes, profile_menu, with_replicas, worker_menu
from fpmsdk.recommendation.parallelism import Layouts, Sizes
from fpmsdk.recommendation.paths import get, put, put_sizes
from fpmsdk.recommendation.shapes import model_shape, profile_shape, search_folders, shape_fault

# Items that one message lists.
_SHOWN = 6


def build_branches(config: RecommendConfig) -> Space:
    """What a configuration searches.

    Parameters
    ----------
    config: as read.

    Returns
    -------
    A branch for every deployment mode that has a viable arm, with what was left out and why.

    Raises
    ------
    OnboardError: no mode has a viable arm; a listed configuration exceeds the GPUs or is viable on no backend; the
        model cannot be had.

    Source: predict-recommend.md sections 6.1 to 6.4.
    """
    try:
        return _space(config)
    except OnboardError as fault:
        raise located(fault, config.source) from None
    except ConfigError as fault:
        raise OnboardError(f"{config.source.where}: {fault}", fault.path) from None


def _space(config: RecommendConfig) -> Space:
    builder = _Builder(config)
    branches: list[Branch] = []
    skipped: list[dict[str, Any]] = []
    rejected: list[dict[str, Any]] = []
    for mode in config.modes:
        found = builder.mode(mode)
        rejected += found.rejections()
        if found.arms:
            branches.append(Branch(mode, tuple(found.arms), config.knobs(mode), SEED_OFFSETS[mode]))
        else:
            skipped.append({"mode": mode, "reasons": found.reasons()})
    if not branches:
        lines = [f"{entry['mode']}: {reason}" for entry in skipped for reason in entry["reasons"]]
        raise OnboardError(f"engine.workers: no deployment is viable: {_listed(lines, '; ')}", "engine.workers")
    return Space(tuple(branches), tuple(skipped), tuple(rejected), tuple(builder.warnings(skipped, rejected)))


def materialise(config: RecommendConfig, branch: Branch, sample: Sample) -> dict[str, Any]:
    """The configuration of the prediction that a sample stands for.

    Parameters
    ----------
    config: of the search.
    branch: that the sample is one of.
    sample: the arm and the value of each knob.

    Returns
    -------
    A complete predict document; values that candidates have in common are shared and must not be changed.

    Source: predict-recommend.md section 6.5.
    """
    arm = branch.arms[sample.arm]
    document = config.template(branch.mode, arm.backend)
    for role, sizes in arm.parallelism.items():
        document = put_sizes(document, role, Sizes(**sizes))
    for path, value in sample.knobs:
        document = put(document, path, value)
    return document


class _Rejection(Struct):
    mode: str
    backend: str
    role: str
    sizes: Sizes
    verdict: Verdict

    def __str__(self) -> str:
        advice = f"; nearest: {self.verdict.advice}" if self.verdict.advice else ""
        return f"{self.backend} {self.role} {self.sizes}: {self.verdict.rule}{advice}"


class _Mode(Struct):
    """What was found of one mode."""

    mode: str
    arms: list[Arm] = field(default_factory=list)
    rejected: list[_Rejection] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def reasons(self) -> list[str]:
        """Why there is no arm: each rule once, with the first worker that breaks it."""
        by_rule: dict[str, list[_Rejection]] = {}
        for rejection in self.rejected:
            by_rule.setdefault(str(rejection.verdict.rule), []).append(rejection)
        lines = [str(same[0]) + (f" (and {len(same) - 1} more)" if len(same) > 1 else "") for same in by_rule.values()]
        return self.notes + lines

    def rejections(self) -> Iterator[dict[str, Any]]:
        for one in self.rejected:
            yield {
                "arm": {"mode": self.mode, "backend": one.backend, "role": one.role, **one.sizes.to_dict()},
                "rule": one.verdict.rule,
                "needed_tokens": one.verdict.needed_tokens,
                "available_tokens": one.verdict.available_tokens,
                "nearest": self._nearest(one),
            }

    def _nearest(self, rejection: _Rejection) -> str | None:
        """The viable worker of the same role with the most similar number of GPUs, else what the rule advises."""
        viable = {
            Sizes(**arm.parallelism[rejection.role]).shape for arm in self.arms if arm.backend == rejection.backend
        }
        if not viable:
            return rejection.verdict.advice
        gpus = rejection.sizes.worker_gpus
        return str(min(sorted(viable), key=lambda shape: abs(shape.worker_gpus - gpus)))


class _Builder:
    def __init__(self, config: RecommendConfig) -> None:
        self._config = config
        constraints = config.optimization.constraints
        self._least, self._most = constraints.min_candidate_gpus or 1, constraints.max_candidate_gpus
        self._profile: FpmModelProfile | None = None
        engine = config.document["engine"]
        if config.profile is not None:
            self._profile = load_fpm_profile(config.profile)
            self._model = profile_shape(self._profile)
        else:
            roots = engine.get("systems_paths")
            paths = [roots] if isinstance(roots, str) else roots or ()
            self._model = model_shape(engine["model"], search_folders(resolve_systems_paths(paths)))
        self._filters: dict[tuple[str, str], CacheFilter] = {}

    def mode(self, mode: str) -> _Mode:
        found = _Mode(mode)
        layouts = {role: self._config.layouts(role) for role in ROLES[mode]}
        self._check_lists(layouts)
        for backend in self._config.backends:
            self._arms(found, backend, layouts)
        for role, layout in layouts.items():
            self._check_listed(found, role, layout)
        return found

    def warnings(self, skipped: list[dict[str, Any]], rejected: list[dict[str, Any]]) -> Iterator[str]:
        yield from self._config.notes
        engine = self._config.document["engine"]
        if engine.get("context_length", "max") == "max":
            whose = "model's" if self._profile is None else "profile's"
            yield (
                f"engine.context_length is max: the {whose} {self._engine_context()} tokens; workers whose cache does "
                "not hold one such sequence are left out; set engine.context_length to your longest request to have "
                "them searched"
            )
        for entry in skipped:
            yield f"{entry['mode']} deployments are skipped: {_listed(entry['reasons'], '; ')}"
        short = {_name(entry["arm"]): None for entry in rejected if entry["available_tokens"] is not None}
        if short:
            yield f"workers whose cache does not hold one sequence are left out: {_listed(short)}"
        if other := {str(entry["rule"]): None for entry in rejected if entry["available_tokens"] is None}:
            yield f"workers are left out: {_listed(other, '; ')}"

    # --- arms of one backend ---

    def _arms(self, found: _Mode, backend: str, layouts: Mapping[str, Layouts]) -> None:
        pools = {role: self._pool(found, backend, role, layout) for role, layout in layouts.items()}
        before, out_of_budget = len(found.arms), 0
        for combination in itertools.product(*pools.values()):
            gpus = self._gpus(dict(zip(pools, combination, strict=True)))
            if not self._least <= gpus <= self._most:
                out_of_budget += 1
                continue
            parallelism = {role: sizes.to_dict() for role, sizes in zip(pools, combination, strict=True)}
            found.arms.append(Arm(backend, parallelism, gpus))
        if len(found.arms) == before and out_of_budget:
            found.notes.append(
                f"{backend}: no viable configuration takes {self._least} to {self._most} GPUs "
                "(optimization.constraints)"
            )

    def _gpus(self, parallelism: Mapping[str, Sizes]) -> int:
        return sum(sizes.gpus * self._ranks(role) for role, sizes in parallelism.items())

    def _ranks(self, role: str) -> int:
        """GPUs among which each of a worker's ranks divides its prompts."""
        given: int | None = get(self._config.document, f"engine.workers.{role}.parallelism.prefill_context")
        return given or 1

    def _pool(self, found: _Mode, backend: str, role: str, layouts: Layouts) -> list[Sizes]:
        """Viable workers of one role, as often as they fit the GPUs."""
        cache, most = self._filter(found.mode, backend), self._most // self._ranks(role)
        menu = self._menu(role, backend, most)
        if not menu and layouts.kind != "list":
            found.notes.append(
                f"{backend} {role}: the profile has no deployment of {role} workers on {self._system(role)} with "
                f"version {self._config.version(backend)} and at most {most} GPUs"
            )
            return []
        asked = asked_shapes(layouts, menu, self._model.is_moe, most, closed=self._profile is not None)
        if not asked:
            found.notes.append(f"{backend} {role}: {layouts.path} leaves no worker of at most {most} GPUs")
        shapes: list[Sizes] = []
        rejected: list[_Rejection] = []
        undivided: list[_Rejection] = []
        for shape in asked:
            fault = shape_fault(self._model, shape)
            verdict = Verdict(fault) if fault else cache.judge(role, shape)
            if verdict.rule is None:
                shapes.append(shape)
            else:
                # Of sizes that are searched one by one, what does not go together is only told when nothing does.
                aside = fault is not None and layouts.kind == "domains"
                (undivided if aside else rejected).append(_Rejection(found.mode, backend, role, shape, verdict))
        found.rejected += rejected if shapes else rejected + undivided
        workers = with_replicas(layouts, shapes, most)
        if shapes and not workers:
            found.notes.append(f"{backend} {role}: {layouts.path} leaves no number of replicas within {most} GPUs")
        return workers

    def _menu(self, role: str, backend: str, most: int) -> list[Sizes]:
        if self._profile is None:
            return worker_menu(self._model.is_moe, most)
        shapes = profile_menu(self._profile, self._system(role), self._config.version(backend) or "", role)
        return [shape for shape in shapes if shape.worker_gpus <= most]

    def _system(self, role: str) -> str:
        own: str | None = get(self._config.document, f"engine.workers.{role}.hardware")
        return own or self._config.hardware

    def _filter(self, mode: str, backend: str) -> CacheFilter:
        key = mode, backend
        if key not in self._filters:
            template, domains = self._config.template(mode, backend), self._config.domains(mode)
            self._filters[key] = CacheFilter(template, domains, self._engine_context(), self._profile)
        return self._filters[key]

    def _engine_context(self) -> int:
        context = self._config.document["engine"].get("context_length", "max")
        longest = context if isinstance(context, int) else self._model.context_length
        if not longest:
            raise OnboardError(
                f"engine.context_length: found {context!r}, but {self._model.name} states no longest sequence; give it "
                "in tokens",
                "engine.context_length",
            )
        return longest

    # --- configurations that the file lists ---

    def _check_lists(self, layouts: Mapping[str, Layouts]) -> None:
        """What is listed is meant: it must be within the GPUs, every pair of it too."""
        advice = "remove it, or raise optimization.constraints.max_candidate_gpus"
        listed = {role: layout for role, layout in layouts.items() if layout.kind == "list"}
        for role, layout in listed.items():
            for place, sizes in enumerate(layout.entries):
                if (gpus := self._gpus({role: sizes})) > self._most:
                    path = f"{layout.path}.preset[{place}]"
                    raise OnboardError(f"{path}: takes {gpus} GPUs, accepted are {self._most}; {advice}", path)
        if len(listed) < len(layouts) or len(listed) == 1:
            return
        for combination in itertools.product(*(layout.entries for layout in listed.values())):
            gpus = self._gpus(dict(zip(listed, combination, strict=True)))
            if gpus > self._most:
                pair = " with ".join(f"{role} {sizes}" for role, sizes in zip(listed, combination, strict=True))
                path = next(iter(listed.values())).path
                raise OnboardError(f"{path}: {pair} takes {gpus} GPUs, accepted are {self._most}; {advice}", path)

    def _check_listed(self, found: _Mode, role: str, layouts: Layouts) -> None:
        """Each listed worker is viable on some backend."""
        rejected = [one for one in found.rejected if one.role == role]
        for place, sizes in enumerate(layouts.entries):
            faults = [one for one in rejected if one.sizes == sizes.shape]
            if len(faults) == len(self._config.backends):
                path = f"{layouts.path}.preset[{place}]"
                raise OnboardError(f"{path}: {'; '.join(map(str, faults))}", path)


def _listed(items: Iterable[str], separator: str = ", ") -> str:
    """The first few of many."""
    first = list(itertools.islice(items, _SHOWN + 1))
    return separator.join(first[:_SHOWN] + ["..."] * (len(first) > _SHOWN))


def _name(arm: Mapping[str, Any]) -> str:
    sizes = Sizes(**{name: arm[name] for name in Sizes().to_dict()})
    return f"{arm['backend']} {arm['role']} {sizes}"
