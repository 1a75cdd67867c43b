"""What an engine promises of the KV that decode and prefix points read, and whether it kept the promise.

Source: collector.md sections 5.1 (kv_seed_regime) and 5.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fpmsdk.collect.faults import fault, mapping, require, text

if TYPE_CHECKING:
    from fpmsdk.collect.cells import Cell

DENSE_SKIP = "dense_model_content_insensitive"
BALANCED_SKIP = "moe_tp_balanced_by_construction"

# Regimes that a point's reasons must confirm.
STAMPS = {
    "real_prefix": "prefill_real_seed",
    "fake_prefix": "prefill_fake_prefix",
    "real_kv": "kvwarm_real_kv",
    "fake_fallback": "kvwarm_fake_fallback",
}


def check_kvwarm(cell: Cell, block: Any, where: str) -> dict[str, Any] | None:
    """The KV warm-up block of a rank file, or None where an older engine wrote none.

    Parameters
    ----------
    cell: layouts that read real KV may not go without it.
    block: the value of `kvwarm`.
    where: the rank file.

    Raises
    ------
    CollectionError: the block contradicts itself, or real KV was required and not read.
    """
    where = f"{where}: kvwarm"
    if cell.workload_kind != "decode":
        return None if block is None else dict(mapping(block, where))
    if block is None:
        if cell.needs_warm_kv:
            raise fault(where, None, f"the block, which decode of layout {cell.parallel_strategy} requires")
        return None
    block = mapping(block, where)
    for name in ("enabled", "warm_eligible"):
        require(type(block.get(name)) is bool, f"{where}.{name}", block.get(name), "true or false")
    reason = block.get("skip_reason")
    if block["warm_eligible"]:
        require(reason is None, f"{where}.skip_reason", reason, "null, as warm_eligible is true")
    else:
        text(reason, f"{where}.skip_reason")
    if cell.needs_warm_kv and not (block["enabled"] and block["warm_eligible"]):
        raise fault(
            where,
            {"enabled": block["enabled"], "skip_reason": reason},
            f"real KV, which {cell.parallel_strategy} needs",
        )
    return dict(block)


def check_regime(regime: Any, point: Mapping[str, Any], kvwarm: Mapping[str, Any] | None, where: str) -> str | None:
    """What the KV of a point was seeded with; None where the engine is too old to say.

    Raises
    ------
    CollectionError: the reasons of the point, its phase or the KV warm-up say otherwise.

    Example
    -------
    >>> point = {"point_type": "decode", "total_kv_read_tokens": 4, "sample_reasons": ["kvwarm_fake_fallback"]}
    >>> check_regime("fake_fallback", point, None, "row")
    'fake_fallback'
    """
    if regime is None:
        return None
    where = f"{where}.kv_seed_regime"
    found = text(regime, where)
    stamps = set(point.get("sample_reasons") or ()) & set(STAMPS.values())
    expected = {STAMPS[found]} if found in STAMPS else set()
    require(stamps == expected, where, found, f"a regime that the sample reasons {sorted(stamps)} confirm")
    is_prefix = found in ("real_prefix", "fake_prefix")
    require(not is_prefix or point["point_type"] == "prefill", where, found, "no prefix regime on a decode point")
    require(
        found != "fake_prefix" or point["total_kv_read_tokens"] > 0,
        where,
        found,
        "no fake prefix on a point without KV",
    )
    if found == "real_kv" and point["point_type"] == "decode" and kvwarm is not None:
        require(kvwarm["enabled"] and kvwarm["warm_eligible"], where, found, "no real KV, as the warm-up was not done")
    return found
