# Copies of plain data (dicts and lists of immutable values), for results that callers may change.

from cpython.dict cimport PyDict_Copy
from cpython.list cimport PyList_GetSlice


cpdef object copy_plain(object value):
    """An independent copy of nested dicts and lists; other values are shared."""
    cdef dict mapping
    cdef list items
    cdef Py_ssize_t i
    if type(value) is dict:
        mapping = PyDict_Copy(value)
        for key, item in (<dict>value).items():
            if type(item) is dict or type(item) is list:
                mapping[key] = copy_plain(item)
        return mapping
    if type(value) is list:
        items = PyList_GetSlice(value, 0, len(<list>value))
        for i in range(len(items)):
            if type(items[i]) is dict or type(items[i]) is list:
                items[i] = copy_plain(items[i])
        return items
    return value
