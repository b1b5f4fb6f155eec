"""Conversion of an encoder's requests and results."""

from triptych.domain.embedding import Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.v1 import encoder_pb2
from triptych.wire.common import MEDIA_INFO, POSITION, SHARD, TICKET, check_ticket
from triptych.wire.flat import Pair

ENCODE_REQUEST = Pair(
    EncodeRequest, encoder_pb2.EncodeRequest, nested=(MEDIA_INFO, SHARD, POSITION), given=("timeout_s",)
)
ENCODE_RESULT = Pair(EncodeResult, encoder_pb2.EncodeResponse, nested=(TICKET,))
LEASE_REQUEST = Pair(
    LeaseRequest,
    encoder_pb2.LeaseRequest,
    special={"generation": (lambda request: request.generation or 0, lambda message: message.generation or None)},
    given=("timeout_s",),
)


def encode_result_from_wire(message: encoder_pb2.EncodeResponse) -> EncodeResult:
    """Raises InvalidRequest for an invalid ticket."""
    check_ticket(message.ticket)
    return ENCODE_RESULT.from_wire(message)


def lease_response_from_wire(message: encoder_pb2.LeaseResponse) -> Ticket:
    """Raises InvalidRequest for an invalid ticket."""
    check_ticket(message.ticket)
    return TICKET.from_wire(message.ticket)
