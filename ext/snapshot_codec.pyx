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
    BLOCK_ITEMS = 1024
    ALIGNMENT = 64

cdef enum:
    FLOAT64
    INT64
    INT32
    UINT8

cdef extern from *:
    """
    #include <string.h>
    static inline uint64_t bits_of(double value) {
        uint64_t bits;
        memcpy(&bits, &value, sizeof(bits));
        return bits;
    }
    """
    uint64_t bits_of(double value) nogil

cdef uint64_t EXPONENT = <uint64_t>0x7ff << 52
cdef uint64_t EXPONENT_UNIT = <uint64_t>1 << 52

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


cdef class SlotRows:
    """Rows of an array, those at some slots and in their order, that are copied only when they are encoded.

    Parameters
    ----------
    array: elements of 8 bytes in C order, at most 1024 in a row.
    slots: int32.
    """

    cdef readonly cnp.ndarray array
    cdef readonly cnp.ndarray slots

    def __cinit__(self, cnp.ndarray array not None, cnp.ndarray slots not None):
        if (
            cnp.PyArray_NDIM(array) == 0 or cnp.PyArray_NDIM(slots) != 1 or cnp.PyArray_TYPE(slots) != cnp.NPY_INT32
            or not cnp.PyArray_IS_C_CONTIGUOUS(slots)
        ):
            raise TypeError(f"expected rows and contiguous int32 slots, found {array!r} and {slots!r}")
        self.array = array
        self.slots = slots

    def __array__(self, dtype=None, copy=None):
        wrong = self.slots[(self.slots < 0) | (self.slots >= len(self.array))]
        if len(wrong):
            raise StateSnapshotError(f"expected slots from 0 to {len(self.array) - 1}, found {wrong[0]}")
        return self.array[self.slots]


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
            integral = item.dtype != "f8"  # bounds of numbers may be beyond all integers
            plan.least = <int64_t>item.minimum if integral and item.minimum is not None else INT64_MIN
            plan.most = <int64_t>item.maximum if integral and item.maximum is not None else INT64_MAX
            self.plans.append(PyBytes_FromStringAndSize(<char*>&plan, sizeof(FieldPlan)))

    cdef int64_t size(self, dict arrays) except -1:
        # Bytes that arrays of the declared names take.
        cdef int64_t total = 0
        cdef cnp.ndarray array, slots
        if list(arrays) != self.names:
            self.refuse(arrays)
        for plan, value in zip(self.plans, arrays.values()):
            if type(value) is SlotRows:
                array, slots = (<SlotRows>value).array, (<SlotRows>value).slots
                total += cnp.PyArray_NBYTES(array) // max(cnp.PyArray_DIM(array, 0), 1) * cnp.PyArray_DIM(slots, 0)
            else:
                array = value
                total += cnp.PyArray_NBYTES(array)
            if (<FieldPlan*>PyBytes_AS_STRING(plan)).axes[0].dimension >= 0:
                total += sizeof(uint64_t)
        return total

    cdef int64_t write(self, dict arrays, uint8_t* target) except -1:
        # Returns the bytes written; `target` has room for their `size`.
        cdef int64_t[MAX_DIMENSIONS] known
        cdef int64_t written = 0, length
        cdef int i
        for i in range(MAX_DIMENSIONS):
            known[i] = -1
        for plan, value in zip(self.plans, arrays.values()):
            if type(value) is SlotRows:
                length = write_field(
                    <FieldPlan*>PyBytes_AS_STRING(plan), (<SlotRows>value).array, (<SlotRows>value).slots, known,
                    target + written,
                )
            else:
                length = write_field(<FieldPlan*>PyBytes_AS_STRING(plan), value, None, known, target + written)
            if length < 0:
                self.refuse(arrays)
            written += length
        return written

    cdef int refuse(self, dict arrays) except -1:
        self.layout.check({name: np.asarray(value) for name, value in arrays.items()})  # says what does not fit
        raise StateSnapshotError(f"state of {self.layout.name} does not fit its declaration")

    cdef object read(self, const uint8_t* content, int64_t size, int64_t start):
        # (arrays, position after them). All lie in one piece of memory, for which large pages can be had.
        cdef int64_t[MAX_DIMENSIONS] known
        cdef int64_t position = start, offset = 0, length, row_bytes, wanted
        cdef uint64_t count
        cdef FieldPlan* plan
        cdef int i
        cdef list places = []            # shape, position in the content and offset in memory of each field
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
            places.append(((length, *shape), position, offset))
            position += length * row_bytes
            offset += (length * row_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        return self.taken(content, places, np.empty(offset, np.uint8)), position

    cdef dict taken(self, const uint8_t* content, list places, memory):
        # Arrays in `memory`, each with the elements at its place in the content.
        cdef int64_t position, offset, elements, wrong
        cdef FieldPlan* plan
        cdef cnp.ndarray array
        cdef dict arrays = {}
        for encoded, item, (shape, position, offset) in zip(self.plans, self.layout.fields, places):
            plan = <FieldPlan*>PyBytes_AS_STRING(encoded)
            array = np.ndarray(shape, item.dtype, memory, offset)
            elements = cnp.PyArray_SIZE(array)
            with nogil:
                wrong = copy_elements(
                    plan, <uint8_t*>cnp.PyArray_DATA(array), content + position, elements,
                    <const uint8_t*>cnp.PyArray_DATA(array),
                )
            if wrong < elements:
                raise self.fault(
                    item, position + wrong * plan.item_bytes, accepted(item), array.reshape(-1)[wrong].item()
                )
            arrays[item.name] = array
        return arrays

    cdef object fault(self, item, position, expected, found):
        return StateSnapshotError(
            f"byte {position}: {self.layout.name}, field {item.name}: expected {expected}, found {found}"
        )


cdef int64_t write_field(
    const FieldPlan* plan, cnp.ndarray array, cnp.ndarray slots, int64_t* known, uint8_t* target
) except? -1:
    # Bytes written, -1 when the array is not what the layout declares. `known` are the dimensions seen so far.
    cdef uint64_t num_rows
    cdef int64_t row_items = 1, length, copied
    cdef uint8_t* at = target
    cdef int i
    if (
        cnp.PyArray_TYPE(array) != plan.numpy_type
        or cnp.PyArray_NDIM(array) != plan.num_axes
        or not cnp.PyArray_IS_C_CONTIGUOUS(array)
    ):
        return -1
    num_rows = cnp.PyArray_DIM(array if slots is None else slots, 0)
    for i in range(plan.num_axes):
        length = <int64_t>num_rows if i == 0 else cnp.PyArray_DIM(array, i)
        if i > 0:
            row_items *= length
        length -= plan.axes[i].length
        if plan.axes[i].dimension < 0:
            if length != 0:
                return -1
            continue
        if known[plan.axes[i].dimension] < 0:
            known[plan.axes[i].dimension] = length
        if length < 0 or known[plan.axes[i].dimension] != length:
            return -1
    if plan.axes[0].dimension >= 0:
        memcpy(at, &num_rows, sizeof(uint64_t))
        at += sizeof(uint64_t)
    length = num_rows * row_items
    if slots is None:
        with nogil:
            copied = copy_elements(
                plan, at, <const uint8_t*>cnp.PyArray_DATA(array), length, <const uint8_t*>cnp.PyArray_DATA(array)
            )
    elif plan.item_bytes == sizeof(uint64_t) and row_items <= BLOCK_ITEMS:
        with nogil:
            copied = gather_rows(
                plan, at, <const uint64_t*>cnp.PyArray_DATA(array), cnp.PyArray_DIM(array, 0), row_items,
                <const int32_t*>cnp.PyArray_DATA(slots), num_rows,
            )
    else:
        return -1
    return at - target + length * plan.item_bytes if copied == length else -1


cdef int64_t copy_elements(
    const FieldPlan* plan, uint8_t* target, const uint8_t* source, int64_t count, const uint8_t* array
) noexcept nogil:
    # Copies block by block, each judged while it is in the cache. `array` is the one of both that is aligned. Returns
    # the first element outside the declared bounds, `count` when there is none.
    cdef int64_t at = 0, block, inside
    while at < count:
        block = min(BLOCK_ITEMS, count - at)
        memcpy(target + at * plan.item_bytes, source + at * plan.item_bytes, block * plan.item_bytes)
        inside = first_outside(plan, array + at * plan.item_bytes, block)
        at += inside
        if inside < block:
            break
    return at


cdef int64_t gather_rows(
    const FieldPlan* plan, uint8_t* target, const uint64_t* rows, int64_t num_rows, int64_t row_items,
    const int32_t* slots, int64_t count,
) noexcept nogil:
    # The elements copied: all of them, or those before a block with a slot or a value out of bounds.
    cdef uint64_t[BLOCK_ITEMS] gathered
    cdef int64_t at = 0, rows_at_once = BLOCK_ITEMS // max(row_items, 1), block, i, k
    while at < count:
        block = min(rows_at_once, count - at)
        for i in range(block):
            if not 0 <= slots[at + i] < num_rows:
                return at * row_items
        # Rows are too short to call memcpy for each, which compilers do where a loop goes along one.
        for k in range(row_items):
            for i in range(block):
                gathered[i * row_items + k] = rows[slots[at + i] * row_items + k]
        if first_outside(plan, gathered, block * row_items) < block * row_items:
            return at * row_items
        memcpy(target + at * row_items * sizeof(uint64_t), gathered, block * row_items * sizeof(uint64_t))
        at += block
    return count * row_items


cdef int64_t first_outside(const FieldPlan* plan, const void* data, int64_t count) noexcept nogil:
    # The first element outside the declared bounds, `count` when there is none.
    cdef int64_t i
    cdef double value
    if plan.type == FLOAT64:
        if not is_suspicious(plan, <const double*>data, count):
            return count
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


cdef bint is_suspicious(const FieldPlan* plan, const double* values, int64_t count) noexcept nogil:
    # Whether some value is out of bounds or, rarely, only looks like it (-0.0 at a bound of 0.0). No branches and no
    # comparisons, so that compilers take several values at once: differences to the bounds have a sign, and one more
    # in the exponent of an infinity or NaN carries over into the place of a sign.
    cdef int64_t i
    cdef double low = plan.low, high = plan.high
    cdef uint64_t signs = 0, exponent = EXPONENT if plan.finite else 0
    for i in range(count):
        signs |= bits_of(values[i] - low) | bits_of(high - values[i]) | (bits_of(values[i]) & exponent) + EXPONENT_UNIT
    return signs >> 63 != 0


cdef accepted(item):
    low = "" if item.minimum is None else f" from {item.minimum}"
    high = "" if item.maximum is None else f" to {item.maximum}"
    finite = "finite " if item.finite and item.dtype == "f8" else ""
    return f"a {finite}number{low}{high}"


def encode(list parts not None, encoded=None):
    """The bytes of a state, in memory of its own.

    Parameters
    ----------
    parts: in order (store code, layout code, `LayoutCodec`, arrays); codes are 0 to 255. Instead of an array, `SlotRows`
        are rows of one. Arrays are read, never kept.
    encoded: called with the bytes of the parts, one after the other, as soon as they are there.
    """
    cdef LayoutCodec codec
    cdef uint64_t count = len(parts)
    cdef int64_t total = sizeof(uint64_t), told = 0, at = sizeof(uint64_t)
    cdef cnp.ndarray content
    cdef uint8_t* data
    for store, layout, codec, arrays in parts:
        total += 2 + codec.size(arrays)
    content = np.empty(total, np.uint8)  # of much memory, numpy asks for large pages
    view = memoryview(content)
    data = <uint8_t*>cnp.PyArray_DATA(content)
    memcpy(data, &count, sizeof(uint64_t))
    for store, layout, codec, arrays in parts:
        if encoded is not None:
            encoded(view[told:at])
            told = at
        data[at] = <uint8_t>store
        data[at + 1] = <uint8_t>layout
        at += 2 + codec.write(arrays, data + at + 2)
    if encoded is not None:
        encoded(view[told:])
    return view


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
