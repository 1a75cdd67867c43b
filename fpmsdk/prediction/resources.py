"""What the process of a simulation takes of the machine.

Source: predict-recommend.md section 11.
"""

from __future__ import annotations

import sys


def peak_rss_bytes() -> int | None:
    """Largest resident memory that this process had; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
