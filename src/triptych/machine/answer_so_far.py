"""Part of an answer that a caller of routers keeps, to go on with it at another router (docs/adr/0036)."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

from triptych.domain.chat import ChatRequest
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.generation import ChatEvent, ChatFinished, ChoiceFinished, TokenChunk
from triptych.domain.sampling import SamplingParams
from triptych.errors import InternalError


class AnswerSoFar:
    """Owner of the ids of the tokens that were passed on: 4 bytes each, by choice that has not ended."""

    def __init__(self, request: ChatRequest, sampling: SamplingParams) -> None:
        """``sampling`` is the request's with a seed, as every router must draw alike."""
        self._request = request
        self._sampling = sampling
        self._running = {choice: array("I") for choice in range(request.sampling.n)}
        self._ended_tokens = 0
        """Tokens of the choices that have ended."""
        self._left_out_tokens = 0
        """Tokens of choices that had ended when the request was last sent: its router does not know them."""
        self.is_complete = False

    @property
    def begun(self) -> bool:
        """Whether some of it was passed on."""
        return len(self._running) < self._request.sampling.n or any(self._running.values())

    @property
    def may_go_on(self) -> bool:
        return bool(self._running)

    def rest(self, timeout_s: float) -> ChatRequest:
        """The request of what is missing."""
        self._left_out_tokens = self._ended_tokens
        continued: tuple[ContinuedChoice, ...] = ()
        if self.begun:
            continued = tuple(ContinuedChoice(choice, tuple(ids)) for choice, ids in self._running.items())
        return replace(self._request, sampling=self._sampling, timeout_s=timeout_s, continued=continued)

    def take(self, events: Sequence[ChatEvent]) -> Sequence[ChatEvent]:
        """Events of the router, as they are passed on: with the usage of the whole answer.

        Raises InternalError for tokens or the end of a choice that is not running.
        """
        try:
            for event in events:
                match event:
                    case TokenChunk(token_ids, _, choice):
                        self._running[choice].extend(token_ids)
                    case ChoiceFinished(_, choice):
                        self._ended_tokens += len(self._running.pop(choice))
                    case ChatFinished():
                        self.is_complete = True
        except KeyError as unknown:
            raise InternalError(f"the router sent choice {unknown.args[0]}, which is not running") from None
        if not (self.is_complete and self._left_out_tokens):
            return events
        return [self._whole(event) if isinstance(event, ChatFinished) else event for event in events]

    def _whole(self, finished: ChatFinished) -> ChatFinished:
        usage = finished.usage
        return ChatFinished(replace(usage, completion_tokens=usage.completion_tokens + self._left_out_tokens))
