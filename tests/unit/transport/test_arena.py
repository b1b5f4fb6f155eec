import pytest

from triptych.errors import TransferFailed
from triptych.transport.arena import HEADER_NBYTES, HostArena
from triptych.transport.memory import MemoryNetwork, MemoryTransport

NBYTES = HEADER_NBYTES + 4096


def test_every_arena_has_its_own_probe() -> None:
    arenas = [
        HostArena(NBYTES, instance_id=instance_id, epoch=epoch, part=part)
        for instance_id in ("a", "b")
        for epoch in (1, 2)
        for part in ("", "pulled")
    ]
    assert len({arena.probe for arena in arenas}) == len(arenas)


async def test_two_arenas_of_one_instance_are_distinguished_in_one_process() -> None:
    network = MemoryNetwork()
    made, pulled = (HostArena(NBYTES, instance_id="a", epoch=1, part=part) for part in ("", "pulled"))
    holder = MemoryTransport(network, made, host="here", check=lambda *_: True)
    reader = MemoryTransport(network, pulled, host="here", check=lambda *_: False)
    assert network.holder(made.probe) is holder
    await (await reader.connect(holder.offer())).close()
    await holder.close()
    with pytest.raises(TransferFailed, match="not in this process"):
        await reader.connect(holder.offer())
