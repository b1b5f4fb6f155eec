"""One answer on its way from the text instance to the caller."""

from collections.abc import Sequence
from uuid import uuid4

from triptych.domain.generation import ChatEvent, ChatFinished, ChoiceFinished, Finished, TextEvent, TokenChunk, Usage
from triptych.errors import InternalError

from .stream_buffer import StreamBuffer
from .tool_calls import Calling, ToolCallStream


class Answer:
    """Passes on what the text instance says, in the caller's terms, and notices when every choice is at its end."""

    def __init__(self, buffer: StreamBuffer, calling: Calling | None, *, choices: int, usage: Usage) -> None:
        """``usage`` is that of the prompt alone."""
        self._buffer = buffer
        self._calls = None if calling is None else ToolCallStream(calling, choices, _new_call_id)
        self._unfinished = set(range(choices))
        self._usage = usage
        self._completion_tokens = 0
        self.streamed_tokens = 0
        self.finish_reason = ""
        """Of the choice that ended last."""

    @property
    def over(self) -> bool:
        return not self._unfinished

    def take(self, events: Sequence[TextEvent]) -> list[Finished]:
        """Pass on what came together; the choices that are at their end with it.

        Raises InternalError for the end of a choice that does not run.
        """
        told: list[ChatEvent] = []
        ended: list[Finished] = []
        for event in events:
            if isinstance(event, TokenChunk):
                self.streamed_tokens += len(event.token_ids)
                if self._calls is None:
                    told.append(event)
                else:
                    told += self._calls.chunk(event)
            elif isinstance(event, Finished):
                ended.append(event)
                told += self._finished(event)
        if told:
            self._buffer.put(told)
        return ended

    def _finished(self, event: Finished) -> list[ChatEvent]:
        if event.choice not in self._unfinished:
            raise InternalError(f"the text instance ended choice {event.choice}, which does not run")
        self._unfinished.remove(event.choice)
        self._completion_tokens += event.completion_tokens
        self.finish_reason = event.reason.value
        told: list[ChatEvent] = [ChoiceFinished(event.reason, event.choice)]
        if self._calls is not None:
            told = self._calls.finished(event)
        if self.over:
            prompt = self._usage
            told.append(ChatFinished(Usage(prompt.prompt_tokens, self._completion_tokens, prompt.image_tokens)))
        return told


def _new_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"
