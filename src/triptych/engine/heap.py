"""Tunes the C library's heap for the memory that passes free."""

import ctypes
from typing import Any

LARGEST_NBYTES = 64 << 20
"""Largest allocation from the heap: above the widest tensor of a step of 2,048 tokens."""
KEPT_NBYTES = 512 << 20
"""Free memory kept at the heap's end."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed(largest_nbytes: int = LARGEST_NBYTES, kept_nbytes: int = KEPT_NBYTES) -> bool:
    """Reuse memory freed by a pass in the next one, rather than return it to the kernel.

    By default glibc maps large tensors one by one, or trims its heap, depending on earlier sizes; the next pass then
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
