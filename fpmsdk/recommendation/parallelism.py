"""Parallel sizes of the workers of one role, and which of them a configuration asks for.

Source: predict-recommend.md section 6.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct, field

from fpmsdk.errors import OnboardError
from fpmsdk.recommendation.domains import INTEGER, Choices, Domain, parse_domain

SIZES = ("replicas", "tensor", "pipeline", "attention_data", "moe_tensor", "moe_expert")
# Sizes that are fixed for all candidates.
CONTEXT_SIZES = ("prefill_context", "decode_context")


class Sizes(Struct, frozen=True, order=True):
    """How many workers of a role there are, and how each is divided.

    Source: predict-recommend.md section 2.4.

    >>> sizes = Sizes(replicas=2, tensor=4)
    >>> sizes.gpus, str(sizes)
    (8, 'tensor 4, replicas 2')
    """

    replicas: int = 1
    tensor: int = 1
    pipeline: int = 1
    attention_data: int = 1
    moe_tensor: int = 1
    moe_expert: int = 1

    @property
    def worker_gpus(self) -> int:
        """GPUs of one worker."""
        return self.tensor * self.pipeline * self.attention_data

    @property
    def gpus(self) -> int:
        """GPUs of all workers."""
        return self.worker_gpus * self.replicas

    @property
    def shape(self) -> Sizes:
        """One worker of them."""
        return self.times(1)

    def times(self, replicas: int) -> Sizes:
        """So many workers like these."""
        return Sizes(replicas, *(getattr(self, name) for name in SIZES[1:]))

    def to_dict(self) -> dict[str, int]:
        """The sizes by name."""
        return {name: getattr(self, name) for name in SIZES}

    def __str__(self) -> str:
        named = [f"{name} {getattr(self, name)}" for name in SIZES[2:] if getattr(self, name) > 1]
        replicas = [f"replicas {self.replicas}"] if self.replicas > 1 else []
        return ", ".join([f"tensor {self.tensor}", *named, *replicas])


class Layouts(Struct, frozen=True):
    """What the configuration of a role says of its sizes.

    kind: `menu` for the automatic one, `list` for `entries`, `domains` for `domains` of single sizes.
    path: of the field, for messages.
    """

    kind: Literal["menu", "list", "domains"]
    path: str
    entries: tuple[Sizes, ...] = ()
    domains: Mapping[str, Domain] = field(default_factory=dict)

    def values(self, name: str, most: int) -> list[int] | None:
        """What a size may be, up to `most`, ascending; None where nothing is said."""
        domain = self.domains.get(name)
        if domain is None:
            return None
        if isinstance(domain, Choices):
            return sorted(value for value in domain.values if isinstance(value, int) and value <= most)
        # Everything above the GPUs there are is out of reach, however large the range is.
        reachable = (int(domain.at(index)) for index in range(min(domain.count or 0, most)))
        return [value for value in reachable if value <= most]


def parse_layouts(value: Any, path: str) -> Layouts:
    """What a `parallelism` mapping asks for.

    Parameters
    ----------
    value: as read; None or an empty mapping is the automatic menu.
    path: of the field, for messages.

    Raises
    ------
    OnboardError: another form; a preset beside single sizes; an entry of a list without exactly the six sizes.

    Source: predict-recommend.md sections 2.2 and 6.2.

    >>> parse_layouts({"tensor": 2}, "parallelism").kind, parse_layouts({"preset": "default"}, "parallelism").kind
    ('domains', 'menu')
    """
    given = {} if value is None else value
    if not isinstance(given, Mapping):
        raise _fault(path, f"found {value!r}, accepted is a mapping of preset, or of {', '.join(SIZES)}")
    if unknown := sorted(set(given) - {"preset", *SIZES, *CONTEXT_SIZES}, key=str):
        raise _fault(
            f"{path}.{unknown[0]}", f"unknown field; known are preset, {', '.join(SIZES)}, {', '.join(CONTEXT_SIZES)}"
        )
    named = {name: given[name] for name in SIZES if given.get(name) is not None}
    preset = given.get("preset", False if named else "default")
    if preset is False or preset == {}:
        domains = {name: parse_domain(item, f"{path}.{name}", INTEGER) for name, item in named.items()}
        for name, domain in domains.items():
            if domain.lowest < 1:
                raise _fault(f"{path}.{name}", f"found {domain.lowest}, accepted are sizes of at least 1")
        return Layouts("domains", path, domains=domains)
    if named:
        raise _fault(
            f"{path}.preset",
            f"found {preset!r} beside {', '.join(named)}; leave preset out, or set preset: false, to search single "
            "sizes",
        )
    if preset == "default":
        return Layouts("menu", path)
    if not isinstance(preset, list) or not preset:
        raise _fault(f"{path}.preset", f"found {preset!r}, accepted are default, false and a list of mappings")
    entries = tuple(_entry(entry, f"{path}.preset[{place}]") for place, entry in enumerate(preset))
    return Layouts("list", path, entries=tuple(dict.fromkeys(entries)))


def _entry(entry: Any, path: str) -> Sizes:
    if not isinstance(entry, Mapping):
        raise _fault(path, f"found {entry!r}, accepted is a mapping of {', '.join(SIZES)}")
    sizes = {name: size for name, size in entry.items() if not (name in CONTEXT_SIZES and size in (None, 1))}
    missing, unknown = set(SIZES) - set(sizes), sorted(set(sizes) - set(SIZES), key=str)
    if missing or unknown:
        what = [f"missing {', '.join(name for name in SIZES if name in missing)}"] if missing else []
        what += [f"unknown {', '.join(map(str, unknown))}"] if unknown else []
        raise _fault(path, f"{' and '.join(what)}; an entry has exactly {', '.join(SIZES)}")
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise _fault(f"{path}.{name}", f"found {size!r}, accepted is an integer of at least 1")
    return Sizes(**sizes)


def _fault(path: str, what: str) -> OnboardError:
    return OnboardError(f"{path}: {what}", path)
