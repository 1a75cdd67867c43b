"""One shared pool of cache blocks as a worker allocated it and its scheduler uses it.

Every group of layers draws its pages from the one pool, so that a page costs what a block of the pool costs, padding
included; blocks that are reserved for good are no capacity.
Source: collector.md section 8.2, onboarding.md section 6.3 (observation to profile).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fpmsdk.config.profile import MAX_BYTES
from fpmsdk.errors import EvidenceError

FULL_ATTENTION = "vllm.v1.kv_cache_interface.FullAttentionSpec"
SLIDING_WINDOW = "vllm.v1.kv_cache_interface.SlidingWindowSpec"
CPU_DEVICE = "cpu"
CONVOLUTION_STATE = "vllm.models.inkling.nvidia.sconv_swa_attn.InklingConvState"
CONVOLUTION_WINDOW_TOKENS = 4
# A scheduler knows neither of the two.
_WORKER_ONLY = ("kind", "layer_classes")


class PoolAccounting(NamedTuple):
    """Blocks and bytes of the pool of one rank.

    >>> PoolAccounting(1000, 999, 1_024_000, 1_024_512, 1024).kv_cache_bytes
    1022976
    """

    num_blocks: int
    initial_free_blocks: int
    allocated_cache_bytes: int
    available_cache_bytes: int
    page_size_bytes: int

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the blocks that requests can have."""
        return self.initial_free_blocks * self.page_size_bytes


def positive(value: Any, name: str) -> int:
    """An integer from 1 to 2**53.

    >>> positive(3, "cache.num_blocks")
    3
    """
    if type(value) is not int or not 0 < value <= MAX_BYTES:
        raise EvidenceError(f"{name}: expected an integer from 1 to 2**53, found {value!r}")
    return value


def is_in_host_memory(cache: Mapping[str, Any]) -> bool:
    """Whether the first storage of a cache is one of a CPU; the storages of a sound cache are on one device.

    >>> is_in_host_memory({"storages": [{"device": "cpu"}]}), is_in_host_memory({"storages": [{"device": "cuda:0"}]})
    (True, False)
    """
    storages = cache.get("storages")
    first = storages[0] if isinstance(storages, list) and storages else None
    return isinstance(first, dict) and first.get("device") == CPU_DEVICE


def pool_accounting(
    cache: Mapping[str, Any], scheduled: Mapping[str, Any], *, allow_cpu: bool = False
) -> PoolAccounting:
    """Recompute what the pool holds from both of its records.

    Parameters
    ----------
    cache, scheduled: the `cache` objects of a worker and of its scheduler.
    allow_cpu: whether the storages may be in the memory of the host, as those of an engine that runs on a CPU.

    Raises
    ------
    EvidenceError: they contradict each other or themselves, or the pool is of an unsupported kind; names the field.
    """
    count = positive(cache.get("num_blocks"), "cache.num_blocks")
    free = positive(scheduled.get("initial_free_blocks"), "scheduler cache.initial_free_blocks")
    for name, expected in (
        ("num_blocks", count),
        ("pool_count", 1),
        ("watermark_blocks", 0),
        ("reserved_blocks", count - free),
    ):
        found = scheduled.get(name)
        if type(found) is not int or found != expected:
            raise EvidenceError(f"scheduler cache.{name}: expected {expected}, found {found!r}")
    null_block = scheduled.get("null_block_id")
    if type(null_block) is not int or not 0 <= null_block < count or free >= count:
        raise EvidenceError(
            f"scheduler cache: of {count} blocks at least the null block is reserved; found {free} free and null block "
            f"{null_block!r}"
        )
    allocated = positive(cache.get("allocated_cache_bytes"), "cache.allocated_cache_bytes")
    available = positive(cache.get("available_cache_bytes"), "cache.available_cache_bytes")
    _check_storages(cache.get("storages"), allocated, allow_cpu)
    if allocated > available:
        raise EvidenceError(f"cache: allocated {allocated} bytes exceed the profiled budget of {available}")
    if allocated % count:
        raise EvidenceError(f"cache: {allocated} allocated bytes are no whole number for each of {count} blocks")
    return PoolAccounting(count, free, allocated, available, allocated // count)


def cache_groups(cache: Mapping[str, Any], scheduled: Mapping[str, Any], page_size_bytes: int) -> list[dict[str, Any]]:
    """The groups of layers, in the order of the runtime, as a profile writes them; each costs the whole page.

    Raises
    ------
    EvidenceError: groups of the two records differ, a layer is in two groups, or a group is of an unsupported kind.
    """
    groups, known = cache.get("groups"), scheduled.get("groups")
    if not isinstance(groups, list) or not groups or not isinstance(known, list) or len(groups) != len(known):
        raise EvidenceError("cache.groups: worker and scheduler must report the same groups, at least one")
    layers: set[str] = set()
    found = []
    for place, (group, other) in enumerate(zip(groups, known, strict=True)):
        where = f"cache.groups[{place}]"
        if not isinstance(group, dict) or not isinstance(other, dict):
            raise EvidenceError(f"{where}: expected an object")
        if {name: value for name, value in group.items() if name not in _WORKER_ONLY} != other:
            raise EvidenceError(f"{where}: worker and scheduler report different geometry")
        names = group.get("layer_names")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            raise EvidenceError(f"{where}.layer_names: expected names of layers, found {names!r}")
        if len(set(names)) < len(names) or layers & set(names):
            raise EvidenceError(f"{where}.layer_names: a layer is named twice")
        layers.update(names)
        _check_kind(group, where)
        found.append(
            {
                "name": f"runtime_group_{place}",
                "kind": group["kind"],
                "num_layers": len(names),
                "block_size_tokens": positive(group.get("block_size_tokens"), f"{where}.block_size_tokens"),
                "page_size_bytes": page_size_bytes,
                "sliding_window": group.get("sliding_window"),
            }
        )
    return found


def _check_storages(storages: Any, allocated_bytes: int, allow_cpu: bool) -> None:
    if not isinstance(storages, list) or not storages or not all(isinstance(item, dict) for item in storages):
        raise EvidenceError("cache.storages: expected the backing storages, at least one")
    places = []
    for place, storage in enumerate(storages):
        device, pointer = storage.get("device"), storage.get("pointer")
        is_known = isinstance(device, str) and (device.startswith("cuda:") or (allow_cpu and device == CPU_DEVICE))
        if not is_known:
            accepted = "cuda:N or cpu" if allow_cpu else "cuda:N"
            raise EvidenceError(f"cache.storages[{place}].device: expected {accepted}, found {device!r}")
        places.append((device, positive(pointer, f"cache.storages[{place}].pointer")))
    if len(set(places)) < len(places) or len({device for device, _ in places}) > 1:
        raise EvidenceError(f"cache.storages: each must be listed once and all be on one device, found {places}")
    total = sum(
        positive(item.get("size_bytes"), f"cache.storages[{place}].size_bytes") for place, item in enumerate(storages)
    )
    if total != allocated_bytes:
        raise EvidenceError(f"cache.storages: they have {total} bytes, allocated are {allocated_bytes}")


def _check_kind(group: Mapping[str, Any], where: str) -> None:
    spec, window, kind = group.get("spec_type"), group.get("sliding_window"), group.get("kind")
    if spec not in (FULL_ATTENTION, SLIDING_WINDOW):
        raise EvidenceError(f"{where}.spec_type: expected {FULL_ATTENTION} or {SLIDING_WINDOW}, found {spec!r}")
    if spec == SLIDING_WINDOW:
        positive(window, f"{where}.sliding_window")
    elif window is not None:
        raise EvidenceError(f"{where}.sliding_window: full attention has none, found {window!r}")
    if kind not in ("attention", "convolution") or (kind == "convolution" and window != CONVOLUTION_WINDOW_TOKENS):
        raise EvidenceError(
            f"{where}.kind: expected attention, or convolution with a window of {CONVOLUTION_WINDOW_TOKENS}, found "
            f"{kind!r} with {window!r}"
        )
    classes = group.get("layer_classes")
    if not isinstance(classes, dict) or set(classes) != set(group["layer_names"]):
        raise EvidenceError(f"{where}.layer_classes: expected the class of every layer of the group")
    for layer, name in classes.items():
        if not isinstance(name, str) or not name or (name == CONVOLUTION_STATE) != (kind == "convolution"):
            raise EvidenceError(f"{where}.layer_classes[{layer}]: {name!r} contradicts the kind {kind}")
