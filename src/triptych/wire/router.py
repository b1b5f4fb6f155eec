"""Conversion of the router's requests, events and answers."""

from collections.abc import Sequence
from typing import get_args

from triptych import errors
from triptych.domain.chat import (
    ANY_TOOL,
    ChatRequest,
    MediaPart,
    Message,
    Part,
    SpeakerRole,
    TextPart,
    Tokenized,
    ToolCall,
    ToolChoice,
)
from triptych.domain.generation import (
    ChatFinished,
    ChoiceFinished,
    FieldsIgnored,
    Reasoned,
    ToolArguments,
    ToolCallMade,
    Usage,
)
from triptych.domain.media import Modality
from triptych.domain.resolving import ResolvedItem, ResolveRequest
from triptych.domain.tenant import Tenant
from triptych.domain.timeline import ItemTimeline, Readiness, Timeline
from triptych.v1 import common_pb2, router_pb2
from triptych.wire.common import CHUNK, CONTINUED, SAMPLING, TICKET, check_ticket
from triptych.wire.flat import EnumPair, Pair, Variants

TOKENIZED = Pair(Tokenized, router_pb2.TokenizeResponse)
TIMELINE = Pair(Timeline, router_pb2.Timeline, nested=(Pair(ItemTimeline, router_pb2.ItemTimeline),))
READINESS = Pair(Readiness, router_pb2.ReadinessResponse)

_MODALITY = EnumPair.of(Modality.__members__, common_pb2.Modality.DESCRIPTOR)
_SPEAKER = EnumPair.of({role.upper(): role for role in get_args(SpeakerRole)}, router_pb2.SpeakerRole.DESCRIPTOR)
_TOOL_CALL = Pair(ToolCall, router_pb2.ToolCall)
_EVENT = Variants(
    router_pb2.ChatEvent,
    "event",
    {
        "chunk": CHUNK,
        "choice_finished": Pair(ChoiceFinished, router_pb2.ChoiceFinished),
        "finished": Pair(ChatFinished, router_pb2.ChatFinished, nested=(Pair(Usage, router_pb2.Usage),)),
        "tool_call": Pair(ToolCallMade, router_pb2.ToolCallMade, nested=(_TOOL_CALL,)),
        "reasoned": Pair(Reasoned, router_pb2.Reasoned),
        "arguments": Pair(ToolArguments, router_pb2.ToolArguments),
        "ignored": Pair(FieldsIgnored, router_pb2.FieldsIgnored),
    },
)


def _write_media(part: MediaPart, into: router_pb2.MediaPart) -> None:
    into.modality = _MODALITY.to_wire[part.modality]
    into.data = part.data


def _media_from_wire(message: router_pb2.MediaPart) -> MediaPart:
    return MediaPart(_MODALITY.from_wire[message.modality], message.data)


def _write_message(message: Message, into: router_pb2.Message) -> None:
    into.role = _SPEAKER.to_wire[message.role]
    into.tool_calls.extend(map(_TOOL_CALL.to_wire, message.tool_calls))
    into.tool_call_id = message.tool_call_id
    into.reasoning = message.reasoning
    for part in message.parts:
        written = into.parts.add()
        match part:
            case TextPart():
                written.text = part.text
            case MediaPart():
                _write_media(part, written.media)


def _part_from_wire(message: router_pb2.Part) -> Part:
    match message.WhichOneof("part"):
        case "text":
            return TextPart(message.text)
        case "media":
            return _media_from_wire(message.media)
        case _:
            raise errors.InvalidRequest("a content part is neither text nor media", param="messages")


def _message_from_wire(message: router_pb2.Message) -> Message:
    return Message(
        _SPEAKER.from_wire[message.role],
        tuple(map(_part_from_wire, message.parts)),
        tuple(map(_TOOL_CALL.from_wire, message.tool_calls)),
        message.tool_call_id,
        message.reasoning,
    )


def _tool_choice_to_wire(request: ChatRequest) -> router_pb2.ToolChoice | None:
    choice = request.tool_choice
    if choice == ANY_TOOL:
        return None
    return router_pb2.ToolChoice(required=choice.required, name=choice.name, one_call=not choice.parallel)


def _tool_choice_from_wire(message: router_pb2.ChatRequest) -> ToolChoice:
    if not message.HasField("tool_choice"):
        return ANY_TOOL
    choice = message.tool_choice
    return ToolChoice(choice.required, choice.name, not choice.one_call)


_CHAT = Pair(
    ChatRequest,
    router_pb2.ChatRequest,
    nested=(SAMPLING, CONTINUED, Pair(Tenant, router_pb2.Tenant)),
    given=("timeout_s",),
    special={
        "messages": (lambda _: (), lambda message: tuple(map(_message_from_wire, message.messages))),
        "tool_choice": (_tool_choice_to_wire, _tool_choice_from_wire),
    },
)


def chat_request_to_wire(request: ChatRequest) -> router_pb2.ChatRequest:
    """Media is written in place, because protobuf copies a message when it is added to another."""
    written = _CHAT.to_wire(request)
    for message in request.messages:
        _write_message(message, written.messages.add())
    return written


def chat_request_from_wire(message: router_pb2.ChatRequest, timeout_s: float) -> ChatRequest:
    return _CHAT.from_wire(message, timeout_s)


chat_events_to_wire, chat_events_from_wire = _EVENT.several(router_pb2.ChatEvents, "events")
"""The latter raises InternalError for an unknown event."""

_RESOLVE = Pair(
    ResolveRequest,
    router_pb2.ResolveRequest,
    given=("timeout_s",),
    special={"media": (lambda _: (), lambda message: tuple(map(_media_from_wire, message.media)))},
)
_RESOLVED = Pair(ResolvedItem, router_pb2.ResolvedItem, nested=(TICKET,))


def resolve_request_to_wire(request: ResolveRequest) -> router_pb2.ResolveRequest:
    """Media is written in place, as in ``chat_request_to_wire``."""
    written = _RESOLVE.to_wire(request)
    for part in request.media:
        _write_media(part, written.media.add())
    return written


def resolve_request_from_wire(message: router_pb2.ResolveRequest, timeout_s: float) -> ResolveRequest:
    return _RESOLVE.from_wire(message, timeout_s)


def resolved_to_wire(items: Sequence[ResolvedItem]) -> router_pb2.ResolveResponse:
    return router_pb2.ResolveResponse(items=map(_RESOLVED.to_wire, items))


def resolved_from_wire(message: router_pb2.ResolveResponse) -> tuple[ResolvedItem, ...]:
    """Raises InvalidRequest for an invalid ticket."""
    for item in message.items:
        check_ticket(item.ticket)
    return tuple(map(_RESOLVED.from_wire, message.items))
