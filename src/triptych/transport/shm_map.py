"""Another process's arena, mapped for reading. All calls into the C library are here."""

import ctypes
import fcntl
import mmap
import os

from triptych.errors import TransferFailed
from triptych.transport.arena import SEALS

_F_GET_SEALS = 1034
_MADV_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class ReadOnlyMap:
    """Maps all of an arena's pages at once, so that no pull pays for page faults."""

    @classmethod
    def take(cls, fd: int, nbytes: int) -> "ReadOnlyMap":
        """Map ``fd`` and close it in any case. Raises as the constructor does."""
        try:
            return cls(fd, nbytes)
        finally:
            os.close(fd)

    def __init__(self, fd: int, nbytes: int) -> None:
        """Blocks for some 0.1 s per GB, with the GIL released, while page tables are filled.

        Raises TransferFailed when ``fd`` is not sealed memory of that size: a peer could otherwise truncate it and so
        kill this process during a read.
        """
        try:
            sealed = fcntl.fcntl(fd, _F_GET_SEALS) & SEALS == SEALS
        except OSError:
            sealed = False
        if not sealed or os.fstat(fd).st_size != nbytes:
            raise TransferFailed(f"the holder's memory is not a sealed file of {nbytes} bytes")
        address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address is None or address == _FAILED:
            raise TransferFailed(f"{nbytes} bytes of the holder's memory could not be mapped")
        self.address = int(address)
        self.nbytes = nbytes
        # Before Linux 5.14 pages are mapped on first read instead.
        _libc.madvise(self.address, nbytes, _MADV_POPULATE_READ)

    def copy_to(self, destination_address: int, offset: int, nbytes: int) -> None:
        """Copy with the GIL released. The caller has checked the range."""
        ctypes.memmove(destination_address, self.address + offset, nbytes)

    def close(self) -> None:
        """Unmap the arena. No copy may be running."""
        _libc.munmap(self.address, self.nbytes)
