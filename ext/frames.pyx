# Reads iterations from the forms that callers hold: dicts, objects with the same attributes (Dynamo's message),
# encoded frames, and columnar arrays. Types and ranges of every field of the schema are checked here
# (fpm-model.md section 5.1); rules between fields are `features.check_rank`, applied in iteration order by
# whoever consumes the source.

from cpython.dict cimport PyDict_Check
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.math cimport isfinite
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

cimport numpy as cnp

from fpmsdk._ext.features cimport FAULT_NONE, FaultSite, check_ranks, fault_error, workload_kind

from collections.abc import Mapping

import numpy as np

from fpmsdk.errors import MetricsError, TuningError

cnp.import_array()

cdef extern from *:
    """
    #if PY_VERSION_HEX < 0x030D0000
    #define PyObject_GetOptionalAttr _PyObject_LookupAttr
    #endif
    /* The usual case of a count or a number without a reference taken or an object touched: 1 with the value,
       2 when the field is absent, 0 for everything else, which the general reader looks at again. */
    static int fpm_take_unsigned(PyObject *value, unsigned long long limit, unsigned long long *out) {
        unsigned long long number;
        if (!PyLong_CheckExact(value)) return 0;
        number = PyLong_AsUnsignedLongLong(value);
        if (number == (unsigned long long)-1 && PyErr_Occurred()) { PyErr_Clear(); return 0; }
        if (number > limit) return 0;
        *out = number;
        return 1;
    }
    static int fpm_take_real(PyObject *value, double *out) {
        if (!PyFloat_CheckExact(value)) return 0;
        *out = PyFloat_AS_DOUBLE(value);
        return 1;
    }
    #define FPM_FIELD(taken, absent)                                              \
        PyObject *value;                                                          \
        int result;                                                               \
        if (PyDict_CheckExact(source)) {                                          \
            value = PyDict_GetItemWithError(source, name);                        \
            if (value != NULL) return taken;                                      \
            if (PyErr_Occurred()) { PyErr_Clear(); return 0; }                    \
            return absent;                                                        \
        }                                                                         \
        if (PyObject_GetOptionalAttr(source, name, &value) < 0) { PyErr_Clear(); return 0; } \
        if (value == NULL) return absent;                                         \
        result = taken;                                                           \
        Py_DECREF(value);                                                         \
        return result;
    static int fpm_unsigned_field(PyObject *source, PyObject *name, unsigned long long limit,
                                  unsigned long long *out) {
        FPM_FIELD(fpm_take_unsigned(value, limit, out), 2)
    }
    static int fpm_real_field(PyObject *source, PyObject *name, double *out) {
        FPM_FIELD(fpm_take_real(value, out), 2)
    }
    /* A field that may be absent: 1 and a new reference, 0, or -1 with an exception. */
    static int fpm_get_field(PyObject *source, PyObject *name, PyObject **value) {
        if (PyDict_Check(source)) {
            *value = PyDict_GetItemWithError(source, name);
            Py_XINCREF(*value);
            return *value != NULL ? 1 : (PyErr_Occurred() ? -1 : 0);
        }
        return PyObject_GetOptionalAttr(source, name, value);
    }
    """
    int fpm_get_field(object source, object name, PyObject** value) except -1
    int fpm_unsigned_field(object source, object name, uint64_t limit, unsigned long long* out)
    int fpm_real_field(object source, object name, double* out)
    int fpm_take_unsigned(PyObject* value, unsigned long long limit, unsigned long long* out)

cdef extern from "Python.h":
    unsigned long long PyLong_AsUnsignedLongLong(object value) except? 0xFFFFFFFFFFFFFFFFULL

cdef uint64_t U32_MAX = 0xFFFFFFFFULL
cdef uint64_t U64_MAX = 0xFFFFFFFFFFFFFFFFULL
cdef object ABSENT = object()

# FpmRank as numpy sees it: the columns of a batch with their names and element types.
RANK_DTYPE = np.dtype(
    [
        ("wall_time_s", "f8"),
        ("version", "u4"),
        ("num_prefill_requests", "u4"),
        ("sum_prefill_tokens", "u4"),
        ("sum_prefill_kv_tokens", "u4"),
        ("num_decode_requests", "u4"),
        ("sum_decode_kv_tokens", "u4"),
        ("num_lengths", "i8"),
        ("extend_lengths_pointer", "u8"),
        ("past_kv_lengths_pointer", "u8"),
        ("dp_rank", "u4"),
        ("counter_id", "u8"),
        ("var_prefill_length", "f8"),
        ("var_decode_kv_tokens", "f8"),
        ("queued_num_prefill_requests", "u4"),
        ("queued_sum_prefill_tokens", "u4"),
        ("queued_num_decode_requests", "u4"),
        ("queued_sum_decode_kv_tokens", "u4"),
        ("queued_var_prefill_length", "f8"),
        ("queued_var_decode_kv_tokens", "f8"),
    ],
    align=True,
)
assert RANK_DTYPE.itemsize == sizeof(FpmRank), "RANK_DTYPE does not describe FpmRank"
COLUMNS = tuple(name for name in RANK_DTYPE.names if name != "version" and not name.endswith("_pointer"))


cdef inline object field_of(object source, str name):
    cdef PyObject* found = NULL
    if fpm_get_field(source, name, &found) == 0:
        return ABSENT
    value = <object>found
    Py_DECREF(value)  # the cast took a reference of its own
    return value


cdef object wrong_type(str section, str name, str accepted, object found):
    return MetricsError(
        f"invalid FPM payload: {section}{name}: expected {accepted}, found {found!r} ({type(found).__name__})"
    )


cdef uint64_t to_unsigned(object value, str section, str name, uint64_t limit) except? 0xFFFFFFFFFFFFFFFFULL:
    cdef uint64_t number
    original = value
    if not PyLong_CheckExact(value):
        # Integers of other types (numpy) are welcome; bools, and floats such as 5.0, are not counts.
        if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
            raise wrong_type(section, name, f"an integer from 0 to {limit}", original)
        try:
            value = value.__index__()
        except TypeError:  # arrays of one element have the method and refuse to use it
            raise wrong_type(section, name, f"an integer from 0 to {limit}", original) from None
    try:
        number = PyLong_AsUnsignedLongLong(value)
    except OverflowError:
        raise wrong_type(section, name, f"an integer from 0 to {limit}", original) from None
    if number > limit:
        raise wrong_type(section, name, f"an integer from 0 to {limit}", original)
    return number


cdef uint64_t unsigned_field(
    object source, str section, str name, uint64_t limit, uint64_t default
) except? 0xFFFFFFFFFFFFFFFFULL:
    cdef unsigned long long number = 0
    cdef int found = fpm_unsigned_field(source, name, limit, &number)
    if found == 1:
        return number
    if found == 2:
        return default
    value = field_of(source, name)
    return default if value is ABSENT else to_unsigned(value, section, name, limit)


cdef double real_field(object source, str section, str name, bint any_value) except? -1.0:
    cdef double number = 0.0
    cdef int found = fpm_real_field(source, name, &number)
    if found == 2 or found == 1 and (any_value or isfinite(number)):
        return number
    value = field_of(source, name)
    if value is ABSENT:
        return 0.0
    if isinstance(value, (bool, np.bool_, str, bytes)) or not hasattr(value, "__float__"):
        raise wrong_type(section, name, "a finite number", value)
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):
        raise wrong_type(section, name, "a finite number", value) from None
    if not any_value and not isfinite(number):
        raise wrong_type(section, name, "a finite number", value)
    return number


cdef object record_field(object source, str name):
    # A nested record: a mapping, or an object with the attributes of one.
    value = field_of(source, name)
    if value is ABSENT or PyDict_Check(value):
        return value
    if field_of(value, "num_prefill_requests") is not ABSENT or field_of(value, "num_decode_requests") is not ABSENT:
        return value
    if isinstance(value, Mapping):
        return dict(value)
    raise wrong_type("", name, "an object with the fields of that section", value)


cdef class IterationSource:
    """Iterations in order, each one or more attention-DP ranks."""

    cdef const FpmRank* ranks_of(
        self, Py_ssize_t iteration, FpmRank* scratch, Py_ssize_t* num_ranks
    ) noexcept nogil:
        num_ranks[0] = 0
        return scratch


cdef class Records(IterationSource):
    """Iterations read from Python objects, as rank records side by side."""

    def __cinit__(self):
        self.rank_capacity = 4
        self.iteration_capacity = 4
        self.ranks = <FpmRank*>malloc(self.rank_capacity * sizeof(FpmRank))
        self.offsets = <Py_ssize_t*>malloc((self.iteration_capacity + 1) * sizeof(Py_ssize_t))
        if self.ranks == NULL or self.offsets == NULL:
            raise MemoryError
        self.offsets[0] = 0

    def __dealloc__(self):
        free_lists(self.lists)
        free(self.ranks)
        free(self.offsets)

    cdef const FpmRank* ranks_of(
        self, Py_ssize_t iteration, FpmRank* scratch, Py_ssize_t* num_ranks
    ) noexcept nogil:
        num_ranks[0] = self.offsets[iteration + 1] - self.offsets[iteration]
        return self.ranks + self.offsets[iteration]

    cdef int end_iteration(self) except -1:
        cdef Py_ssize_t* grown
        cdef Py_ssize_t width = self.num_ranks - self.offsets[self.num_iterations]
        if self.num_iterations == self.iteration_capacity:
            grown = <Py_ssize_t*>realloc(
                self.offsets, (2 * self.iteration_capacity + 1) * sizeof(Py_ssize_t)
            )
            if grown == NULL:
                raise MemoryError
            self.offsets = grown
            self.iteration_capacity *= 2
        self.num_iterations += 1
        self.offsets[self.num_iterations] = self.num_ranks
        self.max_ranks = max(self.max_ranks, width)
        return 0

    cdef int add_rank(self, object source, object decode_frame) except -1:
        cdef FpmRank* grown
        if self.num_ranks == self.rank_capacity:
            grown = <FpmRank*>realloc(self.ranks, 2 * self.rank_capacity * sizeof(FpmRank))
            if grown == NULL:
                raise MemoryError
            self.ranks = grown
            self.rank_capacity *= 2
        read_rank(source, decode_frame, self.any_wall_time, &self.ranks[self.num_ranks], &self.lists)
        self.num_ranks += 1
        return 0


cdef int read_rank(
    object source, object decode_frame, bint any_wall_time, FpmRank* rank, LengthLists** lists
) except -1:
    # One rank from any of its forms. Per-request lists are added to `lists`, which the caller frees.
    memset(rank, 0, sizeof(FpmRank))
    if isinstance(source, bytes):
        source = decode_frame(source)
    elif not PyDict_Check(source) and field_of(source, "scheduled_requests") is ABSENT:
        if not isinstance(source, Mapping):
            raise MetricsError(
                "invalid FPM payload: expected a mapping, an encoded frame or an object with the attributes of "
                f"ForwardPassMetrics for a rank, found {type(source).__name__}"
            )
        source = dict(source)
    worker_id = field_of(source, "worker_id")
    if worker_id is not ABSENT and not isinstance(worker_id, str):
        raise wrong_type("", "worker_id", "a string", worker_id)
    rank.version = unsigned_field(source, "", "version", U32_MAX, 1)
    rank.dp_rank = unsigned_field(source, "", "dp_rank", U32_MAX, 0)
    rank.counter_id = unsigned_field(source, "", "counter_id", U64_MAX, 0)
    rank.wall_time_s = real_field(source, "", "wall_time", any_wall_time)
    rank.num_lengths = -1
    scheduled = record_field(source, "scheduled_requests")
    if scheduled is not ABSENT:
        read_scheduled(scheduled, rank, lists)
    queued = record_field(source, "queued_requests")
    if queued is not ABSENT:
        read_queued(queued, rank)
    return 0


cdef int read_scheduled(object source, FpmRank* rank, LengthLists** lists) except -1:
    cdef str at = "scheduled_requests."
    rank.num_prefill_requests = unsigned_field(source, at, "num_prefill_requests", U32_MAX, 0)
    rank.sum_prefill_tokens = unsigned_field(source, at, "sum_prefill_tokens", U32_MAX, 0)
    rank.var_prefill_length = real_field(source, at, "var_prefill_length", False)
    rank.sum_prefill_kv_tokens = unsigned_field(source, at, "sum_prefill_kv_tokens", U32_MAX, 0)
    rank.num_decode_requests = unsigned_field(source, at, "num_decode_requests", U32_MAX, 0)
    rank.sum_decode_kv_tokens = unsigned_field(source, at, "sum_decode_kv_tokens", U32_MAX, 0)
    rank.var_decode_kv_tokens = real_field(source, at, "var_decode_kv_tokens", False)
    extend = field_of(source, "extend_lengths")
    past = field_of(source, "past_kv_lengths")
    if (extend is not ABSENT and extend is not None) or (past is not ABSENT and past is not None):
        read_lengths(extend, past, rank, lists)
    return 0


cdef int read_queued(object source, FpmRank* rank) except -1:
    cdef str at = "queued_requests."
    rank.queued_num_prefill_requests = unsigned_field(source, at, "num_prefill_requests", U32_MAX, 0)
    rank.queued_sum_prefill_tokens = unsigned_field(source, at, "sum_prefill_tokens", U32_MAX, 0)
    rank.queued_var_prefill_length = real_field(source, at, "var_prefill_length", False)
    rank.queued_num_decode_requests = unsigned_field(source, at, "num_decode_requests", U32_MAX, 0)
    rank.queued_sum_decode_kv_tokens = unsigned_field(source, at, "sum_decode_kv_tokens", U32_MAX, 0)
    rank.queued_var_decode_kv_tokens = real_field(source, at, "var_decode_kv_tokens", False)
    return 0


cdef int take_lengths(tuple lengths, str name, uint64_t* values) except -1:
    # Integers of the usual type without a name for each; the general reader judges and names the others.
    cdef Py_ssize_t i
    cdef unsigned long long number = 0
    for i in range(len(lengths)):
        if fpm_take_unsigned(<PyObject*>lengths[i], U64_MAX, &number):
            values[i] = number
        else:
            values[i] = to_unsigned(lengths[i], "scheduled_requests.", f"{name}[{i}]", U64_MAX)
    return 0


cdef int read_lengths(object given_extend, object given_past, FpmRank* rank, LengthLists** lists) except -1:
    cdef LengthLists* block
    cdef Py_ssize_t num_extend, num_past
    cdef tuple extend = list_of_lengths(given_extend, "extend_lengths")
    cdef tuple past = list_of_lengths(given_past, "past_kv_lengths")
    num_extend = len(extend)
    num_past = len(past)
    block = <LengthLists*>malloc(sizeof(LengthLists) + (num_extend + num_past) * sizeof(uint64_t))
    if block == NULL:
        raise MemoryError
    block.next = lists[0]
    lists[0] = block
    take_lengths(extend, "extend_lengths", block.values)
    take_lengths(past, "past_kv_lengths", block.values + num_extend)
    rank.extend_lengths = block.values
    rank.past_kv_lengths = block.values + num_extend
    rank.num_lengths = num_extend if num_extend == num_past else -2
    return 0


cdef void free_lists(LengthLists* lists) noexcept:
    cdef LengthLists* block
    while lists != NULL:
        block = lists
        lists = block.next
        free(block)


cdef tuple list_of_lengths(object value, str name):
    if value is None or value is ABSENT:
        return ()
    if not isinstance(value, (list, tuple)):
        raise wrong_type("scheduled_requests.", name, "a list of integers", value)
    return tuple(value)  # reading an item may run code that changes the list


cdef bint is_rank(object source):
    # One rank rather than a list of them.
    return not isinstance(source, (list, tuple))


def read_iterations(given, decode_frame):
    """Read the argument of a tuning call: one rank, one iteration as a flat list of ranks, or a list of iterations.

    Types are checked; rules between fields are not. Source: fpm-model.md section 5.4.
    """
    cdef Records records = Records()
    cdef Py_ssize_t num_flat = 0
    cdef tuple source
    if is_rank(given):
        records.add_rank(given, decode_frame)
        records.end_iteration()
        return records
    source = tuple(given)
    for item in source:
        num_flat += is_rank(item)
    if num_flat not in (0, len(source)):
        raise TuningError(
            "invalid tuning iterations: ranks and lists of ranks are mixed; give one rank, a list of the ranks "
            "of one iteration, or a list of iterations"
        )
    for item in source:
        if num_flat:
            records.add_rank(item, decode_frame)
            continue
        for rank in tuple(item):
            records.add_rank(rank, decode_frame)
        records.end_iteration()
    if num_flat:
        records.end_iteration()
    return records


cdef class Columns(IterationSource):
    """Columnar iterations.

    `arrays` maps the names of `COLUMNS` and `lengths_start`, `extend_lengths`, `past_kv_lengths`,
    `iteration_offsets` to contiguous arrays of the right type; `fpmsdk.metrics.FpmBatch` builds them.
    """

    def __init__(self, dict arrays not None):
        cdef Py_ssize_t i
        self.arrays = dict(arrays)
        self.wall_time_s = <const double*>data_of(arrays["wall_time_s"])
        for i, name in enumerate(
            ("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens",
             "num_decode_requests", "sum_decode_kv_tokens")
        ):
            self.counts[i] = <const uint32_t*>data_of(arrays[name])
        self.num_lengths = <const int64_t*>data_of(arrays["num_lengths"])
        self.lengths_start = <const int64_t*>data_of(arrays["lengths_start"])
        self.extend_lengths = <const uint64_t*>data_of(arrays["extend_lengths"])
        self.past_kv_lengths = <const uint64_t*>data_of(arrays["past_kv_lengths"])
        self.iteration_offsets = <const int64_t*>data_of(arrays["iteration_offsets"])
        self.var_prefill_length = <const double*>data_of(arrays["var_prefill_length"])
        self.var_decode_kv_tokens = <const double*>data_of(arrays["var_decode_kv_tokens"])
        self.num_iterations = len(arrays["iteration_offsets"]) - 1
        for i in range(self.num_iterations):
            self.max_ranks = max(self.max_ranks, self.iteration_offsets[i + 1] - self.iteration_offsets[i])

    cdef const FpmRank* ranks_of(
        self, Py_ssize_t iteration, FpmRank* scratch, Py_ssize_t* num_ranks
    ) noexcept nogil:
        cdef Py_ssize_t first = self.iteration_offsets[iteration]
        cdef Py_ssize_t r, row
        num_ranks[0] = self.iteration_offsets[iteration + 1] - first
        for r in range(num_ranks[0]):
            row = first + r
            scratch[r].version = 1
            scratch[r].wall_time_s = self.wall_time_s[row]
            scratch[r].num_prefill_requests = self.counts[0][row]
            scratch[r].sum_prefill_tokens = self.counts[1][row]
            scratch[r].sum_prefill_kv_tokens = self.counts[2][row]
            scratch[r].num_decode_requests = self.counts[3][row]
            scratch[r].sum_decode_kv_tokens = self.counts[4][row]
            scratch[r].num_lengths = self.num_lengths[row]
            scratch[r].extend_lengths = self.extend_lengths + self.lengths_start[row]
            scratch[r].past_kv_lengths = self.past_kv_lengths + self.lengths_start[row]
            scratch[r].var_prefill_length = self.var_prefill_length[row]
            scratch[r].var_decode_kv_tokens = self.var_decode_kv_tokens[row]
        return scratch


cdef void* data_of(cnp.ndarray array):
    return cnp.PyArray_DATA(array)


def read_columns(source, decode_frame):
    """Read iterations (each a rank or a list of ranks) into the arrays of a batch.

    Wall times are taken as they are, NaN and negative ones included: tuning skips and counts them.
    Returns a dict of arrays as `Columns` expects.
    """
    cdef Records records = Records()
    cdef FaultSite site
    cdef const FpmRank* rank
    cdef Py_ssize_t i
    cdef int64_t total = 0
    records.any_wall_time = True
    for item in source:
        try:
            if is_rank(item):
                records.add_rank(item, decode_frame)
            else:
                for one in tuple(item):
                    records.add_rank(one, decode_frame)
        except MetricsError as error:
            raise type(error)(f"iteration {records.num_iterations}: {error}") from None
        records.end_iteration()
    for i in range(records.num_iterations):
        site.iteration = i
        site.fault = check_ranks(
            records.ranks + records.offsets[i], records.offsets[i + 1] - records.offsets[i], &site.rank
        )
        if site.fault != FAULT_NONE:
            raise fault_error(&site)
    table = np.empty(records.num_ranks, RANK_DTYPE)
    memcpy(data_of(table), records.ranks, records.num_ranks * sizeof(FpmRank))
    arrays = {name: np.ascontiguousarray(table[name]) for name in COLUMNS}
    lengths = np.maximum(arrays["num_lengths"], 0)
    arrays["lengths_start"] = np.cumsum(lengths) - lengths
    extend = np.empty(lengths.sum(), np.uint64)
    past = np.empty(lengths.sum(), np.uint64)
    for i in range(records.num_ranks):
        rank = &records.ranks[i]
        if rank.num_lengths > 0:
            memcpy(<uint64_t*>data_of(extend) + total, rank.extend_lengths, rank.num_lengths * sizeof(uint64_t))
            memcpy(<uint64_t*>data_of(past) + total, rank.past_kv_lengths, rank.num_lengths * sizeof(uint64_t))
            total += rank.num_lengths
    arrays["extend_lengths"] = extend
    arrays["past_kv_lengths"] = past
    offsets = np.empty(records.num_iterations + 1, np.int64)
    for i in range(records.num_iterations + 1):
        offsets[i] = records.offsets[i]
    arrays["iteration_offsets"] = offsets
    return arrays


def workload_kinds(Columns source not None):
    """Workload kind of every iteration, as int8[n]; -1 when nothing was scheduled."""
    cdef cnp.ndarray kinds = np.empty(source.num_iterations, np.int8)
    cdef signed char* kind = <signed char*>cnp.PyArray_DATA(kinds)
    cdef FpmRank* scratch = new_scratch(source)
    cdef const FpmRank* ranks
    cdef Py_ssize_t num_ranks, i
    with nogil:
        for i in range(source.num_iterations):
            ranks = source.ranks_of(i, scratch, &num_ranks)
            kind[i] = <signed char>workload_kind(ranks, num_ranks)
    free(scratch)
    return kinds


cdef FpmRank* new_scratch(IterationSource source) except NULL:
    cdef FpmRank* scratch = <FpmRank*>malloc((source.max_ranks + 1) * sizeof(FpmRank))
    if scratch == NULL:
        raise MemoryError
    return scratch
