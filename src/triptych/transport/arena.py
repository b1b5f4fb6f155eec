"""A process's registered memory, and the header by which a reader knows whose memory it reads.

The first ``HEADER_NBYTES`` hold a probe (what a reader pulls first, to prove that a backend works and that it reached
the incarnation that it meant) and scratch space into which this process's own probes of others are pulled.
"""

import ctypes
import fcntl
import mmap
import os
from hashlib import blake2b
from struct import Struct

from triptych.errors import Overloaded
from triptych.machine.extents import Extents
from triptych.ports import Region

HEADER_NBYTES = 4096
PROBE_NBYTES = 64
_PROBE = Struct("<8sQQ32s8x")
_MAGIC = b"TRIPTYCH"

_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 0x01, 0x02, 0x04, 0x10
SEALS = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
"""Of an arena's memory: its size is fixed, and whoever else maps it can only read it."""


def probe_bytes(instance_id: str, epoch: int, nbytes: int, part: str = "") -> bytes:
    """What stands at the start of an arena: 64 bytes, different for every incarnation of every instance.

    ``part`` says which it is of an instance that has several.
    """
    whose = instance_id.encode() + (b"\0" + part.encode() if part else b"")
    digest = blake2b(whose, digest_size=32, person=b"triptych-arena").digest()
    return _PROBE.pack(_MAGIC, epoch, nbytes, digest)


def probed_nbytes(probe: bytes) -> int | None:
    """Size of the arena that a probe speaks of; None when it is not a probe."""
    if len(probe) != PROBE_NBYTES:
        return None
    magic, _epoch, nbytes, _digest = _PROBE.unpack(probe)
    return int(nbytes) if magic == _MAGIC and nbytes >= HEADER_NBYTES else None


class HeaderArena:
    """What every arena has, wherever its bytes lie: whose it is, its probe, and scratch space for probes of others."""

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
        """Where slots may begin: what machines get as ``start``. They end at ``nbytes``."""
        return HEADER_NBYTES

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether these bytes lie where slots may lie."""
        return offset >= HEADER_NBYTES and 0 <= nbytes <= self.nbytes - offset

    def take_scratch(self) -> int:
        """Room for one probe, until ``give_scratch``. Raises Overloaded when too many are out."""
        offset = self._scratch.allocate(PROBE_NBYTES)
        if offset is None:
            raise Overloaded(f"{HEADER_NBYTES // PROBE_NBYTES - 1} probes are under way, which is the limit")
        return offset

    def give_scratch(self, offset: int) -> None:
        self._scratch.free(offset)


class HostArena(HeaderArena):
    """``ports.Arena`` in host memory: page-aligned, touched once at start so that no pull pays for page faults.

    It has no name in any file system. Where the kernel has sealed memory files it is one, so that another process of
    this host can be handed it to read; it is gone with the last process that maps it. It is never given back while the
    process lives: a peer may read it, and freeing memory under a one-sided read crashes the process that owns it. All
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
        """All of it, writable, format ``B``."""
        return self._memory

    @property
    def region(self) -> Region:
        return Region(self._address, self.nbytes)

    @property
    def address(self) -> int:
        """Of the first byte, in this process."""
        return self._address

    @property
    def fd(self) -> int | None:
        """Of the sealed memory file that this arena is; None where there is no such thing."""
        return self._file.fd if self._file is not None and self._shareable else None

    def read(self, offset: int, nbytes: int) -> memoryview:
        """A view: no copy is made."""
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
        """None where the system has no such files or none to spare."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            made = cls(os.memfd_create("triptych-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.ftruncate(made.fd, nbytes)
        except OSError:
            return None
        return made

    def seal(self) -> bool:
        """After it was mapped for writing. Whether the kernel can do it (Linux 5.1)."""
        try:
            fcntl.fcntl(self.fd, _F_ADD_SEALS, SEALS)
        except OSError:
            return False
        return True

    def __del__(self) -> None:
        os.close(self.fd)
