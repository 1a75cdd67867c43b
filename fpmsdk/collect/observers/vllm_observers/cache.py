"""The KV cache of a worker or a scheduler as an observation writes it: groups, storages, views, blocks of the pool.

Objects of the engine are read and never kept or changed. What cannot be told is named in `unresolved`, not left out.
Source: collector.md sections 8.2 and 8.5, vllm-facts.md sections 4.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .settings import class_name

POOL = "pool-0"
SEMANTICS = {
    "allocation": "shared_block_pool",
    "storage": "hbm",
    "retention": "full_or_window",
    "prefix_reuse": False,
    "offload": False,
    "speculative": False,
}
_SPECS = ("FullAttentionSpec", "SlidingWindowSpec")
_CONVOLUTION_STATE = "InklingConvState"


class Unresolved:
    """What an observer could not tell: fields of the record, and why.

    >>> found = Unresolved()
    >>> found.add("cache.groups[0].spec_type", "MambaSpec is not supported")
    >>> found.fields, found.reasons
    (['cache.groups[0].spec_type'], ['cache.groups[0].spec_type: MambaSpec is not supported'])
    """

    def __init__(self) -> None:
        self.fields: list[str] = []
        self.reasons: list[str] = []

    def add(self, field: str, reason: str) -> None:
        """Note a field and the reason."""
        self.fields.append(field)
        self.reasons.append(f"{field}: {reason}")


def group_records(config: Any, unresolved: Unresolved) -> list[dict[str, Any]]:
    """The groups of layers, in the order of the engine, as workers and schedulers both know them.

    Parameters
    ----------
    config: a `KVCacheConfig`.
    unresolved: gets the groups that are no plain attention with full or windowed retention.
    """
    groups = []
    for place, group in enumerate(config.kv_cache_groups):
        spec, where = group.kv_cache_spec, f"cache.groups[{place}]"
        if type(spec).__name__ not in _SPECS:
            unresolved.add(f"{where}.spec_type", f"caches of {type(spec).__name__} are not supported")
        for name in ("is_eagle_group", "host_resident"):
            if getattr(group, name, False):
                unresolved.add(f"{where}.{name}", "such groups are not supported")
        dtype = getattr(spec, "dtype", None)
        groups.append(
            {
                "layer_names": list(group.layer_names),
                "spec_type": class_name(type(spec)),
                "sliding_window": getattr(spec, "sliding_window", None),
                "block_size_tokens": spec.block_size,
                "pool_id": POOL,
                # Specifications of 0.27 have no such field, and retain nothing beyond the window.
                "extra_retained_tokens": getattr(spec, "extra_retained_tokens", 0),
                "attention_chunk_size": getattr(spec, "attention_chunk_size", None),
                "dtype": None if dtype is None else str(dtype),
                "spec_page_size_bytes": spec.page_size_bytes,
            }
        )
    return groups


def worker_cache(
    config: Any,
    layers: Mapping[str, Any],
    kernel_blocks_tokens: Sequence[int],
    available_bytes: int,
    unresolved: Unresolved,
) -> dict[str, Any]:
    """What a worker allocated.

    Parameters
    ----------
    config: the `KVCacheConfig` it allocated for.
    layers: the attention layers by name (`static_forward_context`); `kv_cache` of each is its view.
    kernel_blocks_tokens: tokens of a kernel's block, for each group.
    available_bytes: the budget that the engine profiled.
    unresolved: gets what is not supported.

    Returns
    -------
    `cache` of a worker's record.
    """
    groups = group_records(config, unresolved)
    views: dict[str, dict[str, Any]] = {}
    storages: dict[tuple[str, int], dict[str, Any]] = {}
    for place, group in enumerate(groups):
        group["layer_classes"] = {name: class_name(type(layers[name])) for name in group["layer_names"]}
        states = {name.endswith(_CONVOLUTION_STATE) for name in group["layer_classes"].values()}
        group["kind"] = "convolution" if states == {True} else "attention"
        for name in group["layer_names"]:
            tensor = layers[name].kv_cache
            if not hasattr(tensor, "untyped_storage"):
                unresolved.add(f"cache.layer_tensors[{name}]", f"{type(tensor).__name__} of tensors is not supported")
                continue
            storage = _storage(tensor, storages)
            views[name] = _view(
                tensor, storage, group, config.num_blocks, kernel_blocks_tokens[place], name, unresolved
            )
    in_host = any(storage["device"] == "cpu" for storage in storages.values())
    return {
        "semantics": {**SEMANTICS, "storage": "host"} if in_host else dict(SEMANTICS),
        "pool_id": POOL,
        "num_blocks": config.num_blocks,
        # Distinct storages: sizes of the plan's tensors would count shared memory again.
        "allocated_cache_bytes": sum(storage["size_bytes"] for storage in storages.values()),
        "available_cache_bytes": int(available_bytes),
        "groups": groups,
        "storages": list(storages.values()),
        "tensor_allocations": _allocations(config.kv_cache_tensors, views, unresolved),
        "layer_tensors": views,
    }


def scheduler_cache(scheduler: Any, unresolved: Unresolved) -> dict[str, Any]:
    """The pool that a scheduler gives blocks from.

    Parameters
    ----------
    scheduler: the engine's own, just constructed.
    unresolved: gets what is not supported.

    Returns
    -------
    `cache` of a scheduler's record.
    """
    config, manager = scheduler.kv_cache_config, scheduler.kv_cache_manager
    pool = manager.block_pool
    pools = {id(group.block_pool) for group in manager.coordinator.single_type_managers} | {id(pool)}
    free, null_block = pool.get_num_free_blocks(), pool.null_block.block_id
    reserved = pool.num_gpu_blocks - free
    if reserved != 1:
        unresolved.add("cache.permanent_reserved_block_ids", f"{reserved} blocks are not free, and one is explained")
    if len(pools) > 1:
        unresolved.add("cache.pool_count", f"{len(pools)} pools are not supported")
    groups = group_records(config, unresolved)
    return {
        "groups": groups,
        "num_blocks": pool.num_gpu_blocks,
        "initial_free_blocks": free,
        "reserved_blocks": reserved,
        "null_block_id": null_block,
        "permanent_reserved_block_ids": [null_block],
        "pool_count": len(pools),
        "pool_id": POOL,
        "group_pool_ids": [POOL] * len(groups),
        "watermark_blocks": manager.watermark_blocks,
    }


def _storage(tensor: Any, storages: dict[tuple[str, int], dict[str, Any]]) -> str:
    storage = tensor.untyped_storage()
    device, pointer = str(tensor.device), storage.data_ptr()
    told = storages.setdefault(
        (device, pointer),
        {
            "storage_id": f"storage-{len(storages)}",
            "device": device,
            "pointer": pointer,
            "size_bytes": storage.nbytes(),
        },
    )
    return str(told["storage_id"])


def _view(
    tensor: Any,
    storage: str,
    group: Mapping[str, Any],
    num_blocks: int,
    kernel_tokens: int,
    name: str,
    unresolved: Unresolved,
) -> dict[str, Any]:
    element = tensor.element_size()
    shape = list(tensor.shape)
    blocks = num_blocks * (group["block_size_tokens"] // kernel_tokens)
    axes = [axis for axis, size in enumerate(shape) if size == blocks]
    # Backends of these versions put blocks outermost, or keys and values before them; an inner axis of the same size
    # is a coincidence, and one that cannot be told apart is said.
    if not axes or (len(axes) > 1 and axes[0] != 0):
        unresolved.add(f"cache.layer_tensors[{name}].block_axis", f"{blocks} blocks do not make one axis of {shape}")
    return {
        "storage_id": storage,
        "storage_offset_bytes": tensor.storage_offset() * element,
        "shape": shape,
        "stride_bytes": [stride * element for stride in tensor.stride()],
        "element_size_bytes": element,
        "block_axis": axes[0] if axes else 0,
        "kernel_block_size_tokens": kernel_tokens,
    }


def _allocations(
    tensors: Sequence[Any], views: Mapping[str, Mapping[str, Any]], unresolved: Unresolved
) -> list[dict[str, Any]]:
    """The plan of the allocation, one entry for every place; layers that alias it stand in one entry."""
    places: dict[tuple[str, int, int], dict[str, Any]] = {}
    for number, tensor in enumerate(tensors):
        if getattr(tensor, "host_resident", False):
            unresolved.add(f"cache.tensor_allocations[{number}]", "memory of the host is not supported")
        # 0.31 places layer after layer, each at a step of its own; before, all layers of an entry share its place.
        placed = [
            (layer, tensor.offset + position * getattr(tensor, "layer_stride", 0))
            for position, layer in enumerate(tensor.layers if hasattr(tensor, "layers") else tensor.shared_by)
        ]
        for layer, offset in placed:
            if layer not in views:
                if not unresolved.fields:
                    unresolved.add(f"cache.tensor_allocations[{number}]", f"{layer} is in no group")
                continue
            storage = views[layer]["storage_id"]
            entry = {"storage_id": storage, "size": tensor.size, "shared_by": []}
            entry |= {"block_stride": tensor.block_stride, "offset": offset}
            places.setdefault((storage, offset, tensor.block_stride), entry)["shared_by"].append(layer)
    return list(places.values())
