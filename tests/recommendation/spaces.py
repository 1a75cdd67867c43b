"""All candidates of a small search, put together by hand: every listed value with every other one."""

from itertools import product

from fpmsdk.recommendation.candidate import Sample

ROLES = {"aggregated": ("aggregated",), "disaggregated": ("prefill", "decode")}


def enumerated(search):
    """Point and concrete configuration of every candidate of a search with listed presets and choices."""
    document = {name: value for name, value in search.items() if name not in ("optimization", "optimizer")}
    mode = document["engine"]["mode"]
    arms = list(product(*(_sizes(document["engine"]["workers"][role]["parallelism"]) for role in ROLES[mode])))
    knobs = list(_choices(document, ""))
    for arm, sizes in enumerate(arms):
        for values in product(*(choices for _, choices in knobs)):
            chosen = dict(zip((path for path, _ in knobs), values, strict=True))
            concrete = _put(document, "", chosen)
            for role, parallelism in zip(ROLES[mode], sizes, strict=True):
                concrete["engine"]["workers"][role]["parallelism"] = parallelism
            yield Sample(mode, document["engine"]["backend"], arm, tuple(sorted(chosen.items()))), concrete


def _sizes(parallelism):
    if parallelism["preset"]:
        return parallelism["preset"]
    values = {name: _listed(value) for name, value in parallelism.items() if name != "preset"}
    return [dict(zip(values, sizes, strict=True)) for sizes in product(*values.values())]


def _listed(value):
    return value["choices"] if isinstance(value, dict) else [value]


def _choices(value, path):
    if not isinstance(value, dict):
        return
    if set(value) == {"choices"}:
        yield path, value["choices"]
        return
    for name, item in value.items():
        if name != "parallelism":
            yield from _choices(item, f"{path}.{name}" if path else name)


def _put(value, path, chosen):
    if path in chosen:
        return chosen[path]
    if isinstance(value, dict):
        return {name: _put(item, f"{path}.{name}" if path else name, chosen) for name, item in value.items()}
    return value
