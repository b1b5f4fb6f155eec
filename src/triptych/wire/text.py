"""Conversion of a text instance's requests and events."""

from collections.abc import Sequence

from triptych.domain.generation import Finished, Placement, PullReport, Ready, TextEvent, TextRequest
from triptych.v1 import text_pb2
from triptych.wire.common import CHUNK, CONTINUED, SAMPLING, TICKET
from triptych.wire.flat import Pair, Variants

TEXT_REQUEST = Pair(
    TextRequest,
    text_pb2.TextRequest,
    nested=(
        Pair(Placement, text_pb2.Placement, nested=(TICKET,)),
        SAMPLING,
        CONTINUED,
    ),
    given=("timeout_s",),
)
_READY = Pair(Ready, text_pb2.Ready, nested=(Pair(PullReport, text_pb2.PullReport),))
_EVENT = Variants(
    text_pb2.TextEvent, "event", {"chunk": CHUNK, "ready": _READY, "finished": Pair(Finished, text_pb2.Finished)}
)


def text_events_to_wire(events: Sequence[TextEvent]) -> text_pb2.TextEvents:
    return text_pb2.TextEvents(events=map(_EVENT.to_wire, events))


def text_events_from_wire(message: text_pb2.TextEvents) -> tuple[TextEvent, ...]:
    """Raises InternalError for an unknown event."""
    return tuple(map(_EVENT.from_wire, message.events))
