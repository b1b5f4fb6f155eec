"""Wire format of the TCP backend: requests, replies, and the offer's metadata.

    request  (40 bytes)  magic "TRPQ" | tag u32 | lease id (16) | offset u64 | nbytes u64
    reply    (20 bytes)  magic "TRPA" | tag u32 | status u32 | nbytes u64, then nbytes of payload

Little endian. Replies come in the order of the requests on a connection. A lease id of zeros may read only the
probe. Either side drops the connection on any other bytes.
"""

import re
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from struct import error as StructError  # noqa: N812 - the module calls its exception "error"

from triptych.domain.embedding import LEASE_ID_NBYTES, LeaseId
from triptych.domain.instance import TransportOffer
from triptych.errors import TransferFailed
from triptych.policy.transport import TCP
from triptych.transport.arena import PROBE_NBYTES, probed_nbytes

NO_LEASE = bytes(LEASE_ID_NBYTES)
REQUEST = Struct(f"<4sI{LEASE_ID_NBYTES}sQQ")
REPLY = Struct("<4sIIQ")
REQUEST_MAGIC, REPLY_MAGIC = b"TRPQ", b"TRPA"

_VERSION = 1
_OFFER = Struct(f"<B{PROBE_NBYTES}sHB")
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}", re.ASCII)


TLS_HANDSHAKE_S = 10.0


class Status(IntEnum):
    OK = 0
    LEASE_LOST = 1
    OUT_OF_RANGE = 2


@dataclass(frozen=True, slots=True)
class Read:
    """Read of a holder's arena."""

    tag: int
    lease_id: LeaseId
    offset: int
    nbytes: int

    def pack(self) -> bytes:
        return REQUEST.pack(REQUEST_MAGIC, self.tag, self.lease_id, self.offset, self.nbytes)

    @classmethod
    def parse(cls, data: bytes) -> "Read | None":
        """Parse a request; None when ``data``, which has a request's length, is none."""
        magic, tag, lease_id, offset, nbytes = REQUEST.unpack(data)
        return cls(tag, lease_id, offset, nbytes) if magic == REQUEST_MAGIC else None


@dataclass(frozen=True, slots=True)
class TcpOffer:
    """A holder's address and probe."""

    probe: bytes
    host: str
    port: int

    def pack(self) -> bytes:
        return _OFFER.pack(_VERSION, self.probe, self.port, len(self.host)) + self.host.encode()

    @classmethod
    def parse(cls, offer: TransportOffer) -> "TcpOffer":
        """Parse a peer's metadata. Raises TransferFailed when it is malformed."""
        try:
            version, probe, port, host_nbytes = _OFFER.unpack_from(offer.metadata)
            host = offer.metadata[_OFFER.size :].decode("ascii")
        except (StructError, UnicodeDecodeError):
            raise TransferFailed("the holder's TCP offer is malformed") from None
        valid = len(host) == host_nbytes and _HOST.fullmatch(host) is not None and port > 0
        if offer.backend != TCP or version != _VERSION or not valid or probed_nbytes(probe) is None:
            raise TransferFailed("the holder's TCP offer is malformed")
        return cls(probe, host, port)
