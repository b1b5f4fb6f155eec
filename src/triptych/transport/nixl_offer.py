"""The metadata of a NIXL offer, readable where NIXL is not installed."""

from dataclasses import dataclass
from struct import Struct
from struct import error as StructError  # noqa: N812 - the module calls its exception "error"

from triptych.domain.instance import TransportOffer
from triptych.errors import TransferFailed
from triptych.policy.transport import NIXL
from triptych.transport.arena import HEADER_NBYTES, PROBE_NBYTES, probed_nbytes

_VERSION = 2
_HEAD = Struct(f"<BBIh{PROBE_NBYTES}sQH")
_HOST = -1
_MAX_AGENT_NBYTES = 16_384


@dataclass(frozen=True, slots=True)
class NixlOffer:
    """``address`` is the arena's address in the holder's process; ``device`` its CUDA device (None: host memory).

    ``agent`` is NIXL's own metadata of the holder's agent number ``incarnation``.
    """

    rdma: bool
    incarnation: int
    device: int | None
    probe: bytes
    address: int
    agent: bytes

    @property
    def nbytes(self) -> int:
        """Size of the holder's arena."""
        return probed_nbytes(self.probe) or 0

    def pack(self) -> bytes:
        device = _HOST if self.device is None else self.device
        head = (_VERSION, self.rdma, self.incarnation, device, self.probe, self.address, len(self.agent))
        return _HEAD.pack(*head) + self.agent

    @classmethod
    def parse(cls, offer: TransportOffer) -> "NixlOffer":
        """Parse a peer's metadata. Raises TransferFailed when it is malformed."""
        try:
            version, rdma, incarnation, device, probe, address, agent_nbytes = _HEAD.unpack_from(offer.metadata)
        except StructError:
            raise TransferFailed("the holder's NIXL offer is too short") from None
        agent = offer.metadata[_HEAD.size :]
        nbytes = probed_nbytes(probe)
        if (
            offer.backend != NIXL
            or version != _VERSION
            or rdma not in (0, 1)
            or device < _HOST
            or len(agent) != agent_nbytes
            or not 0 < agent_nbytes <= _MAX_AGENT_NBYTES
            or nbytes is None
            or address < HEADER_NBYTES
            or address + nbytes >= 1 << 64
        ):
            raise TransferFailed("the holder's NIXL offer is malformed")
        return cls(bool(rdma), incarnation, None if device == _HOST else device, probe, address, agent)


def offers_rdma(offer: TransportOffer) -> bool:
    """Whether the offering side has RDMA hardware."""
    if offer.backend != NIXL:
        return False
    try:
        return NixlOffer.parse(offer).rdma
    except TransferFailed:
        return False
