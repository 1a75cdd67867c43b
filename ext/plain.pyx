# Copies of plain data (dicts and lists of immutable values), for reports that callers may change.

from cpython.dict cimport PyDict_Copy, PyDict_SetItem
from cpython.list cimport PyList_GetSlice, PyList_SetItem
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM


cdef class PlainTemplate:
    """Nested dicts and lists that are copied often: only the containers are visited, never their values.

    Example
    -------
    >>> template = PlainTemplate({"limits": {"tokens": 8}, "name": "m"})
    >>> copy = template.copy()
    >>> copy["limits"]["tokens"] = 9
    >>> template.copy()
    {'limits': {'tokens': 8}, 'name': 'm'}
    """

    cdef dict mapping       # a private copy of the container, if it is a dict
    cdef list items         # the same, if it is a list
    cdef tuple places       # keys or indices of the containers inside
    cdef tuple inner        # their templates

    def __init__(self, value):
        self.mapping = value.copy() if isinstance(value, dict) else None
        self.items = None if isinstance(value, dict) else value.copy()
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        containers = [(place, PlainTemplate(item)) for place, item in pairs if isinstance(item, (dict, list))]
        self.places = tuple(place for place, _ in containers)
        self.inner = tuple(template for _, template in containers)

    def copy(self):
        """An independent copy."""
        return copied(self)


cdef object copied(PlainTemplate template):
    cdef Py_ssize_t i
    if template.mapping is not None:
        mapping = PyDict_Copy(template.mapping)
        for i in range(len(template.places)):
            place = <object>PyTuple_GET_ITEM(template.places, i)
            PyDict_SetItem(mapping, place, copied(<PlainTemplate>PyTuple_GET_ITEM(template.inner, i)))
        return mapping
    items = PyList_GetSlice(template.items, 0, len(template.items))
    for i in range(len(template.places)):
        inner = copied(<PlainTemplate>PyTuple_GET_ITEM(template.inner, i))
        Py_INCREF(inner)  # PyList_SetItem takes a reference over
        PyList_SetItem(items, <object>PyTuple_GET_ITEM(template.places, i), inner)
    return items
