"""Prices the passes of a replay with the durations that a recording of the same run gives, in order.

Not the recording: `fpmsdk.replay.recording` reads it.
"""

from libc.stdint cimport int64_t, uint8_t

from fpmsdk._ext.pricing cimport RAISED, PassPrice, PassShape, TimingModel

import numpy as np

from fpmsdk.errors import ReplayError


cdef class RecordedTiming(TimingModel):
    """The next recorded duration of a rank for each of its passes with work; good for one replay.

    Parameters
    ----------
    offsets : int64[ranks + 1]
        Rank r has the passes `offsets[r]:offsets[r + 1]`.
    prefill_ms, decode_ms : float64[n]
    composed : uint8[n]
        Whether the two parts were priced as one forward.
    work : int64[n, 5], optional
        What each pass was priced for, the fields of `PassShape` up to `sum_decode_tokens`. A pass with other work is
        an error; without it durations are handed out unseen.

    Raises ReplayError when the passes differ from the recorded ones, or are more.
    """

    def __cinit__(self, offsets, prefill_ms, decode_ms, composed, work=None):
        offsets = np.array(offsets, np.int64)
        self.offsets = offsets
        self.prefill_ms = np.array(prefill_ms, np.float64)
        self.decode_ms = np.array(decode_ms, np.float64)
        self.composed = np.array(composed, np.uint8)
        self.next_pass = offsets[:-1].copy()
        self.checks = work is not None
        count = len(self.prefill_ms)
        self.work = np.array(work if self.checks else np.zeros((count, WORK_FIELDS)), np.int64)
        if (
            offsets[-1] != count
            or not len(self.decode_ms) == len(self.composed) == self.work.shape[0] == count
            or self.work.shape[1] != WORK_FIELDS
        ):
            raise ValueError(f"expected columns of {offsets[-1]} passes")
        self.composes = bool(np.any(composed))

    def __repr__(self):
        return f"RecordedTiming({len(self.prefill_ms)} passes)"

    cdef void price(self, const PassShape* shape, PassPrice* price) noexcept nogil:
        cdef int64_t index
        price.prefill_ms = price.decode_ms = 0.0
        # A pass without work takes no time and is no pass to an engine.
        if shape.num_prefill == 0 and shape.num_decode == 0:
            return
        if shape.rank >= self.next_pass.shape[0]:
            self._fail(shape, price, -1)
            return
        index = self.next_pass[shape.rank]
        if index == self.offsets[shape.rank + 1] or self.checks and not self._matches(shape, index):
            self._fail(shape, price, index)
            return
        self.next_pass[shape.rank] += 1
        price.prefill_ms = self.prefill_ms[index]
        price.decode_ms = self.decode_ms[index]
        price.composed = self.composed[index]

    cdef bint _matches(self, const PassShape* shape, int64_t index) noexcept nogil:
        return (
            shape.num_prefill == self.work[index, 0]
            and shape.sum_prefill_end_tokens == self.work[index, 1]
            and shape.sum_prefill_past_tokens == self.work[index, 2]
            and shape.num_decode == self.work[index, 3]
            and shape.sum_decode_tokens == self.work[index, 4]
        )

    cdef void _fail(self, const PassShape* shape, PassPrice* price, int64_t index) noexcept nogil:
        price.status = RAISED
        with gil:
            self.raised = self._error(shape[0], index)

    def _error(self, PassShape shape, int64_t index):
        found = work_text(
            shape.num_prefill,
            shape.sum_prefill_end_tokens,
            shape.sum_prefill_past_tokens,
            shape.num_decode,
            shape.sum_decode_tokens,
        )
        if index < 0:
            differs = f"rank {shape.rank} starts {found}, the recording has {len(self.next_pass)} ranks"
        elif index == self.offsets[shape.rank + 1]:
            differs = (
                f"rank {shape.rank} starts {found} after {index - self.offsets[shape.rank]} passes, "
                "all that the recording has"
            )
        else:
            differs = (
                f"pass {index - self.offsets[shape.rank]} of rank {shape.rank} is {found}, recorded was "
                + work_text(*[self.work[index, field] for field in range(WORK_FIELDS)])
            )
        return ReplayError(
            f"the replay differs from the recording that prices it: {differs}; replay the trace, launch and options "
            "that were recorded"
        )

    def unused_passes(self):
        """Return how many recorded passes of each rank no pass has taken, a list."""
        return [int(end - taken) for taken, end in zip(self.next_pass, self.offsets[1:])]


def work_text(num_prefill, end_tokens, past_tokens, num_decode, decode_tokens):
    """Return the work of a pass in words.

    >>> work_text(1, 8, 0, 0, 0)
    'a pass of 1 prefill requests (8 new tokens after 0) and 0 decode requests (0 tokens)'
    """
    return (
        f"a pass of {num_prefill} prefill requests ({end_tokens - past_tokens} new tokens after {past_tokens}) and "
        f"{num_decode} decode requests ({decode_tokens} tokens)"
    )
