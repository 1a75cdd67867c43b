"""Groups of layers that share cache pages, as far as a configuration describes them: attention, windows, convolution.

Pages are the least that packed tensors take; what a runtime pads is not known. Source: onboarding.md sections 3.1 and
3.3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from fpmsdk.config.profile import CacheGroup
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.estimates import is_plain_cache
from fpmsdk.onboard.geometry import RequestFieldError, check_heads
from fpmsdk.onboard.layouts import INKLING, convolution_width, sliding_layers, window_tokens
from fpmsdk.onboard.request import SupportRequest
from fpmsdk.opgraph.quantization import CACHE_BYTES

_BF16_BYTES = 2
_LATENT_SIGNS = ("kv_lora_rank", "q_lora_rank", "compress_ratios", "attention_k_eq_v")


class _Group(NamedTuple):
    """A group without its block size; `token_bytes` of all its layers on one rank, None when unknown."""

    name: str
    kind: str
    num_layers: int
    sliding_window: int | None
    token_bytes: int | None


def derive_groups(
    raw: Mapping[str, Any],
    architecture: str | None,
    request: SupportRequest | None,
    sizes: Mapping[str, int],
    values: dict[str, Any],
    sources: dict[str, str],
    missing: dict[str, str],
) -> None:
    """Resolve `cache_layout` and `cache_groups` into `values` with their `sources`, or tell what is `missing`.

    Parameters
    ----------
    raw: the decoder's configuration in use.
    sizes: as from `rank_geometry`.
    values: profile fields resolved so far, overrides included.

    Raises
    ------
    OnboardError: an override contradicts the layers; names the field.
    RequestFieldError: the topology does not divide the heads.
    """
    if values.get("cache_layout") == "linear" or "kv_bytes_per_token" in values:
        raise OnboardError(
            "cache_layout linear and kv_bytes_per_token contradict layers with a window or convolution state; use "
            "cache_groups",
            "cache_layout",
        )
    if "cache_layout" not in values:
        values["cache_layout"], sources["cache_layout"] = "grouped", "windows and state of config.json, or cache_groups"
    missing.pop("kv_bytes_per_token", None)
    layers = sizes.get("num_hidden_layers")
    if not layers:
        missing["cache_groups"] = "config.json states no number of layers; state the groups of the runtime"
        return
    groups = _groups(raw, architecture, request, sizes, values)
    if "cache_groups" in values:
        _check_stated(values["cache_groups"], groups)
        return
    blocks = values.get("cache_block_sizes", {})
    if unknown := sorted(set(blocks) - {group.name for group in groups}):
        raise OnboardError(
            f"cache_block_sizes names {', '.join(unknown)}; this model has {', '.join(group.name for group in groups)}",
            "cache_block_sizes",
        )
    if open_groups := [group.name for group in groups if group.kind == "attention" and group.name not in blocks]:
        missing["cache_block_sizes"] = (
            f"state the tokens of a block of {', '.join(open_groups)}, as the runtime unifies them; or all cache_groups"
        )
        values.pop("cache_block_sizes", None)  # a part of them resolves nothing
        return
    if any(group.token_bytes is None for group in groups):
        missing["cache_groups"] = (
            "needs kv_cache_dtype, the geometry of layers and heads and the topology; a cache with scales or "
            "packing of its own is stated with its storage"
        )
        return
    values["cache_groups"] = [_page(group, blocks) for group in groups]
    sources["cache_groups"] = (
        "estimate: packed pages of all layers of a group on one rank, without the padding of the runtime; "
        + _told(groups)
    )


def _page(group: _Group, blocks: Mapping[str, int]) -> dict[str, Any]:
    assert group.token_bytes is not None
    # Convolution state is kept for its kernel's width.
    block = blocks.get(group.name) or group.sliding_window
    page = CacheGroup.model_validate(
        {
            "name": group.name,
            "kind": group.kind,
            "num_layers": group.num_layers,
            "block_size_tokens": block,
            "page_size_bytes": group.token_bytes * (block or 0),
            "sliding_window": group.sliding_window,
        }
    )
    return page.model_dump(mode="json")


def _told(groups: list[_Group]) -> str:
    return ", ".join(f"{group.name} {group.num_layers} layers, window {group.sliding_window}" for group in groups)


def _check_stated(stated: list[dict[str, Any]], groups: list[_Group]) -> None:
    expected: Counter[tuple[str, int | None]] = Counter()
    found: Counter[tuple[str, int | None]] = Counter()
    for group in groups:
        expected[group.kind, group.sliding_window] += group.num_layers
    for entry in stated:
        found[entry["kind"], entry.get("sliding_window")] += entry["num_layers"]
    if found != expected:
        raise OnboardError(
            f"cache_groups must keep the layers of config.json, {dict(expected)} by (kind, window), found "
            f"{dict(found)}",
            "cache_groups",
        )


def _groups(
    raw: Mapping[str, Any],
    architecture: str | None,
    request: SupportRequest | None,
    sizes: Mapping[str, int],
    values: Mapping[str, Any],
) -> list[_Group]:
    layers = sizes["num_hidden_layers"]
    # The wrapper's name where the decoder has none.
    sliding = len(sliding_layers(raw, architecture, inkling=values.get("architecture") == INKLING))
    groups = []
    for name, count, window in (("full", layers - sliding, None), ("sliding", sliding, window_tokens(raw))):
        if count:
            heads = _Heads.of(raw, sizes, "swa_" if name == "sliding" else "")
            groups.append(_attention(name, count, window, heads, raw, request, values))
            if raw.get("use_sconv"):
                groups.append(_convolution(name, count, heads, raw, request, sizes))
    return groups


class _Heads(NamedTuple):
    """Head geometry of one kind of layers, None where unknown."""

    heads: int | None
    shared: int | None
    key_size: int | None
    value_size: int | None
    prefix: str

    @classmethod
    def of(cls, raw: Mapping[str, Any], sizes: Mapping[str, int], prefix: str) -> _Heads:
        def size(name: str) -> int | None:
            return (raw.get(prefix + name) if prefix else None) or sizes.get(name)

        heads, shared, key = size("num_attention_heads"), size("num_key_value_heads"), size("head_dim")
        if heads and shared and heads % shared:
            raise OnboardError(
                f"{prefix}num_key_value_heads must divide {prefix}num_attention_heads, found {shared} and {heads}",
                f"{prefix}num_key_value_heads",
            )
        return cls(heads, shared, key, raw.get(prefix + "v_head_dim") or key, prefix)

    def local(self, request: SupportRequest | None) -> int | None:
        """Key-value heads of one rank."""
        if request is None or not self.heads:
            return None
        return check_heads(self.heads, self.shared, request.search.tensor_parallel, self.prefix)


def _attention(
    name: str,
    count: int,
    window: int | None,
    heads: _Heads,
    raw: Mapping[str, Any],
    request: SupportRequest | None,
    values: Mapping[str, Any],
) -> _Group:
    if values.get("architecture") == INKLING and heads.key_size != heads.value_size:
        raise OnboardError(f"v_head_dim: {INKLING} keeps keys and values of one size", "v_head_dim")
    local, dtype = heads.local(request), values.get("kv_cache_dtype")
    plain = is_plain_cache(raw) and not any(raw.get(sign) for sign in _LATENT_SIGNS)
    token_bytes = None
    if local and heads.key_size and heads.value_size and dtype and plain:
        token_bytes = int(count * local * (heads.key_size + heads.value_size) * CACHE_BYTES[dtype])
    return _Group(f"{name}_attention", "attention", count, window, token_bytes)


def _convolution(
    name: str,
    count: int,
    heads: _Heads,
    raw: Mapping[str, Any],
    request: SupportRequest | None,
    sizes: Mapping[str, int],
) -> _Group:
    hidden, shared = sizes.get("hidden_size"), heads.shared
    if request is not None and shared and request.search.tensor_parallel > shared:
        raise RequestFieldError(
            f"tensor_parallel {request.search.tensor_parallel} exceeds the {shared} key-value heads of {name} layers, "
            "over which convolution state is divided; attention DP and EP are other axes",
            "tensor_parallel",
        )
    if hidden and shared and hidden % shared:
        raise OnboardError(f"hidden_size {hidden} does not divide into {shared} key-value heads", "hidden_size")
    local, token_bytes = heads.local(request), None
    if local and hidden and shared and heads.key_size:
        elements = 2 * heads.key_size + 2 * (hidden // shared)
        packed = 1 << (elements - 1).bit_length()  # heads are packed to powers of two
        token_bytes = count * local * packed * _BF16_BYTES
    return _Group(f"{name}_convolution", "convolution", count, convolution_width(raw), token_bytes)
