"""What stands in a NIXL offer's metadata; apart from the backend, so that it can be read where NIXL is not installed."""

from dataclasses import dataclass
from struct import Struct
from struct import error as StructError  # noqa: N812 - the module calls its exception "error"

from triptych.domain.instance import TransportOffer
from triptych.errors import TransferFailed
from triptych.policy.transport import NIXL
from triptych.transport.arena import HEADER_NBYTES, PROBE_NBYTES, probed_nbytes

_VERSION = 1
_HEAD = Struct(f"<BB{PROBE_NBYTES}sQH")
_MAX_AGENT_NBYTES = 16_384


@dataclass(frozen=True, slots=True)
class NixlOffer:
    """``address`` is of the arena's first byte in the holder's process; ``agent`` is NIXL's own metadata."""

    rdma: bool
    probe: bytes
    address: int
    agent: bytes

    @property
    def nbytes(self) -> int:
        """Size of the holder's arena."""
        return probed_nbytes(self.probe) or 0

    def pack(self) -> bytes:
        return _HEAD.pack(_VERSION, self.rdma, self.probe, self.address, len(self.agent)) + self.agent

    @classmethod
    def parse(cls, offer: TransportOffer) -> "NixlOffer":
        """Raises TransferFailed for anything but well-formed metadata: it comes from a peer."""
        try:
            version, rdma, probe, address, agent_nbytes = _HEAD.unpack_from(offer.metadata)
        except StructError:
            raise TransferFailed("the holder's NIXL offer is too short") from None
        agent = offer.metadata[_HEAD.size :]
        nbytes = probed_nbytes(probe)
        if (
            offer.backend != NIXL
            or version != _VERSION
            or rdma not in (0, 1)
            or len(agent) != agent_nbytes
            or not 0 < agent_nbytes <= _MAX_AGENT_NBYTES
            or nbytes is None
            or address < HEADER_NBYTES
            or address + nbytes >= 1 << 64
        ):
            raise TransferFailed("the holder's NIXL offer is malformed")
        return cls(bool(rdma), probe, address, agent)


def offers_rdma(offer: TransportOffer) -> bool:
    """Whether an offer says that its side has RDMA hardware."""
    if offer.backend != NIXL:
        return False
    try:
        return NixlOffer.parse(offer).rdma
    except TransferFailed:
        return False
