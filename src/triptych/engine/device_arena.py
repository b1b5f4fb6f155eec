"""An arena in the memory of the device that computes: embeddings are made, pulled and used there.

A transport with device memory (NIXL: GPUDirect RDMA between hosts, ``cuda_ipc`` within one) moves bytes between two such
arenas, or to and from host memory, without the host's. Whoever asks for bytes through ``ports.Arena`` gets copies.
"""

import torch

from triptych.ports import Arena, Region
from triptych.transport.arena import HeaderArena, HostArena


class DeviceArena(HeaderArena):
    """``ports.Arena`` over one tensor of bytes. ``device`` is what torch calls it; a CPU is one as well.

    Every access is complete when it returns: a peer that reads past the host knows nothing of CUDA streams.
    """

    def __init__(self, nbytes: int, *, instance_id: str, epoch: int, device: str, part: str = "") -> None:
        """Allocates and touches all of it. Raises ValueError, and what torch raises where there is no such device."""
        super().__init__(nbytes, instance_id=instance_id, epoch=epoch, part=part)
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(0)
        self.write(0, self.probe)

    @property
    def region(self) -> Region:
        device = self._bytes.device
        number = None if device.type == "cpu" else device.index
        return Region(self._bytes.data_ptr(), self.nbytes, number)

    def read(self, offset: int, nbytes: int) -> memoryview:
        copy = self._bytes[offset : offset + nbytes].to("cpu", copy=True)
        return copy.numpy().data.toreadonly()

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        nbytes = memoryview(data).nbytes
        if nbytes:
            # torch takes no read-only memory: it gets a copy of its own.
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._bytes[offset : offset + nbytes].copy_(source)
            self._settle()

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """Nothing: no code on the host writes here but through ``write``."""
        del offset, nbytes
        return None

    def _settle(self) -> None:
        if self._bytes.device.type == "cuda":
            torch.cuda.synchronize(self._bytes.device)


def open_arena(where: str, nbytes: int, *, instance_id: str, epoch: int, device: str, part: str = "") -> Arena:
    """An arena in the memory of ``device`` where that is asked for (``device``), else in the host's (``host``).

    ``part`` says which it is of an instance that has several. Blocks while it touches all of it. Raises as ``DeviceArena``.
    """
    if where == "device":
        return DeviceArena(nbytes, instance_id=instance_id, epoch=epoch, device=device, part=part)
    return HostArena(nbytes, instance_id=instance_id, epoch=epoch, part=part)
