"""Opens the arena of an instance. Needs no torch, unless the memory is a device's."""

from triptych.ports import Arena
from triptych.transport.arena import HostArena


def open_arena(where: str, nbytes: int, *, instance_id: str, epoch: int, device: str, part: str = "") -> Arena:
    """An arena in the memory of ``device`` (``where`` is ``device``), or in host memory (``host``).

    ``part`` tells the arenas of one instance apart. Blocks while all memory is touched. Raises as ``DeviceArena``.
    """
    if where == "device":
        from triptych.engine.device_arena import DeviceArena

        return DeviceArena(nbytes, instance_id=instance_id, epoch=epoch, device=device, part=part)
    return HostArena(nbytes, instance_id=instance_id, epoch=epoch, part=part)
