"""Where the cache of every layer lies in memory, checked down to bytes: nothing is counted twice, nothing is left out.

A worker reports the views of its layers on backing storages: offset, shape, strides. From them it is shown that the
blocks of the pool own disjoint bytes, whatever an observer may claim.
Source: collector.md section 8.5 (physical).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fpmsdk.collect.cache_pool import PoolAccounting, cache_groups, is_in_host_memory, pool_accounting, positive
from fpmsdk.collect.runtime_settings import dtype_name
from fpmsdk.config.profile import MAX_BYTES
from fpmsdk.errors import EvidenceError

SEMANTICS = {
    "allocation": "shared_block_pool",
    "storage": "hbm",
    "retention": "full_or_window",
    "prefix_reuse": False,
    "offload": False,
    "speculative": False,
}
_ELEMENT_BYTES = {"bfloat16": 2, "half": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class _View:
    # The tensor of one layer; `kernel_blocks` of its block axis make one block of the pool.
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int
    block_axis: int
    kernel_blocks: int

    @property
    def others(self) -> list[tuple[int, int]]:
        # (stride, size) of every axis but that of the blocks, inner first.
        pairs = [
            pair
            for axis, pair in enumerate(zip(self.strides, self.shape, strict=True))
            if axis != self.block_axis and pair[1] > 1
        ]
        return sorted(pairs)


def checked_geometry(
    cache: Mapping[str, Any], scheduled: Mapping[str, Any], precision: str
) -> tuple[list[dict[str, Any]], PoolAccounting]:
    """The groups and the pool of one rank, after every layer's memory was accounted for.

    Parameters
    ----------
    cache, scheduled: the `cache` objects of a worker and of its scheduler.
    precision: the resolved dtype of the cache.

    Returns
    -------
    The groups as a profile writes them, and the accounting of their pool.

    Raises
    ------
    EvidenceError: memory that is missing, shared undeclared or counted twice, or an unsupported layout.
    """
    pool = pool_accounting(cache, scheduled, allow_cpu=True)
    semantics = {**SEMANTICS, "storage": "host"} if is_in_host_memory(cache) else SEMANTICS
    if cache.get("semantics") != semantics:
        raise EvidenceError(f"cache.semantics: expected {semantics}, found {cache.get('semantics')!r}")
    _check_pool_identity(cache, scheduled, pool)
    groups = cache_groups(cache, scheduled, pool.page_size_bytes)
    group_of_layer = _check_groups(cache, precision)
    storages = _storage_bytes(cache["storages"], pool.num_blocks)
    _check_allocations(cache, storages, group_of_layer, pool.num_blocks, precision)
    return groups, pool


def _count(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_BYTES:
        raise EvidenceError(f"{name}: expected an integer from 0 to 2**53, found {value!r}")
    return value


def _check_pool_identity(cache: Mapping[str, Any], scheduled: Mapping[str, Any], pool: PoolAccounting) -> None:
    name = cache.get("pool_id")
    if not isinstance(name, str) or not name.strip():
        raise EvidenceError(f"cache.pool_id: expected a name, found {name!r}")
    groups = cache.get("groups")
    owners = [name] * len(groups) if isinstance(groups, list) else None
    for field, expected in (("pool_id", name), ("group_pool_ids", owners)):
        if scheduled.get(field) != expected:
            raise EvidenceError(f"scheduler cache.{field}: expected {expected!r}, found {scheduled.get(field)!r}")
    reserved = scheduled.get("permanent_reserved_block_ids")
    if (
        not isinstance(reserved, list)
        or any(type(block) is not int or not 0 <= block < pool.num_blocks for block in reserved)
        or len(set(reserved)) < len(reserved)
        or len(reserved) != pool.num_blocks - pool.initial_free_blocks
        or scheduled["null_block_id"] not in reserved
    ):
        raise EvidenceError(
            "scheduler cache.permanent_reserved_block_ids: expected the null block and every other block that is not "
            f"free, found {reserved!r}"
        )


def _check_groups(cache: Mapping[str, Any], precision: str) -> dict[str, tuple[int, Mapping[str, Any]]]:
    group_of_layer = {}
    for place, group in enumerate(cache["groups"]):
        where = f"cache.groups[{place}]"
        if group.get("pool_id") != cache["pool_id"]:
            raise EvidenceError(f"{where}.pool_id: expected {cache['pool_id']!r}, found {group.get('pool_id')!r}")
        retained = group.get("extra_retained_tokens")
        if type(retained) is not int or retained != 0:
            raise EvidenceError(f"{where}.extra_retained_tokens: only 0 is supported, found {retained!r}")
        if group.get("attention_chunk_size") is not None:
            raise EvidenceError(
                f"{where}.attention_chunk_size: chunked retention is unsupported, found "
                f"{group['attention_chunk_size']!r}"
            )
        dtype = dtype_name(group.get("dtype"))
        # FP8 is stored as raw bytes; the settings of the engine say that it is FP8.
        if dtype != precision and (dtype, precision) != ("torch.uint8", "fp8"):
            raise EvidenceError(f"{where}.dtype: expected {precision}, found {group.get('dtype')!r}")
        positive(group.get("spec_page_size_bytes"), f"{where}.spec_page_size_bytes")
        group_of_layer.update(dict.fromkeys(group["layer_names"], (place, group)))
    return group_of_layer


def _storage_bytes(storages: Sequence[Mapping[str, Any]], num_blocks: int) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for place, storage in enumerate(storages):
        name = storage.get("storage_id")
        if not isinstance(name, str) or not name.strip() or name in sizes:
            raise EvidenceError(f"cache.storages[{place}].storage_id: expected a name of its own, found {name!r}")
        if storage["size_bytes"] % num_blocks:
            raise EvidenceError(f"cache.storages[{place}].size_bytes: no whole number for each of {num_blocks} blocks")
        sizes[name] = storage["size_bytes"]
    return sizes


def _check_allocations(
    cache: Mapping[str, Any],
    storages: Mapping[str, int],
    group_of_layer: Mapping[str, tuple[int, Mapping[str, Any]]],
    num_blocks: int,
    precision: str,
) -> None:
    tensors, allocations = cache.get("layer_tensors"), cache.get("tensor_allocations")
    if not isinstance(tensors, dict) or set(tensors) != set(group_of_layer):
        raise EvidenceError("cache.layer_tensors: expected the tensor of every layer of every group")
    if not isinstance(allocations, list) or not allocations:
        raise EvidenceError("cache.tensor_allocations: expected the allocation plan")
    covered: set[str] = set()
    slots: dict[str, list[tuple[int, int, int]]] = {}  # (block stride, first byte, end) of every storage
    for place, allocation in enumerate(allocations):
        where = f"cache.tensor_allocations[{place}]"
        if not isinstance(allocation, dict):
            raise EvidenceError(f"{where}: expected an object, found {allocation!r}")
        names = _shared_by(allocation, group_of_layer, covered, where)
        covered.update(names)
        width = max(group_of_layer[name][1]["spec_page_size_bytes"] for name in names)
        storage, stride, offset = _slot(allocation, storages, slots, num_blocks, width, where)
        slots.setdefault(storage, []).append((stride, offset, offset + width))
        views = []
        for name in names:
            tensor = tensors[name]
            layer = f"cache.layer_tensors[{name}]"
            if not isinstance(tensor, dict) or tensor.get("storage_id") != storage:
                raise EvidenceError(f"{layer}.storage_id: expected {storage!r} as allocated, found {tensor!r}")
            if _count(tensor.get("storage_offset_bytes"), f"{layer}.storage_offset_bytes") != offset:
                raise EvidenceError(
                    f"{layer}.storage_offset_bytes: expected {offset} as allocated, found "
                    f"{tensor['storage_offset_bytes']}"
                )
            group = group_of_layer[name][1]
            view = _view(tensor, group, num_blocks, layer)
            _check_view(view, group, layer, num_blocks=num_blocks, end=storages[storage] - offset, packed_stride=stride)
            if view.element_bytes != _ELEMENT_BYTES.get(precision, view.element_bytes):
                raise EvidenceError(f"{layer}.element_size_bytes: {view.element_bytes} contradicts {precision}")
            views.append(view)
        _check_block_ownership(views, num_blocks, where)
    if covered != set(group_of_layer) or set(slots) != set(storages):
        raise EvidenceError("cache.tensor_allocations: expected to cover every layer and every storage")


def _shared_by(
    allocation: Mapping[str, Any],
    group_of_layer: Mapping[str, tuple[int, Mapping[str, Any]]],
    covered: set[str],
    where: str,
) -> list[str]:
    names = allocation.get("shared_by")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise EvidenceError(f"{where}.shared_by: expected names of layers, found {names!r}")
    unknown = [name for name in names if name not in group_of_layer]
    if unknown or len(set(names)) < len(names) or covered & set(names):
        raise EvidenceError(f"{where}.shared_by: every layer must be allocated exactly once, found {names!r}")
    if len({group_of_layer[name][0] for name in names}) < len(names):
        raise EvidenceError(f"{where}.shared_by: layers of one group cannot share a slot, found {names!r}")
    return list(names)


def _slot(
    allocation: Mapping[str, Any],
    storages: Mapping[str, int],
    slots: Mapping[str, Sequence[tuple[int, int, int]]],
    num_blocks: int,
    width: int,
    where: str,
) -> tuple[str, int, int]:
    storage, size = allocation.get("storage_id"), allocation.get("size")
    if not isinstance(storage, str) or storage not in storages or type(size) is not int or size != storages[storage]:
        raise EvidenceError(f"{where}: expected a reported storage with its size, found {storage!r} with {size!r}")
    stride = _count(allocation.get("block_stride"), f"{where}.block_stride")
    offset = _count(allocation.get("offset"), f"{where}.offset")
    slot_bytes = size // num_blocks
    others = slots.get(storage, ())
    if stride not in (0, slot_bytes):
        _check_plane(stride, offset, slot_bytes, num_blocks, width, where)
        if any(other[:2] == (stride, offset) for other in others) or any(other[0] != stride for other in others):
            raise EvidenceError(f"{where}: the plane at byte {offset} overlaps another allocation of the storage")
        return storage, stride, offset
    if (stride == 0 and (offset or others)) or any(other[0] != stride for other in others):
        raise EvidenceError(f"{where}: only packed allocations may share a storage")
    if offset + width > slot_bytes:
        raise EvidenceError(f"{where}: bytes {offset} to {offset + width} exceed the slot of {slot_bytes} bytes")
    if any(offset < end and first < offset + width for _, first, end in others):
        raise EvidenceError(f"{where}: bytes {offset} to {offset + width} of the slot overlap another allocation")
    return storage, stride, offset


def _check_plane(stride: int, offset: int, slot_bytes: int, num_blocks: int, width: int, where: str) -> None:
    # A plane holds one page of every block, and planes of equal pages follow each other: layer after layer.
    if slot_bytes % stride or offset % (stride * num_blocks) or offset >= slot_bytes * num_blocks:
        raise EvidenceError(
            f"{where}: expected a block_stride of 0, of {slot_bytes} when packed, or of a part of it with planes of "
            f"{num_blocks} pages, found {stride} at byte {offset}"
        )
    if width > stride:
        raise EvidenceError(f"{where}: pages of {width} bytes overlap at a block_stride of {stride}")


def _view(tensor: Mapping[str, Any], group: Mapping[str, Any], num_blocks: int, layer: str) -> _View:
    shape, strides = tensor.get("shape"), tensor.get("stride_bytes")
    if not isinstance(shape, list) or not isinstance(strides, list) or not shape or len(shape) != len(strides):
        raise EvidenceError(
            f"{layer}: expected shape and stride_bytes of equal length, found {shape!r} and {strides!r}"
        )
    element = positive(tensor.get("element_size_bytes"), f"{layer}.element_size_bytes")
    sizes = tuple(positive(size, f"{layer}.shape") for size in shape)
    steps = tuple(_count(stride, f"{layer}.stride_bytes") for stride in strides)
    if any(step % element for step in steps):
        raise EvidenceError(f"{layer}.stride_bytes: expected multiples of {element} bytes, found {strides}")
    axis = _count(tensor.get("block_axis"), f"{layer}.block_axis")
    kernel = positive(tensor.get("kernel_block_size_tokens"), f"{layer}.kernel_block_size_tokens")
    block = group["block_size_tokens"]
    if axis >= len(sizes) or block % kernel or sizes[axis] != num_blocks * (block // kernel):
        raise EvidenceError(
            f"{layer}: {num_blocks} blocks of {block} tokens, in kernel blocks of {kernel}, do not make axis {axis} of "
            f"shape {shape}"
        )
    return _View(sizes, steps, element, axis, block // kernel)


def _check_view(
    view: _View, group: Mapping[str, Any], layer: str, *, num_blocks: int, end: int, packed_stride: int
) -> None:
    span = view.element_bytes
    for stride, size in sorted(zip(view.strides, view.shape, strict=True)):
        if size > 1 and stride < span:
            raise EvidenceError(f"{layer}: axes of the tensor overlap: {view.shape} with strides {view.strides}")
        span += (size - 1) * stride
    if span > end:
        raise EvidenceError(f"{layer}: {span} bytes exceed the {end} that are left of the storage")
    page = group["spec_page_size_bytes"]
    if math.prod(view.shape) * view.element_bytes > num_blocks * page:
        raise EvidenceError(f"{layer}: the tensor is larger than {num_blocks} pages of {page} bytes")
    if packed_stride:
        # Blocks of kernels may divide a page only where pages follow each other without a gap.
        is_divisible = view.kernel_blocks == 1 or page == packed_stride
        if not is_divisible or view.kernel_blocks * view.strides[view.block_axis] != packed_stride:
            raise EvidenceError(f"{layer}: a packed tensor must step {packed_stride} bytes from block to block")
        if view.element_bytes + sum((size - 1) * stride for stride, size in view.others) > page:
            raise EvidenceError(f"{layer}: a block of the packed tensor exceeds its page of {page} bytes")


def _check_block_ownership(views: Sequence[_View], num_blocks: int, where: str) -> None:
    # All views of an allocation must give the same bytes to the same block. Their common form: a step from block to
    # block, and planes (as of K and V) that each hold all blocks.
    ownership: tuple[int, list[tuple[int, int]]] | None = None
    block_bytes = 0
    for view in views:
        stride = view.strides[view.block_axis]
        step = view.kernel_blocks * stride
        inside = view.element_bytes + (view.kernel_blocks - 1) * stride
        planes: list[tuple[int, int]] = []
        for outer, size in view.others:
            if outer < step:
                inside += (size - 1) * outer
            elif planes and outer == math.prod(planes[-1]):
                planes[-1] = (planes[-1][0], planes[-1][1] * size)
            else:
                planes.append((outer, size))
        if ownership not in (None, (step, planes)):
            raise EvidenceError(f"{where}: layers that share it give different bytes to the blocks of the pool")
        ownership = (step, planes)
        block_bytes = max(block_bytes, inside)
    assert ownership is not None
    step, planes = ownership
    if block_bytes > step:
        raise EvidenceError(f"{where}: blocks of {block_bytes} bytes overlap at a step of {step} bytes")
    span = (num_blocks - 1) * step + block_bytes
    for stride, size in planes:
        if stride < span:
            raise EvidenceError(f"{where}: planes of the blocks overlap")
        span += (size - 1) * stride
