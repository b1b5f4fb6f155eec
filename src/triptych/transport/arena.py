"""A process's registered memory and its header.

The first ``HEADER_NBYTES`` hold a probe and scratch space. A reader pulls the probe first: this proves that the backend
works and that it reached the right incarnation. The scratch space receives the probes that this process reads from
others.
"""

import ctypes
import fcntl
import mmap
import os
from hashlib import blake2b
from struct import Struct

from triptych.domain.region import Region
from triptych.errors import Overloaded
from triptych.machine.arena.extents import Extents

HEADER_NBYTES = 4096
PROBE_NBYTES = 64
_PROBE = Struct("<8sQQ32s8x")
_MAGIC = b"TRIPTYCH"

_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 0x01, 0x02, 0x04, 0x10
SEALS = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
"""Seals of an arena's memory file: its size is fixed, and other processes can map it only for reading."""


def probe_bytes(instance_id: str, epoch: int, nbytes: int, part: str = "") -> bytes:
    """The 64 bytes at the start of an arena, unique for each incarnation of each instance.

    ``part`` tells the arenas of one instance apart.
    """
    whose = instance_id.encode() + (b"\0" + part.encode() if part else b"")
    digest = blake2b(whose, digest_size=32, person=b"triptych-arena").digest()
    return _PROBE.pack(_MAGIC, epoch, nbytes, digest)


def probed_nbytes(probe: bytes) -> int | None:
    """The arena size encoded in a probe; None when the bytes are not a probe."""
    if len(probe) != PROBE_NBYTES:
        return None
    magic, _epoch, nbytes, _digest = _PROBE.unpack(probe)
    return int(nbytes) if magic == _MAGIC and nbytes >= HEADER_NBYTES else None


class HeaderArena:
    """The part common to all arenas: owner, probe, and scratch space for reading the probes of others."""

    def __init__(self, nbytes: int, *, instance_id: str, epoch: int, part: str = "") -> None:
        """``nbytes`` includes the header. Raises ValueError when it leaves no room for slots."""
        if nbytes <= HEADER_NBYTES:
            raise ValueError(f"an arena needs more than its {HEADER_NBYTES}-byte header, got {nbytes} bytes")
        self._nbytes = nbytes
        self._scratch = Extents(PROBE_NBYTES, HEADER_NBYTES)
        self.instance_id = instance_id
        self.epoch = epoch
        self.probe = probe_bytes(instance_id, epoch, nbytes, part)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def base(self) -> int:
        """Offset of the first slot; slots end at ``nbytes``."""
        return HEADER_NBYTES

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether the range lies within the slots."""
        return offset >= HEADER_NBYTES and 0 <= nbytes <= self._nbytes - offset

    def take_scratch(self) -> int:
        """Reserve space for one probe until ``give_scratch``. Raises Overloaded when none is left."""
        offset = self._scratch.allocate(PROBE_NBYTES)
        if offset is None:
            raise Overloaded(f"{HEADER_NBYTES // PROBE_NBYTES - 1} probes are under way, which is the limit")
        return offset

    def give_scratch(self, offset: int) -> None:
        self._scratch.free(offset)


class HostArena(HeaderArena):
    """``ports.Arena`` in page-aligned host memory, touched once at start so that no pull pays for page faults.

    Where the kernel supports sealed memory files the arena is one. So its descriptor can be given to another process on
    this host. The memory has no name in any file system and goes with the last process that maps it.

    It is not freed while the process lives: freeing memory under a peer's one-sided read crashes this process. All
    backends of a process share one arena.
    """

    def __init__(self, nbytes: int, *, instance_id: str, epoch: int, part: str = "") -> None:
        super().__init__(nbytes, instance_id=instance_id, epoch=epoch, part=part)
        self._file = _SealedFile.make(nbytes)
        self._map = mmap.mmap(-1 if self._file is None else self._file.fd, nbytes)
        self._shareable = self._file is not None and self._file.seal()
        self._memory = memoryview(self._map)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        ctypes.memset(address, 0, nbytes)
        self._address = address
        self._memory[:PROBE_NBYTES] = self.probe

    @property
    def memory(self) -> memoryview:
        """The whole arena, writable, format ``B``."""
        return self._memory

    @property
    def region(self) -> Region:
        return Region(self._address, self.nbytes)

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return self._address

    @property
    def fd(self) -> int | None:
        """Descriptor of the sealed memory file; None where the kernel has none."""
        return self._file.fd if self._file is not None and self._shareable else None

    def read(self, offset: int, nbytes: int) -> memoryview:
        """A view, not a copy."""
        return self._memory[offset : offset + nbytes].toreadonly()

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        part = memoryview(data).cast("B")
        self._memory[offset : offset + part.nbytes] = part

    def window(self, offset: int, nbytes: int) -> memoryview:
        return self._memory[offset : offset + nbytes]


class _SealedFile:
    """A memory file that is closed with its owner."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def make(cls, nbytes: int) -> "_SealedFile | None":
        """Make a sealed memory file. None where the system has none or has run out of them."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            sealed = cls(os.memfd_create("triptych-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.ftruncate(sealed.fd, nbytes)
        except OSError:
            return None
        return sealed

    def seal(self) -> bool:
        """Seal the file after mapping it for writing. False where the kernel cannot (before Linux 5.1)."""
        try:
            fcntl.fcntl(self.fd, _F_ADD_SEALS, SEALS)
        except OSError:
            return False
        return True

    def __del__(self) -> None:
        os.close(self.fd)
