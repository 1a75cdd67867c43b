# Lets the kernel begin to write a file to its disk. An fsync later finds most of that done, and files that were begun
# together share one commit of the file system's journal instead of waiting for one each.

cdef extern from *:
    """
    #include <fcntl.h>
    static void begin(int descriptor) {
    #ifdef __linux__
        /* Only a hint: what cannot be written is told by the fsync. */
        (void)sync_file_range(descriptor, 0, 0, SYNC_FILE_RANGE_WRITE);
    #else
        (void)descriptor;
    #endif
    }
    """
    void begin(int descriptor) nogil


def begin_writeback(int descriptor):
    """Begin to write what was written to an open file to its disk, and do not wait for it. Nothing outside of Linux."""
    with nogil:
        begin(descriptor)
