"""How long a pass takes: the TimingModel protocol, its implementations, and scaling and rounding of the answer.

Not a model: what a tuned model knows is behind `ServingView`. Source: engine-and-replay.md 4.1 to 4.3.
"""

from libc.math cimport floor, fma, isfinite, rint
from libc.stdint cimport UINT32_MAX, int64_t, uint32_t
from libc.string cimport memset

from fpmsdk._ext.features cimport FAULT_NONE, FaultSite

from fpmsdk.errors import TimingError

cdef enum:
    MEMO_ENTRIES = 1024

cdef double TOO_LONG_MS = 2.0**64 * 1e3  # durations are counted in 64-bit seconds and their nanoseconds


cdef inline double whole_nanoseconds(double seconds) noexcept nogil:
    """Round seconds to whole nanoseconds: times 1e9 exactly, to nearest, ties to even."""
    cdef double product = seconds * 1e9
    cdef double rest = fma(seconds, 1e9, -product)  # what the rounding of `product` lost
    cdef double nanoseconds = rint(product)
    cdef double whole_seconds
    if product - nanoseconds == 0.5 and rest > 0.0:
        nanoseconds += 1.0
    elif product - nanoseconds == -0.5 and rest < 0.0:
        nanoseconds -= 1.0
    # Whole seconds and the fraction are added as f64: the last bit of durations above a second depends on it.
    whole_seconds = floor(nanoseconds / 1e9)
    return whole_seconds + (nanoseconds - whole_seconds * 1e9) / 1e9


cdef double modeled_duration_ms(double raw_ms, double speedup) noexcept nogil:
    """The duration of a part: rounded, scaled, rounded again. A speedup of 0 means unscaled."""
    cdef double seconds = whole_nanoseconds(raw_ms / 1000.0)
    if speedup != 0.0:
        seconds = whole_nanoseconds(seconds / speedup)
    return seconds * 1e3


def modeled_duration(double raw_ms, double speedup):
    """Return the simulated duration in ms of a predicted latency: whole nanoseconds, divided by `speedup`.

    Raises TimingError when either value is negative or not finite, or the duration is 2^64 s or more.

    >>> modeled_duration(12.0, 3.0), modeled_duration(12.0, 0.0)
    (4.0, 12.0)
    """
    for name, value in (("raw_ms", raw_ms), ("speedup", speedup)):
        if not isfinite(value) or value < 0.0:
            raise TimingError(f"{name} is {value}; a finite number, 0 or more, is needed")
    duration_ms = modeled_duration_ms(raw_ms, speedup)
    if not duration_ms < TOO_LONG_MS:
        raise too_long(raw_ms, speedup)
    return duration_ms


cdef too_long(double raw_ms, double speedup):
    divided = "" if speedup == 0.0 else f", divided by a speedup of {speedup},"
    return TimingError(f"a latency of {raw_ms} ms{divided} is too long; a pass takes less than 2^64 s")


cdef inline PassShape prefill_part(const PassShape* shape) noexcept nogil:
    cdef PassShape part = shape[0]
    part.num_decode = part.sum_decode_tokens = 0
    return part


cdef inline PassShape decode_part(const PassShape* shape) noexcept nogil:
    cdef PassShape part = shape[0]
    part.num_prefill = part.sum_prefill_end_tokens = part.sum_prefill_past_tokens = 0
    return part


cdef class TimingModel:
    """Prices passes from compiled code.

    `price` fills in the raw parts of one pass: a part without requests costs 0.0, and both parts of a mixed pass are
    priced as one forward (`composed`) where the model can, else each for itself.
    """

    cdef void price(self, const PassShape* shape, PassPrice* price) noexcept nogil:
        price.status = NOT_READY


cdef class FixedTiming(TimingModel):
    """A constant for every prefill batch and one for every decode step, in ms.

    >>> FixedTiming(10.0, 1.0)
    FixedTiming(prefill_ms=10.0, decode_ms=1.0)
    """

    def __init__(self, double prefill_ms, double decode_ms):
        for name, value in (("prefill_ms", prefill_ms), ("decode_ms", decode_ms)):
            if not isfinite(value) or value < 0.0:
                raise TimingError(f"fixed timing: {name} is {value}; a finite number, 0 or more, is needed")
        self.prefill_ms = prefill_ms
        self.decode_ms = decode_ms

    def __repr__(self):
        return f"FixedTiming(prefill_ms={self.prefill_ms}, decode_ms={self.decode_ms})"

    cdef void price(self, const PassShape* shape, PassPrice* price) noexcept nogil:
        price.prefill_ms = self.prefill_ms if shape.num_prefill > 0 else 0.0
        price.decode_ms = self.decode_ms if shape.num_decode > 0 else 0.0


cdef class PolynomialTiming(TimingModel):
    """The built-in polynomials over new prefill tokens and over the share of the KV capacity in use."""

    def __repr__(self):
        return "PolynomialTiming()"

    cdef void price(self, const PassShape* shape, PassPrice* price) noexcept nogil:
        cdef double x, u
        price.prefill_ms = price.decode_ms = 0.0
        if shape.num_prefill > 0:
            x = <double>(
                shape.num_prefill
                * (
                    shape.sum_prefill_end_tokens // shape.num_prefill
                    - shape.sum_prefill_past_tokens // shape.num_prefill
                )
            )
            price.prefill_ms = 4.209989e-07 * (x * x) + 1.518344e-02 * x + 16.50142
        if shape.num_decode > 0:
            u = min(1.0, <double>shape.sum_decode_tokens / <double>shape.kv_capacity_tokens)
            price.decode_ms = max(1.0, -25.74 * (u * u) + 54.01 * u + 5.74)


cdef class FpmTiming(TimingModel):
    """Prices from a frozen view of a tuned forward-pass model.

    A mixed pass is one iteration of the model, told as (total, 0); when the model is not ready for mixed iterations
    each part is a pure iteration of its own.
    """

    def __cinit__(self, ServingView view not None):
        self.view = view
        self.composes = True

    def __repr__(self):
        return "FpmTiming()"

    cdef bint ask(self, const FpmRank* rank, double* latency_ms, PassPrice* price) noexcept nogil:
        # One iteration, NaN when the model is not ready for it. False when it is at fault: no part stands in for it.
        cdef FaultSite site
        site.fault = self.view.evaluate(rank, 1, latency_ms)
        if site.fault == FAULT_NONE:
            return True
        site.iteration = -1
        site.rank = -1
        with gil:
            self.raised = self.view.error(&site, rank, 1)
        price.status = RAISED
        return False

    cdef void price(self, const PassShape* shape, PassPrice* price) noexcept nogil:
        cdef FpmRank rank
        cdef int64_t mean_end_tokens, mean_past_tokens
        # The telemetry a model learns from counts computed tokens: one less than the known ones of each request.
        cdef int64_t kv_tokens = (
            shape.sum_decode_tokens if self.view.counts_known_tokens
            else min(shape.sum_decode_tokens - shape.num_decode, shape.kv_capacity_tokens)
        )
        memset(&rank, 0, sizeof(FpmRank))
        rank.num_lengths = -1
        price.prefill_ms = price.decode_ms = 0.0
        if max(shape.sum_prefill_end_tokens, kv_tokens) > UINT32_MAX:
            price.status = OUT_OF_RANGE
            return
        rank.num_prefill_requests = <uint32_t>shape.num_prefill
        rank.sum_prefill_tokens = <uint32_t>(shape.sum_prefill_end_tokens - shape.sum_prefill_past_tokens)
        rank.sum_prefill_kv_tokens = <uint32_t>shape.sum_prefill_past_tokens
        rank.num_decode_requests = <uint32_t>shape.num_decode
        rank.sum_decode_kv_tokens = <uint32_t>kv_tokens
        if shape.num_prefill > 0 and shape.num_decode > 0:
            if not self.ask(&rank, &price.prefill_ms, price):
                return
            if price.prefill_ms == price.prefill_ms:
                price.composed = True
                return
            price.prefill_ms = 0.0
        if shape.num_prefill > 0:
            if self.view.counts_known_tokens:  # operators are priced by the mean prompt, tables by the whole batch
                mean_end_tokens = shape.sum_prefill_end_tokens // shape.num_prefill
                mean_past_tokens = shape.sum_prefill_past_tokens // shape.num_prefill
                rank.sum_prefill_tokens = <uint32_t>(shape.num_prefill * (mean_end_tokens - mean_past_tokens))
                rank.sum_prefill_kv_tokens = <uint32_t>(shape.num_prefill * mean_past_tokens)
            rank.num_decode_requests = rank.sum_decode_kv_tokens = 0
            if not self.ask(&rank, &price.prefill_ms, price):
                return
        if shape.num_decode > 0:
            rank.num_prefill_requests = rank.sum_prefill_tokens = rank.sum_prefill_kv_tokens = 0
            rank.num_decode_requests = <uint32_t>shape.num_decode
            rank.sum_decode_kv_tokens = <uint32_t>kv_tokens
            if not self.ask(&rank, &price.decode_ms, price):
                return
        if price.prefill_ms != price.prefill_ms or price.decode_ms != price.decode_ms:
            price.status = NOT_READY


cdef class PythonTiming(TimingModel):
    """Adapter over a Python object with `predict_prefill_ms` and `predict_decode_ms`.

    Parameters
    ----------
    provider : object
        `predict_prefill_ms(batch, mean_isl, mean_prefix)` and `predict_decode_ms(batch, active_kv_tokens,
        mean_context, total_kv_tokens)` return ms. Optional: `predict_mixed_pass_ms(prefill=(batch, mean_isl,
        mean_prefix), decode=(batch, active_kv_tokens, mean_context, total_kv_tokens))` returns the two parts of one
        forward, or None to have them priced apart.

    Answers are remembered by exact coordinates, the latest 1,024. Source: engine-and-replay.md 4.1, 4.3.
    """

    def __init__(self, provider):
        for name in ("predict_prefill_ms", "predict_decode_ms"):
            if not callable(getattr(provider, name, None)):
                raise TimingError(
                    f"timing: {type(provider).__name__} has no method {name}; give a timing model, a model object, "
                    "a mapping {type: fixed | polynomial}, or an object with predict_prefill_ms and predict_decode_ms"
                )
        self.provider_name = type(provider).__name__
        self.predict_prefill_ms = provider.predict_prefill_ms
        self.predict_decode_ms = provider.predict_decode_ms
        self.predict_mixed_pass_ms = getattr(provider, "predict_mixed_pass_ms", None)
        self.composes = self.predict_mixed_pass_ms is not None
        self.memo = {}

    def __repr__(self):
        return f"PythonTiming({self.provider_name})"

    cdef void price(self, const PassShape* shape, PassPrice* price) noexcept nogil:
        with gil:
            try:
                self._price(shape, price)
            except BaseException as exception:
                self.raised = exception
                price.status = RAISED

    cdef _price(self, const PassShape* shape, PassPrice* price):
        cdef tuple prefill = (), decode = ()
        price.prefill_ms = price.decode_ms = 0.0
        if shape.num_prefill > 0:
            prefill = (
                shape.num_prefill,
                shape.sum_prefill_end_tokens // shape.num_prefill,
                shape.sum_prefill_past_tokens // shape.num_prefill,
            )
        if shape.num_decode > 0:
            decode = (
                shape.num_decode,
                shape.sum_decode_tokens,
                shape.sum_decode_tokens // shape.num_decode,
                shape.kv_capacity_tokens,
            )
        if prefill and decode and self.composes:
            parts = self._ask(self.predict_mixed_pass_ms, (prefill, decode), {"prefill": prefill, "decode": decode})
            if parts is not None:
                price.prefill_ms, price.decode_ms = parts
                price.composed = True
                return
        if prefill:
            price.prefill_ms = self._ask(self.predict_prefill_ms, prefill, None)
        if decode:
            price.decode_ms = self._ask(self.predict_decode_ms, decode, None)

    cdef _ask(self, method, tuple coordinates, dict keywords):
        if coordinates in self.memo:
            return self.memo[coordinates]
        given = method(**keywords) if keywords else method(*coordinates)
        # Outside of the call: what the provider itself raises comes out as it is.
        try:
            if not keywords:
                answer = <double>given  # not float(): a text is no number
            elif given is None:
                answer = None
            else:
                prefill_ms, decode_ms = given
                answer = <double>prefill_ms, <double>decode_ms
        except (TypeError, ValueError, OverflowError) as fault:
            wanted = "two latencies in ms, or None" if keywords else "a latency in ms"
            name, found = getattr(method, "__name__", "the method"), type(given).__name__
            raise TimingError(f"{self!r}: {name} returned {found}, not {wanted}: {fault}") from None
        # A wrong answer ends the run with an error that must be the same when the pass is tried again.
        if answer is None or all(isfinite(part) and part >= 0.0 for part in (answer if keywords else (answer,))):
            if len(self.memo) >= MEMO_ENTRIES:
                del self.memo[next(iter(self.memo))]
            self.memo[coordinates] = answer
        return answer


cdef class PassPricer:
    """The pricing procedure of one replay: composes or separates, scales and rounds.

    Parameters
    ----------
    timing : TimingModel
    compose : bool
        Price a mixed pass as one forward where the model can; otherwise always each part for itself.
    speedup_ratio, decode_speedup_ratio : float
        Prefill is divided by the first, decode by their product; 0 means unscaled.

    Raises TimingError when the product is beyond float64, on either side.
    """

    def __cinit__(self, TimingModel timing not None, bint compose, double speedup_ratio, double decode_speedup_ratio):
        product = speedup_ratio * decode_speedup_ratio
        if not isfinite(product) or (product == 0.0 and speedup_ratio != 0.0 and decode_speedup_ratio != 0.0):
            raise TimingError(
                f"speedup_ratio {speedup_ratio} times decode_speedup_ratio {decode_speedup_ratio} is no float64; "
                "give moderate ratios"
            )
        self.timing = timing
        self.compose = compose
        self.prefill_speedup = speedup_ratio
        self.decode_speedup = product

    cdef int price(self, const PassShape* shape, PassPrice* price) except -1 nogil:
        """Fill in the simulated ms of both parts; the pass ends at (start + prefill_ms) + decode_ms."""
        cdef PassShape part
        cdef PassPrice other
        cdef bint mixed = shape.num_prefill > 0 and shape.num_decode > 0
        if mixed and not self.compose:
            part = prefill_part(shape)
            self._part(&part, price)
            part = decode_part(shape)
            self._part(&part, &other)
            price.decode_ms = other.decode_ms
        else:
            self._part(shape, price)
        if mixed and self.compose and self.timing.composes:
            self.num_composed += price.composed
            self.num_fallback += not price.composed
        price.prefill_ms = self._duration(max(price.prefill_ms, 0.0), self.prefill_speedup)
        price.decode_ms = self._duration(price.decode_ms, self.decode_speedup)
        return 0

    cdef double _duration(self, double raw_ms, double speedup) except -1.0 nogil:
        cdef double duration_ms = modeled_duration_ms(raw_ms, speedup)
        if duration_ms < TOO_LONG_MS:  # neither inf nor NaN is
            return duration_ms
        with gil:
            raise too_long(raw_ms, speedup)

    cdef int _part(self, const PassShape* shape, PassPrice* price) except -1 nogil:
        price.composed = False
        price.status = PRICED
        self.timing.price(shape, price)
        if (
            price.status == PRICED
            and isfinite(price.prefill_ms)
            and isfinite(price.decode_ms)
            and price.decode_ms >= 0.0
        ):
            return 0
        with gil:
            raise self._error(shape[0], price[0])

    def _error(self, PassShape shape, PassPrice price):
        if price.status == RAISED:
            raised, self.timing.raised = self.timing.raised, None
            return raised
        work = (
            f"a pass of {shape.num_prefill} prefill requests ("
            f"{shape.sum_prefill_end_tokens - shape.sum_prefill_past_tokens} new tokens after "
            f"{shape.sum_prefill_past_tokens}) and {shape.num_decode} decode requests ({shape.sum_decode_tokens} tokens)"
        )
        if price.status == NOT_READY:
            return TimingError(f"{self.timing!r} is not ready to price {work}: tune it with such iterations first")
        if price.status == OUT_OF_RANGE:
            return TimingError(f"{self.timing!r} cannot price {work}: token sums above {UINT32_MAX} are not supported")
        part, found = ("decode", price.decode_ms) if isfinite(price.prefill_ms) else ("prefill", price.prefill_ms)
        return TimingError(
            f"{self.timing!r} returned a {part} latency of {found} ms for {work}; it must be finite"
            + (" and not negative" if part == "decode" else "")
        )


def price_pass(
    PassPricer pricer not None,
    *,
    int64_t num_prefill=0,
    int64_t sum_prefill_end_tokens=0,
    int64_t sum_prefill_past_tokens=0,
    int64_t num_decode=0,
    int64_t sum_decode_tokens=0,
    int64_t kv_capacity_tokens=0,
):
    """Price one pass from Python and return (prefill_ms, decode_ms, composed).

    The fields are those of `PassShape`: prompt tokens of the prefill requests after and before the pass, known tokens
    of the decode requests, and the KV capacity.

    >>> pricer = PassPricer(FixedTiming(10.0, 1.0), True, 2.0, 5.0)
    >>> price_pass(pricer, num_prefill=1, sum_prefill_end_tokens=8, num_decode=1, sum_decode_tokens=9)
    (5.0, 0.1, False)
    """
    cdef PassShape shape
    cdef PassPrice price
    shape.num_prefill = num_prefill
    shape.sum_prefill_end_tokens = sum_prefill_end_tokens
    shape.sum_prefill_past_tokens = sum_prefill_past_tokens
    shape.num_decode = num_decode
    shape.sum_decode_tokens = sum_decode_tokens
    shape.kv_capacity_tokens = kv_capacity_tokens
    shape.rank = 0
    pricer.price(&shape, &price)
    return price.prefill_ms, price.decode_ms, bool(price.composed)
