"""One answer on its way from the text instance to the caller."""

from uuid import uuid4

from triptych.domain.generation import ChatFinished, Finished, TokenChunk, Usage
from triptych.errors import InternalError

from .stream_buffer import StreamBuffer
from .tool_calls import Calling, ToolCallStream


class Answer:
    """Passes on what the text instance says, in the caller's terms, and notices when every choice is at its end."""

    def __init__(self, buffer: StreamBuffer, calling: Calling | None, *, choices: int, usage: Usage) -> None:
        """``usage`` is that of the prompt alone."""
        self._buffer = buffer
        self._calls = ToolCallStream(calling, choices, _new_call_id)
        self._unfinished = set(range(choices))
        self._usage = usage
        self._completion_tokens = 0
        self.streamed_tokens = 0
        self.finish_reason = ""
        """Of the choice that ended last."""

    @property
    def over(self) -> bool:
        return not self._unfinished

    def chunk(self, event: TokenChunk) -> None:
        self.streamed_tokens += len(event.token_ids)
        for told in self._calls.chunk(event):
            self._buffer.put(told)

    def finished(self, event: Finished) -> None:
        """Raises InternalError for the end of a choice that does not run."""
        if event.choice not in self._unfinished:
            raise InternalError(f"the text instance ended choice {event.choice}, which does not run")
        self._unfinished.remove(event.choice)
        self._completion_tokens += event.completion_tokens
        self.finish_reason = event.reason.value
        for told in self._calls.finished(event):
            self._buffer.put(told)
        if self.over:
            prompt = self._usage
            self._buffer.put(ChatFinished(Usage(prompt.prompt_tokens, self._completion_tokens, prompt.image_tokens)))


def _new_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"
