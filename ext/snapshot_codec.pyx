# The positional form of saved state: the fields of a declared layout in their order, little-endian, without names and
# padding. A field whose first axis is a dimension is a count and its elements; nothing is allocated before the count
# is known to fit into the bytes that remain. Source: snapshot.md section 3.

from libc.math cimport INFINITY, isfinite
from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcpy

cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize

import sys

import numpy as np

from fpmsdk.errors import StateSnapshotError

cnp.import_array()

cdef enum:
    MAX_SHAPE_AXES = 3
    MAX_DIMENSIONS = 8

cdef enum:
    FLOAT64
    INT64
    INT32
    UINT8

cdef dict TYPES = {"f8": (FLOAT64, 8), "i8": (INT64, 8), "i4": (INT32, 4), "u1": (UINT8, 1)}


cdef struct AxisPlan:
    int dimension        # -1: `length` is fixed
    int64_t length       # fixed, or what is added to the dimension


cdef struct FieldPlan:
    int type
    int numpy_type
    int64_t item_bytes
    int num_axes
    AxisPlan axes[MAX_SHAPE_AXES]
    bint finite
    double low, high                 # of floats
    int64_t least, most              # of integers


cdef class LayoutCodec:
    """Writes and reads the arrays of one `StateLayout`.

    Parameters
    ----------
    layout: every dimension is the first axis of some field before other axes need it.
    """

    cdef readonly object layout
    cdef list names
    cdef list plans                  # bytes of a FieldPlan each
    cdef dict dimensions             # number of each dimension by name

    def __cinit__(self, layout):
        cdef FieldPlan plan
        cdef int i
        if sys.byteorder != "little":
            raise StateSnapshotError("state snapshots are little-endian; this machine is not")
        self.layout = layout
        self.names = [item.name for item in layout.fields]
        self.plans = []
        self.dimensions = {}
        for item in layout.fields:
            plan.type, plan.item_bytes = TYPES[item.dtype]
            plan.numpy_type = np.dtype(item.dtype).num
            plan.num_axes = len(item.shape)
            for i, axis in enumerate(item.shape):
                if isinstance(axis, int):
                    plan.axes[i] = AxisPlan(-1, axis)
                    continue
                name = axis.removesuffix("+1")
                if name not in self.dimensions:
                    if i > 0:
                        raise ValueError(f"{layout.name}.{item.name}: no earlier field shows the dimension {name}")
                    self.dimensions[name] = len(self.dimensions)
                plan.axes[i] = AxisPlan(self.dimensions[name], 1 if axis.endswith("+1") else 0)
            plan.finite = item.finite
            plan.low = -INFINITY if item.minimum is None else item.minimum
            plan.high = INFINITY if item.maximum is None else item.maximum
            plan.least = INT64_MIN if item.minimum is None else <int64_t>item.minimum
            plan.most = INT64_MAX if item.maximum is None else <int64_t>item.maximum
            self.plans.append(PyBytes_FromStringAndSize(<char*>&plan, sizeof(FieldPlan)))

    def size(self, dict arrays not None):
        """Bytes that arrays take."""
        cdef int64_t total = 0
        for plan, item in zip(self.plans, self.layout.fields):
            total += arrays[item.name].nbytes
            if (<FieldPlan*>PyBytes_AS_STRING(plan)).axes[0].dimension >= 0:
                total += sizeof(uint64_t)
        return total

    cdef bint fits(self, dict arrays) except -1:
        # Whether arrays are what the layout declares, each in one piece of memory.
        cdef int64_t[MAX_DIMENSIONS] known
        cdef int64_t length
        cdef FieldPlan* plan
        cdef AxisPlan* axis
        cdef cnp.ndarray array
        cdef int i
        if list(arrays) != self.names:
            return False
        for i in range(MAX_DIMENSIONS):
            known[i] = -1
        for encoded, item in zip(self.plans, self.layout.fields):
            plan = <FieldPlan*>PyBytes_AS_STRING(encoded)
            array = arrays[item.name]
            if (
                cnp.PyArray_TYPE(array) != plan.numpy_type
                or cnp.PyArray_NDIM(array) != plan.num_axes
                or not cnp.PyArray_IS_C_CONTIGUOUS(array)
            ):
                return False
            for i in range(plan.num_axes):
                axis = &plan.axes[i]
                length = cnp.PyArray_DIM(array, i)
                if axis.dimension < 0:
                    if length != axis.length:
                        return False
                    continue
                length -= axis.length
                if known[axis.dimension] < 0:
                    known[axis.dimension] = length
                if length < 0 or known[axis.dimension] != length:
                    return False
            if first_outside(plan, cnp.PyArray_DATA(array), cnp.PyArray_SIZE(array)) < cnp.PyArray_SIZE(array):
                return False
        return True

    cdef int64_t write(self, dict arrays, uint8_t* target) except -1:
        # Returns the bytes written; `target` has room for `size`.
        cdef uint8_t* at = target
        cdef uint64_t count
        cdef cnp.ndarray array
        if not self.fits(arrays):
            self.layout.check(arrays)  # says what does not
            raise StateSnapshotError(f"state of {self.layout.name} does not fit its declaration")
        for plan, item in zip(self.plans, self.layout.fields):
            array = arrays[item.name]
            if (<FieldPlan*>PyBytes_AS_STRING(plan)).axes[0].dimension >= 0:
                count = cnp.PyArray_DIM(array, 0)
                memcpy(at, &count, sizeof(uint64_t))
                at += sizeof(uint64_t)
            memcpy(at, cnp.PyArray_DATA(array), cnp.PyArray_NBYTES(array))
            at += cnp.PyArray_NBYTES(array)
        return at - target

    cdef object read(self, const uint8_t* content, int64_t size, int64_t start):
        # (arrays, position after them)
        cdef int64_t[MAX_DIMENSIONS] known
        cdef int64_t position = start, length, row_bytes, wanted, wrong, elements
        cdef uint64_t count
        cdef FieldPlan* plan
        cdef cnp.ndarray array
        cdef int i
        cdef dict arrays = {}
        for i in range(MAX_DIMENSIONS):
            known[i] = -1
        for encoded, item in zip(self.plans, self.layout.fields):
            plan = <FieldPlan*>PyBytes_AS_STRING(encoded)
            shape = []
            row_bytes = plan.item_bytes
            for i in range(1, plan.num_axes):
                length = plan.axes[i].length
                if plan.axes[i].dimension >= 0:
                    length += known[plan.axes[i].dimension]
                shape.append(length)
                # Lengths are those of arrays that were in the content, so that no product of two overflows.
                row_bytes *= length
            if plan.axes[0].dimension < 0:
                length = plan.axes[0].length
            else:
                if size - position < <int64_t>sizeof(uint64_t):
                    raise self.fault(item, position, "a count of 8 bytes", f"{size - position} bytes to the end")
                memcpy(&count, content + position, sizeof(uint64_t))
                position += sizeof(uint64_t)
                if count > <uint64_t>((size - position) // max(row_bytes, 1)):
                    raise self.fault(
                        item, position - sizeof(uint64_t),
                        f"at most {(size - position) // max(row_bytes, 1)} elements in {size - position} bytes", count,
                    )
                length = <int64_t>count
                wanted = length - plan.axes[0].length
                if wanted < 0:
                    raise self.fault(item, position - sizeof(uint64_t), "a count of at least 1", count)
                i = plan.axes[0].dimension
                if known[i] < 0:
                    known[i] = wanted
                elif known[i] != wanted:
                    raise self.fault(
                        item, position - sizeof(uint64_t), f"a count of {known[i] + plan.axes[0].length}", count
                    )
            if length > (size - position) // max(row_bytes, 1):
                raise self.fault(item, position, f"{length * row_bytes} bytes", f"{size - position} bytes to the end")
            array = np.empty((length, *shape), item.dtype)
            memcpy(cnp.PyArray_DATA(array), content + position, length * row_bytes)
            elements = cnp.PyArray_SIZE(array)
            wrong = first_outside(plan, cnp.PyArray_DATA(array), elements)
            if wrong < elements:
                raise self.fault(
                    item, position + wrong * plan.item_bytes, accepted(item), array.reshape(-1)[wrong].item()
                )
            position += length * row_bytes
            arrays[item.name] = array
        return arrays, position

    cdef object fault(self, item, position, expected, found):
        return StateSnapshotError(
            f"byte {position}: {self.layout.name}, field {item.name}: expected {expected}, found {found}"
        )


cdef int64_t first_outside(const FieldPlan* plan, const void* data, int64_t count) noexcept nogil:
    # The first element outside the declared bounds, `count` when there is none.
    cdef int64_t i
    cdef double value
    if plan.type == FLOAT64:
        for i in range(count):
            value = (<const double*>data)[i]
            if plan.finite and not isfinite(value):
                return i
            if value < plan.low or value > plan.high:
                return i
        return count
    if plan.least == INT64_MIN and plan.most == INT64_MAX:
        return count
    for i in range(count):
        if plan.type == INT64:
            if not plan.least <= (<const int64_t*>data)[i] <= plan.most:
                return i
        elif plan.type == INT32:
            if not plan.least <= (<const int32_t*>data)[i] <= plan.most:
                return i
        elif not plan.least <= (<const uint8_t*>data)[i] <= plan.most:
            return i
    return count


cdef accepted(item):
    low = "" if item.minimum is None else f" from {item.minimum}"
    high = "" if item.maximum is None else f" to {item.maximum}"
    finite = "finite " if item.finite and item.dtype == "f8" else ""
    return f"a {finite}number{low}{high}"


def encode(list parts not None):
    """The bytes of a state.

    Parameters
    ----------
    parts: in order (store code, layout code, `LayoutCodec`, arrays); codes are 0 to 255.
    """
    cdef LayoutCodec codec
    cdef uint64_t count = len(parts)
    cdef int64_t total = sizeof(uint64_t)
    cdef bytes content
    cdef uint8_t* at
    for store, layout, codec, arrays in parts:
        total += 2 + codec.size(arrays)
    content = PyBytes_FromStringAndSize(NULL, total)
    at = <uint8_t*>PyBytes_AS_STRING(content)
    memcpy(at, &count, sizeof(uint64_t))
    at += sizeof(uint64_t)
    for store, layout, codec, arrays in parts:
        at[0] = <uint8_t>store
        at[1] = <uint8_t>layout
        at += 2
        at += codec.write(arrays, at)
    return content


def decode(const uint8_t[::1] content not None, dict codecs not None):
    """The parts of a state: (store code, layout code, arrays) in order.

    Parameters
    ----------
    codecs: `LayoutCodec` by layout code.

    Raises
    ------
    StateSnapshotError: the bytes are not exactly a sequence of parts of known layouts with values in their bounds.
    """
    cdef int64_t size = content.shape[0], position = sizeof(uint64_t)
    cdef const uint8_t* data = &content[0] if size else NULL
    cdef uint64_t count, i
    cdef int store, layout
    cdef LayoutCodec codec
    if size < position:
        raise StateSnapshotError(f"byte 0: expected a count of 8 bytes, found {size} bytes in all")
    memcpy(&count, data, sizeof(uint64_t))
    if count > <uint64_t>((size - position) // 2):
        raise StateSnapshotError(
            f"byte 0: expected at most {(size - position) // 2} stores in {size} bytes, found {count}"
        )
    parts = []
    for i in range(count):
        if size - position < 2:
            raise StateSnapshotError(f"byte {position}: expected store {i} of {count}, found the end")
        store, layout = data[position], data[position + 1]
        codec = codecs.get(layout)
        if codec is None:
            raise StateSnapshotError(
                f"byte {position + 1}: expected a layout code of {sorted(codecs)}, found {layout}"
            )
        arrays, position = codec.read(data, size, position + 2)
        parts.append((store, layout, arrays))
    if position != size:
        raise StateSnapshotError(f"byte {position}: expected the end, found {size - position} more bytes")
    return parts
