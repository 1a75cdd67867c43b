"""What is told of a draft that cannot be saved yet: the fields to state, or the way through the runtime probe.

Source: onboarding.md section 3.1, item 7.
"""

from __future__ import annotations

from fpmsdk.onboard.draft import ProfileDraft
from fpmsdk.onboard.overrides import CLAIMED_GEOMETRY


def open_fields(draft: ProfileDraft) -> str:
    """The missing fields with their reasons, and where to look them up."""
    lines = ["profile fields that are still open:"]
    lines += [f"  {name}: {reason}" for name, reason in draft.missing.items()]
    lines.append(
        "Look them up in the pinned runtime and the checkpoint, and state them in --resource-overrides (flat YAML or "
        "JSON, bytes of one rank), or use --interactive"
    )
    return "\n".join(lines)


def probe_guidance(draft: ProfileDraft, candidates: str | None = None, *, has_candidates: bool = True) -> str:
    """Why nothing can be saved before a probe, and what to do next.

    Parameters
    ----------
    draft: one with `pending_runtime`.
    candidates: the shortlist, None when the topology is named.
    has_candidates: whether that shortlist holds any.
    """
    lines = ["cache geometry is pending the runtime probe"]
    if draft.missing:
        lines.append(open_fields(draft))
    lines += [f"  {name}: {reason}" for name, reason in draft.pending_runtime.items()]
    if any(name in draft.resolved for name in CLAIMED_GEOMETRY):
        lines.append("  What was stated of the geometry is compared with the probe by `onboard import-observations`.")
    if candidates is not None:
        lines.append(candidates)
    lines.append(
        "Next: record the deployment, the path of this config and gemm_quant_mode, moe_quant_mode, fmha_quant_mode, "
        "comm_quant_mode and kv_cache_dtype with `fpmsdk onboard checkpoint`, then run `fpmsdk onboard probe-runtime`."
    )
    if candidates is not None:
        lines.append(
            "A probe takes an explicit topology: one of the above, or another."
            if has_candidates
            else "A probe takes an explicit topology, and none of the fast domain is left: name another."
        )
    if draft.layout_markers:
        lines.append(
            "Recurrent state and other groups than attention cannot be imported yet; such imports stay incomplete."
        )
    elif not draft.declares_window:
        lines.append(
            "A kv_bytes_per_token that stays among the checkpoint's resource_overrides and agrees with the probe makes "
            "the imported profile linear."
        )
    lines.append("Nothing was saved")
    return "\n".join(lines)
