"""A warning about captures that only one of two phases gets. Source: onboarding.md section 5 (collection gate)."""

from __future__ import annotations


def graph_advisory(worker_type: str | None, policy: str, *, enforce_eager: bool = False) -> str | None:
    """The warning for a launch without a role whose explicit captures reach prefill alone; None where none is due.

    A launch with a role says which phases its settings are for, and the runtime's own captures are those of both.

    Parameters
    ----------
    worker_type: the serving role, None for both phases of older requests.
    policy: `prefill_cudagraph_policy`.
    enforce_eager: whether the engine captures nothing at all.

    >>> graph_advisory(None, "runtime"), graph_advisory("prefill", "explicit")
    (None, None)
    """
    if worker_type is not None or policy != "explicit" or enforce_eager:
        return None
    return (
        "warning: prefill_cudagraph_policy explicit sets the captured graphs of prefill only, decode keeps those of "
        "the runtime. Whether one memory profile holds for both is unresolved until both were observed; use the policy "
        "runtime, state a worker_type, or run eager where serving does"
    )
