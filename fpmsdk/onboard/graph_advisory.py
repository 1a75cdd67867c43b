"""A warning about captures that only one of two phases gets. Source: onboarding.md section 5 (collection gate)."""

from __future__ import annotations

from fpmsdk.onboard.request import SupportRequest


def graph_advisory(request: SupportRequest, *, enforce_eager: bool = False) -> str | None:
    """The warning for a request without a role whose explicit captures reach prefill alone; None where none is due.

    A request with a role says which phases its settings are for, and the runtime's own captures are those of both.

    Parameters
    ----------
    enforce_eager: whether the engine captures nothing at all.
    """
    if request.worker_type is not None or request.collection.prefill_cudagraph_policy != "explicit" or enforce_eager:
        return None
    return (
        "warning: prefill_cudagraph_policy explicit sets the captured graphs of prefill only, decode keeps those of "
        "the runtime. Whether one memory profile holds for both is unresolved until both were observed; use the policy "
        "runtime, state a worker_type, or run eager where serving does"
    )
