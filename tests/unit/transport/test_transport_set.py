import pytest

from tests.contract.transport_kit import Kit
from triptych.errors import TransferFailed
from triptych.transport.transport_set import TransportSet


async def test_a_backend_that_fails_its_probe_is_replaced_by_the_next() -> None:
    memory, elsewhere, tcp = Kit("memory"), Kit("memory"), Kit("tcp")
    async with (
        memory.site("reader") as reader,
        tcp.site("reader") as reader_tcp,
        elsewhere.site("holder") as holder,
        tcp.site("holder") as holder_tcp,
    ):
        transports = TransportSet([reader.transport, reader_tcp.transport], connect_timeout_s=5.0)
        offers = [holder.transport.offer(), holder_tcp.transport.offer()]
        peer = await transports.connect(offers)
        assert peer.backend == "tcp"
        await peer.close()
        with pytest.raises(TransferFailed, match="memory: the holder is not in this process"):
            await transports.connect(offers[:1])
        with pytest.raises(TransferFailed, match="no transport in common"):
            await transports.connect([])
