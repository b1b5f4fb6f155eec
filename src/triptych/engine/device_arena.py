"""An arena in the memory of the computing device: embeddings are made, pulled and used there.

A transport with device memory (NIXL: GPUDirect RDMA between hosts, ``cuda_ipc`` within one) moves bytes between two
such arenas, or to and from host memory, without staging. Reads through ``ports.Arena`` return copies.
"""

import torch

from triptych.domain.region import Region
from triptych.transport.arena import HeaderArena


class DeviceArena(HeaderArena):
    """``ports.Arena`` over one tensor of bytes. ``device`` is torch's name; a CPU works as well.

    Every access is complete when it returns: a peer that reads by RDMA knows nothing of CUDA streams.
    """

    def __init__(self, nbytes: int, *, instance_id: str, epoch: int, device: str, part: str = "") -> None:
        """Allocates and touches all memory. Raises ValueError, and what torch raises for an unknown device."""
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
            # torch takes no read-only memory, so copy it.
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._bytes[offset : offset + nbytes].copy_(source)
            self._settle()

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """None: host code writes only through ``write``."""
        del offset, nbytes
        return None

    def _settle(self) -> None:
        if self._bytes.device.type == "cuda":
            torch.cuda.synchronize(self._bytes.device)
