"""How the C library's heap treats what a pass over the decoder gives back."""

import ctypes
from typing import Any

LARGEST_NBYTES = 64 << 20
"""An allocation up to this size comes from the heap: the widest tensor of a step of 2,048 tokens, and some more."""
KEPT_NBYTES = 512 << 20
"""Free memory at the heap's end up to this size stays there."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed(largest_nbytes: int = LARGEST_NBYTES, kept_nbytes: int = KEPT_NBYTES) -> bool:
    """Let memory that a pass gives back serve the next pass of this process, rather than return to the kernel.

    glibc by itself maps large tensors one by one, or trims its heap, as it happens to have learned from earlier sizes:
    the next pass then finds each page anew, empty, by a fault. Whether that can be set here: False with other C
    libraries, where everything stays as it is.
    """
    library: Any = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    return all(
        library.mallopt(option, nbytes) == 1
        for option, nbytes in ((_M_MMAP_THRESHOLD, largest_nbytes), (_M_TRIM_THRESHOLD, kept_nbytes))
    )
