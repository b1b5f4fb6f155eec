"""Whole answers."""

from dataclasses import dataclass

from triptych.domain.chat import ToolCall
from triptych.domain.generation import FinishReason, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice of an answer to the prompt. ``logprobs`` has an entry per token if requested. ``tool_calls`` and ``reasoning``
    are not in ``text``; ``token_ids`` has the tokens of all three.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """What the model thought before it answered."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of ``n`` choices. ``request_id`` identifies the request's timeline."""

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason of the first choice."""
        return self.choices[0].finish_reason

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Tool calls of the first choice."""
        return self.choices[0].tool_calls

    @property
    def reasoning(self) -> str:
        """Reasoning of the first choice."""
        return self.choices[0].reasoning
