"""Goes on where a timing model lacks a measurement, so that one replay meets all that is missing.

What stands in is made-up: nothing may be concluded from the times of such a replay.
Source: predict-recommend.md section 5.4.
"""

from fpmsdk._ext.pricing cimport PRICED, RAISED, PassPrice, PassShape, TimingModel


cdef class StandInTiming(TimingModel):
    """Prices as another timing model; a pass for which that one raises is given to a stand-in.

    Parameters
    ----------
    inner : TimingModel
    stand_in : callable
        `stand_in(error, num_prefill, prefill_tokens, prefill_kv_tokens, num_decode, decode_tokens)` returns the ms of
        both parts of the pass, or raises what ends the replay. Token counts are totals of the pass, decode tokens the
        known ones.

    A Python provider is told means and not totals, from which the missing points could not be named.
    """

    cdef TimingModel inner
    cdef object stand_in

    def __cinit__(self, TimingModel inner not None, stand_in not None):
        self.inner = inner
        self.stand_in = stand_in
        self.composes = inner.composes

    def __repr__(self):
        return f"StandInTiming({self.inner!r})"

    cdef void price(self, const PassShape* shape, PassPrice* price) noexcept nogil:
        self.inner.price(shape, price)
        if price.status == RAISED:
            with gil:
                self._stand_in(shape, price)

    cdef void _stand_in(self, const PassShape* shape, PassPrice* price) noexcept:
        error, self.inner.raised = self.inner.raised, None
        try:
            price.prefill_ms, price.decode_ms = self.stand_in(
                error,
                shape.num_prefill,
                shape.sum_prefill_end_tokens - shape.sum_prefill_past_tokens,
                shape.sum_prefill_past_tokens,
                shape.num_decode,
                shape.sum_decode_tokens,
            )
        except BaseException as exception:
            self.raised = exception
            return
        price.composed = self.composes and shape.num_prefill > 0 and shape.num_decode > 0
        price.status = PRICED
