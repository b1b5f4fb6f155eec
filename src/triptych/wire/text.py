"""What is said to a text instance, and by it."""

from collections.abc import Sequence

from triptych import errors
from triptych.domain.generation import (
    Finished,
    Placement,
    PullReport,
    Ready,
    TextEvent,
    TextRequest,
    TokenChunk,
)
from triptych.domain.instance import TextLoad
from triptych.v1 import text_pb2
from triptych.wire.checks import checked_salt, from_enum
from triptych.wire.common import (
    FINISH_REASON,
    chunk_from_wire,
    chunk_to_wire,
    sampling_from_wire,
    sampling_to_wire,
    ticket_from_wire,
    ticket_to_wire,
)


def text_request_to_wire(request: TextRequest) -> text_pb2.TextRequest:
    return text_pb2.TextRequest(
        request_id=request.request_id,
        model=request.model,
        token_ids=request.token_ids,
        placements=[
            text_pb2.Placement(
                item=place.item, start=place.start, ticket=ticket_to_wire(place.ticket), continues=place.continues
            )
            for place in request.placements
        ],
        sampling=sampling_to_wire(request.sampling),
        priority=request.priority,
        tenant_salt=request.tenant_salt,
    )


def text_request_from_wire(message: text_pb2.TextRequest, timeout_s: float) -> TextRequest:
    return TextRequest(
        request_id=message.request_id,
        model=message.model,
        token_ids=tuple(message.token_ids),
        placements=tuple(
            Placement(place.item, place.start, ticket_from_wire(place.ticket), place.continues)
            for place in message.placements
        ),
        sampling=sampling_from_wire(message.sampling),
        timeout_s=timeout_s,
        priority=message.priority,
        tenant_salt=checked_salt(message.tenant_salt),
    )


def text_events_to_wire(events: Sequence[TextEvent]) -> text_pb2.TextEvents:
    return text_pb2.TextEvents(events=map(_event_to_wire, events))


def text_events_from_wire(message: text_pb2.TextEvents) -> tuple[TextEvent, ...]:
    """Raises InternalError for an event of an unknown kind."""
    return tuple(map(_event_from_wire, message.events))


def _event_to_wire(event: TextEvent) -> text_pb2.TextEvent:
    match event:
        case TokenChunk():
            return text_pb2.TextEvent(chunk=chunk_to_wire(event))
        case Ready():
            pulls = [
                text_pb2.PullReport(
                    item=pull.item,
                    backend=pull.backend,
                    nbytes=pull.nbytes,
                    duration_s=pull.duration_s,
                    cached=pull.cached,
                )
                for pull in event.pulls
            ]
            return text_pb2.TextEvent(ready=text_pb2.Ready(pulls=pulls, queue_s=event.queue_s, pull_s=event.pull_s))
        case Finished():
            return text_pb2.TextEvent(
                finished=text_pb2.Finished(
                    reason=FINISH_REASON[event.reason],
                    completion_tokens=event.completion_tokens,
                    prefill_s=event.prefill_s,
                    decode_s=event.decode_s,
                    choice=event.choice,
                )
            )


def _event_from_wire(message: text_pb2.TextEvent) -> TextEvent:
    match message.WhichOneof("event"):
        case "chunk":
            return chunk_from_wire(message.chunk)
        case "ready":
            pulls = (
                PullReport(pull.item, pull.backend, pull.nbytes, pull.duration_s, pull.cached)
                for pull in message.ready.pulls
            )
            return Ready(tuple(pulls), message.ready.queue_s, message.ready.pull_s)
        case "finished":
            done = message.finished
            reason = from_enum(FINISH_REASON, done.reason, "finished.reason")
            return Finished(reason, done.completion_tokens, done.prefill_s, done.decode_s, done.choice)
        case _:
            raise errors.InternalError("the text instance sent an event of an unknown kind")


def text_load_to_wire(load: TextLoad) -> text_pb2.TextLoad:
    return text_pb2.TextLoad(
        pending_tokens=load.pending_tokens,
        waiting_requests=load.waiting_requests,
        running_requests=load.running_requests,
        draining=load.draining,
    )


def text_load_from_wire(message: text_pb2.TextLoad) -> TextLoad:
    return TextLoad(message.pending_tokens, message.waiting_requests, message.running_requests, message.draining)
