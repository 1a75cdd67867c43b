"""The observers that come with this package: which engine versions they were written for, and their manifests.

Only paths are handed out; `vllm_observers` is staged beside an engine and never imported where `fpmsdk` runs.
Source: collector.md section 8.3.
"""

from __future__ import annotations

from pathlib import Path


def bundled_versions() -> dict[str, Path]:
    """The manifest of every engine version that observers come with.

    >>> list(bundled_versions())
    ['0.27.0', '0.28.0', '0.31.0']
    """
    return {path.stem.removeprefix("vllm-"): path for path in sorted(Path(__file__).parent.glob("vllm-*.json"))}
