"""Tunes the C library's heap for the memory that passes free, and gives memory back to the system."""

import ctypes
import mmap
from typing import Any

LARGEST_NBYTES = 64 << 20
"""Largest allocation from the heap: above the widest tensor of a step of 2,048 tokens."""
KEPT_NBYTES = 512 << 20
"""Free memory kept at the heap's end."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed(largest_nbytes: int = LARGEST_NBYTES, kept_nbytes: int = KEPT_NBYTES) -> bool:
    """Reuse memory freed by a pass in the next one, rather than return it to the kernel.

    By default glibc maps large tensors one by one, or trims its heap, depending on earlier sizes. The next pass then
    takes a page fault for each page. Returns whether this can be set: False with other C libraries, where nothing
    changes.
    """
    library: Any = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    return all(
        library.mallopt(option, nbytes) == 1
        for option, nbytes in ((_M_MMAP_THRESHOLD, largest_nbytes), (_M_TRIM_THRESHOLD, kept_nbytes))
    )


def give_back(address: int, nbytes: int) -> None:
    """Give the whole pages of this memory back to the system: it stays allocated, and reads as zeros until it is written again.

    For memory of which nothing is needed any more; how it was allocated does not matter. Other threads run meanwhile.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    library: Any = ctypes.CDLL(None, use_errno=True)
    if begin < end and library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "memory cannot be given back")


def trim() -> None:
    """Give the heap's free memory back to the system, for once. Does nothing with other C libraries than glibc."""
    library: Any = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
