"""What a campaign asks of the engine's own choice of prefill points.

Source: collector.md section 1.4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fpmsdk.collect.grid import capture_axis
from fpmsdk.errors import OnboardError

DEFAULT_MAX_PREFILL_TOKENS = 8192
DEFAULT_MAX_CAPTURE_TOKENS = 2048


class PrefillSampling(NamedTuple):
    """Bounds of prefill and the axis of new tokens; captures and axis are None when the engine captures its own."""

    max_tokens: int
    max_batch_size: int | None
    captures: tuple[int, ...] | None
    axis: tuple[int, ...] | None

    @property
    def new_token_samples(self) -> int | None:
        """Samples that keep the whole axis."""
        return None if self.axis is None else max(2, len(self.axis))

    @property
    def kv_token_samples(self) -> int:
        """Samples that keep every generated count of cached tokens."""
        most = self.max_tokens * min(self.max_tokens, self.max_batch_size or self.max_tokens)
        return most.bit_length() + 2

    def document(self) -> dict[str, Any]:
        """`prefill_sampling` of a plan."""
        captures = None if self.captures is None else list(self.captures)
        axis = None if self.axis is None else list(self.axis)
        document = {
            "max_isl": self.max_tokens,
            "max_batch_size": self.max_batch_size,
            "max_total_prefill_tokens": self.max_tokens,
            "cudagraph_capture_sizes": captures,
            "cudagraph_capture_size_count": None if captures is None else len(captures),
            "max_cudagraph_capture_size": None if captures is None else captures[-1],
            "new_token_axis_points": axis,
            "new_token_axis_point_count": None if axis is None else len(axis),
            "prefill_max_new_token_samples": self.new_token_samples,
            "prefill_max_kv_read_token_samples": self.kv_token_samples,
        }
        # Older plans have no such key, and keep their digests.
        return document if captures is not None else {**document, "cudagraph_policy": "runtime"}


def prefill_sampling(
    max_tokens: int, *, max_batch_size: int | None = None, policy: str = "explicit", max_capture: int | None = None
) -> PrefillSampling:
    """The prefill sampling of a campaign.

    Parameters
    ----------
    max_tokens: most new tokens of one pass.
    max_batch_size: most requests of one pass; None leaves it to the engine.
    policy: `explicit` asks for captured graphs of these sizes, `runtime` leaves them to the engine.
    max_capture: largest captured size, in tokens; 2048 by default, none with policy `runtime`.

    Raises
    ------
    OnboardError: a number out of range, or a capture size with policy `runtime`.

    Example
    -------
    >>> sampling = prefill_sampling(1000, max_batch_size=16)
    >>> len(sampling.captures), len(sampling.axis), sampling.kv_token_samples
    (67, 132, 16)
    """
    if max_tokens < 2:
        raise OnboardError(f"max_prefill_isl: expected at least 2, found {max_tokens}", "max_prefill_isl")
    if policy == "runtime":
        if max_capture is not None:
            raise OnboardError(
                "max_prefill_cudagraph_size: policy runtime leaves captured sizes to the engine; omit it, or use "
                "policy explicit",
                "max_prefill_cudagraph_size",
            )
        return PrefillSampling(max_tokens, max_batch_size, None, None)
    captures = capture_sizes(min(max_tokens, DEFAULT_MAX_CAPTURE_TOKENS if max_capture is None else max_capture))
    return PrefillSampling(max_tokens, max_batch_size, captures, tuple(capture_axis(captures, max_tokens)))


def capture_sizes(most: int) -> tuple[int, ...]:
    """Token counts of captured graphs up to `most`: dense where passes are short, every 32 tokens beyond 512.

    >>> capture_sizes(16)
    (1, 2, 4, 8, 16)
    """
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), *range(544, most + 1, 32)}
    # The engine wants the largest allowed size among those that are captured.
    return tuple(sorted({size for size in sizes if size <= most} | {most}))
