"""What is said to the router, and by it: conversations, the events of an answer, timelines."""

from collections.abc import Mapping, Sequence

from triptych import errors
from triptych.domain.chat import ChatRequest, MediaPart, Message, Part, SpeakerRole, TextPart, ToolCall, ToolChoice
from triptych.domain.generation import (
    ChatEvent,
    ChatFinished,
    ChoiceFinished,
    TokenChunk,
    ToolCallMade,
    Usage,
)
from triptych.domain.timeline import ItemTimeline, Outcome, Readiness, Timeline
from triptych.v1 import router_pb2
from triptych.wire.checks import checked_salt, from_enum
from triptych.wire.common import (
    FINISH_REASON,
    MODALITY,
    chunk_from_wire,
    chunk_to_wire,
    sampling_from_wire,
    sampling_to_wire,
)

_SPEAKER: Mapping[SpeakerRole, router_pb2.SpeakerRole] = {
    "system": router_pb2.SPEAKER_ROLE_SYSTEM,
    "user": router_pb2.SPEAKER_ROLE_USER,
    "assistant": router_pb2.SPEAKER_ROLE_ASSISTANT,
    "tool": router_pb2.SPEAKER_ROLE_TOOL,
}
_OUTCOME: Mapping[Outcome, router_pb2.Outcome] = {
    Outcome.RUNNING: router_pb2.OUTCOME_RUNNING,
    Outcome.DONE: router_pb2.OUTCOME_DONE,
    Outcome.FAILED: router_pb2.OUTCOME_FAILED,
    Outcome.CANCELLED: router_pb2.OUTCOME_CANCELLED,
}


def _write_part(part: Part, into: router_pb2.Part) -> None:
    match part:
        case TextPart():
            into.text = part.text
        case MediaPart():
            into.media.modality = MODALITY[part.modality]
            into.media.data = part.data


def _part_from_wire(message: router_pb2.Part) -> Part:
    match message.WhichOneof("part"):
        case "text":
            return TextPart(message.text)
        case "media":
            return MediaPart(from_enum(MODALITY, message.media.modality, "media.modality"), message.media.data)
        case _:
            raise errors.InvalidRequest("a content part is neither text nor media", param="messages")


def _write_message(message: Message, into: router_pb2.Message) -> None:
    into.role = _SPEAKER[message.role]
    into.tool_calls.extend(_tool_call_to_wire(call) for call in message.tool_calls)
    into.tool_call_id = message.tool_call_id
    for part in message.parts:
        _write_part(part, into.parts.add())


def _message_from_wire(message: router_pb2.Message) -> Message:
    return Message(
        role=from_enum(_SPEAKER, message.role, "messages.role"),
        parts=tuple(_part_from_wire(part) for part in message.parts),
        tool_calls=tuple(_tool_call_from_wire(call) for call in message.tool_calls),
        tool_call_id=message.tool_call_id,
    )


def _tool_call_to_wire(call: ToolCall) -> router_pb2.ToolCall:
    return router_pb2.ToolCall(call_id=call.call_id, name=call.name, arguments=call.arguments)


def _tool_call_from_wire(message: router_pb2.ToolCall) -> ToolCall:
    return ToolCall(message.call_id, message.name, message.arguments)


def _tool_choice_to_wire(choice: ToolChoice) -> router_pb2.ToolChoice | None:
    if choice == ToolChoice():
        return None
    return router_pb2.ToolChoice(required=choice.required, name=choice.name, one_call=not choice.parallel)


def _tool_choice_from_wire(message: router_pb2.ToolChoice) -> ToolChoice:
    return ToolChoice(message.required, message.name, not message.one_call)


def chat_request_to_wire(request: ChatRequest) -> router_pb2.ChatRequest:
    """Items are written where they belong: a message that is put into another is copied, at each level once more."""
    written = router_pb2.ChatRequest(
        request_id=request.request_id,
        model=request.model,
        sampling=sampling_to_wire(request.sampling),
        tenant_salt=request.tenant_salt,
        prompt=request.prompt,
        tools=request.tools,
        priority=request.priority,
        tool_choice=_tool_choice_to_wire(request.tool_choice),
    )
    for message in request.messages:
        _write_message(message, written.messages.add())
    return written


def chat_request_from_wire(message: router_pb2.ChatRequest, timeout_s: float) -> ChatRequest:
    return ChatRequest(
        request_id=message.request_id,
        model=message.model,
        messages=tuple(_message_from_wire(entry) for entry in message.messages),
        sampling=sampling_from_wire(message.sampling),
        timeout_s=timeout_s,
        tenant_salt=checked_salt(message.tenant_salt),
        prompt=message.prompt if message.HasField("prompt") else None,
        tools=message.tools,
        priority=message.priority,
        tool_choice=_tool_choice_from_wire(message.tool_choice),
    )


def chat_events_to_wire(events: Sequence[ChatEvent]) -> router_pb2.ChatEvents:
    return router_pb2.ChatEvents(events=map(_event_to_wire, events))


def chat_events_from_wire(message: router_pb2.ChatEvents) -> tuple[ChatEvent, ...]:
    """Raises InternalError for an event of an unknown kind."""
    return tuple(map(_event_from_wire, message.events))


def _event_to_wire(event: ChatEvent) -> router_pb2.ChatEvent:
    match event:
        case TokenChunk():
            return router_pb2.ChatEvent(chunk=chunk_to_wire(event))
        case ToolCallMade():
            made = router_pb2.ToolCallMade(call=_tool_call_to_wire(event.call), index=event.index, choice=event.choice)
            return router_pb2.ChatEvent(tool_call=made)
        case ChoiceFinished():
            finished = router_pb2.ChoiceFinished(reason=FINISH_REASON[event.reason], choice=event.choice)
            return router_pb2.ChatEvent(choice_finished=finished)
        case ChatFinished():
            usage = router_pb2.Usage(
                prompt_tokens=event.usage.prompt_tokens,
                completion_tokens=event.usage.completion_tokens,
                image_tokens=event.usage.image_tokens,
            )
            return router_pb2.ChatEvent(finished=router_pb2.ChatFinished(usage=usage))


def _event_from_wire(message: router_pb2.ChatEvent) -> ChatEvent:
    match message.WhichOneof("event"):
        case "chunk":
            return chunk_from_wire(message.chunk)
        case "tool_call":
            made = message.tool_call
            return ToolCallMade(_tool_call_from_wire(made.call), made.index, made.choice)
        case "choice_finished":
            choice = message.choice_finished
            return ChoiceFinished(from_enum(FINISH_REASON, choice.reason, "choice_finished.reason"), choice.choice)
        case "finished":
            usage = message.finished.usage
            return ChatFinished(Usage(usage.prompt_tokens, usage.completion_tokens, usage.image_tokens))
        case _:
            raise errors.InternalError("the router sent an event of an unknown kind")


_ITEM_FIELDS = tuple(ItemTimeline.__dataclass_fields__)
_TIMELINE_FIELDS = tuple(name for name in Timeline.__dataclass_fields__ if name not in {"items", "outcome"})
"""Named alike on both sides, so they are carried over by name; a test holds the two to each other."""


def timeline_to_wire(timeline: Timeline) -> router_pb2.Timeline:
    message = router_pb2.Timeline(
        outcome=_OUTCOME[timeline.outcome],
        items=[
            router_pb2.ItemTimeline(**{name: getattr(item, name) for name in _ITEM_FIELDS}) for item in timeline.items
        ],
    )
    for name in _TIMELINE_FIELDS:
        setattr(message, name, getattr(timeline, name))
    return message


def timeline_from_wire(message: router_pb2.Timeline) -> Timeline:
    return Timeline(
        outcome=from_enum(_OUTCOME, message.outcome, "outcome"),
        items=tuple(ItemTimeline(**{name: getattr(item, name) for name in _ITEM_FIELDS}) for item in message.items),
        **{name: getattr(message, name) for name in _TIMELINE_FIELDS},
    )


def readiness_to_wire(readiness: Readiness) -> router_pb2.ReadinessResponse:
    return router_pb2.ReadinessResponse(ready=readiness.ready, missing=readiness.missing, instances=readiness.instances)


def readiness_from_wire(message: router_pb2.ReadinessResponse) -> Readiness:
    return Readiness(message.ready, tuple(message.missing), tuple(message.instances))
