"""Six coefficients that price any pass, prefill, decode or both, as one forward.

Not the fit: `fpmsdk.replay.fitted` finds the coefficients.
"""

from libc.stdint cimport int64_t

from fpmsdk._ext.features cimport prefill_attention_pairs
from fpmsdk._ext.pricing cimport PassPrice, PassShape, TimingModel

import numpy as np

# What each coefficient is multiplied with.
FEATURES = (
    "one", "prefill_tokens", "prefill_attention_pairs", "decode_requests", "decode_kv_tokens", "has_prefill"
)


cdef void fill_features(
    double* features, double requests, double tokens, double kv_tokens, double decode_requests, double decode_kv_tokens
) noexcept nogil:
    features[0] = 1.0
    features[1] = tokens
    features[2] = prefill_attention_pairs(requests, tokens, kv_tokens)
    features[3] = decode_requests
    features[4] = decode_kv_tokens
    features[5] = tokens > 0.0


cdef class LinearPassTiming(TimingModel):
    """The latency of a pass as a linear function of its work; what comes out below zero is zero.

    Parameters
    ----------
    coefficients_ms : sequence of six float
        ms per unit of each of `FEATURES`.

    >>> LinearPassTiming([4.0, 0.1, 0.0, 0.5, 0.001, 2.0])
    LinearPassTiming([4.0, 0.1, 0.0, 0.5, 0.001, 2.0])
    """

    def __init__(self, coefficients_ms):
        cdef Py_ssize_t i
        given = [float(value) for value in coefficients_ms]
        if len(given) != NUM_FEATURES or not np.isfinite(given).all():
            raise ValueError(f"expected {NUM_FEATURES} finite coefficients, found {given}")
        for i in range(NUM_FEATURES):
            self.coefficients[i] = given[i]
        self.composes = True

    @property
    def coefficients_ms(self):
        """ms per unit of each of `FEATURES`."""
        return [self.coefficients[i] for i in range(NUM_FEATURES)]

    def __repr__(self):
        return f"LinearPassTiming({self.coefficients_ms})"

    cdef void price(self, const PassShape* shape, PassPrice* price) noexcept nogil:
        cdef double features[NUM_FEATURES]
        cdef double latency_ms = 0.0
        cdef int i
        price.prefill_ms = price.decode_ms = 0.0
        if shape.num_prefill == 0 and shape.num_decode == 0:
            return
        # The telemetry that the fit has seen counts computed tokens: one less than the known ones of each request.
        fill_features(
            features,
            shape.num_prefill,
            shape.sum_prefill_end_tokens - shape.sum_prefill_past_tokens,
            shape.sum_prefill_past_tokens,
            shape.num_decode,
            shape.sum_decode_tokens - shape.num_decode,
        )
        for i in range(NUM_FEATURES):
            latency_ms += self.coefficients[i] * features[i]
        if shape.num_prefill > 0:
            price.prefill_ms = max(latency_ms, 0.0)
            price.composed = shape.num_decode > 0
        else:
            price.decode_ms = max(latency_ms, 0.0)


def feature_matrix(
    const double[::1] prefill_requests not None,
    const double[::1] prefill_tokens not None,
    const double[::1] prefill_kv_tokens not None,
    const double[::1] decode_requests not None,
    const double[::1] decode_kv_tokens not None,
):
    """Return float64[n, 6], the features of n iterations of one rank.

    >>> one, none = np.ones(1), np.zeros(1)
    >>> feature_matrix(one, 4 * one, none, none, none).tolist()
    [[1.0, 4.0, 10.0, 0.0, 0.0, 1.0]]
    """
    cdef Py_ssize_t row, count = prefill_requests.shape[0]
    cdef double[:, ::1] matrix = np.empty((count, NUM_FEATURES))
    for row in range(count):
        fill_features(
            &matrix[row, 0],
            prefill_requests[row],
            prefill_tokens[row],
            prefill_kv_tokens[row],
            decode_requests[row],
            decode_kv_tokens[row],
        )
    return np.asarray(matrix)
