# What this machine's math library answers: saved state depends on its last bits. Source: architecture, decision 8.

from libc.math cimport exp, log, log1p
from libc.string cimport memcpy

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize


def probe(int start):
    """The bytes of 64 results of exp, log and log1p at fixed arguments from `start` on.

    A parameter, so that no compiler computes them ahead with a library of its own.
    """
    cdef double[64] results
    cdef double x
    cdef int i
    for i in range(64):
        x = <double>((start + i) * 2654435761 % 1000003) / 4096.0 + 1e-3
        if i % 3 == 0:
            results[i] = exp(x / 64.0 - 1.0)
        elif i % 3 == 1:
            results[i] = log(x)
        else:
            results[i] = log1p(x)
    return PyBytes_FromStringAndSize(<char*>results, sizeof(results))
