"""Refuses what would be late, with a Retry-After that is kept (docs/adr/0035, docs/adr/0040)."""

from collections.abc import Callable

from triptych.domain.chat import ChatRequest, MediaPart
from triptych.domain.tenant import NOBODY
from triptych.errors import Overloaded
from triptych.machine.router.promises import Promises
from triptych.policy.policies import Deadlines
from triptych.ports import Clock

from .attainment import Attainment

_SAMPLE = 64
"""Bytes at the beginning, in the middle and at the end of an item that tell it from others."""


class LateRefusals:
    """Owner of the router's ``Promises``."""

    def __init__(self, deadlines: Deadlines, attainment: Attainment, clock: Clock) -> None:
        self._deadlines = deadlines
        self._attainment = attainment
        self._clock = clock
        self._promises = Promises()

    def check(
        self, request: Callable[[], ChatRequest], *, left_s: float, wait_s: float, service_s: float, prepared: bool
    ) -> None:
        """Raise Overloaded if a request that has to wait cannot be answered before its deadline, by its predicted wait and service.

        It is called before and after a request is prepared; what has passed the first leaves others what they were promised.
        ``request`` is called only if the request is refused, or something has been promised.
        """
        now_s, is_due, promised_s = self._clock(), False, 0.0
        if self._promises.has_given:
            known = request()
            is_due = self._promises.is_due(_content(known), now_s)
            if not (is_due or prepared):
                promised_s = self._promises.ahead_s(_tenant(known), max(0.0, left_s - service_s), now_s)
        try:
            self._deadlines(left_s=left_s, wait_s=wait_s, service_s=service_s, promised_s=promised_s)
        except Overloaded as error:
            refused = request()
            if is_due:
                self._promises.take(_content(refused))
            error.retry_after_s = self._promises.promise(
                _tenant(refused),
                _content(refused),
                after_s=error.retry_after_s or 0.0,
                takes_s=self._attainment.takes_s(refused),
                now_s=now_s,
            )
            raise
        if is_due and prepared:
            self._promises.take(_content(request()))

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        self._promises.validate()


def _tenant(request: ChatRequest) -> str:
    return (request.tenant or NOBODY).name


def _content(request: ChatRequest) -> int:
    """Equal for a request that is sent again. Of another's request it is not more than a place at another time."""
    parts = tuple(
        (
            part.modality,
            len(part.data),
            part.data[:_SAMPLE],
            part.data[len(part.data) // 2 :][:_SAMPLE],
            part.data[-_SAMPLE:],
        )
        if isinstance(part, MediaPart)
        else part
        for message in request.messages
        for part in message.parts
    )
    return hash(
        (
            _tenant(request),
            request.prompt,
            request.prompt_tokens,
            parts,
            request.sampling.max_tokens,
            request.sampling.n,
        )
    )
