# Copies of plain data (dicts and lists of immutable values), for reports that callers may change.

from cpython.dict cimport PyDict_Copy
from cpython.list cimport PyList_GetSlice


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

    cdef object value       # a private copy of the container
    cdef list inner         # (key or index, PlainTemplate) of the containers inside

    def __init__(self, value):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        self.inner = [(key, PlainTemplate(item)) for key, item in items if isinstance(item, (dict, list))]
        self.value = value.copy()

    cpdef object copy(self):
        """An independent copy."""
        cdef dict mapping
        cdef list items
        if isinstance(self.value, dict):
            mapping = PyDict_Copy(self.value)
            for key, template in self.inner:
                mapping[key] = (<PlainTemplate>template).copy()
            return mapping
        items = PyList_GetSlice(self.value, 0, len(<list>self.value))
        for key, template in self.inner:
            items[key] = (<PlainTemplate>template).copy()
        return items
