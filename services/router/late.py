"""Refuses what would be late, with a Retry-After that is kept (docs/adr/0035, docs/adr/0040)."""

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

    def check(self, request: ChatRequest, *, left_s: float, wait_s: float, service_s: float, prepared: bool) -> None:
        """Raise Overloaded if a request cannot be answered before its deadline, by its predicted wait and service.

        It is called before and after a request is prepared; what has passed the first leaves others what they were promised.
        """
        if not wait_s:
            return
        now_s, tenant, content = self._clock(), request.tenant or NOBODY, _content(request)
        is_due = self._promises.is_due(content, now_s)
        promised_s = (
            0.0 if is_due or prepared else self._promises.ahead_s(tenant.name, max(0.0, left_s - service_s), now_s)
        )
        try:
            self._deadlines(left_s=left_s, wait_s=wait_s, service_s=service_s, promised_s=promised_s)
        except Overloaded as error:
            if is_due:
                self._promises.take(content)
            error.retry_after_s = self._promises.promise(
                tenant.name,
                content,
                after_s=error.retry_after_s or 0.0,
                takes_s=self._attainment.takes_s(request),
                now_s=now_s,
            )
            raise
        if is_due and prepared:
            self._promises.take(content)

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        self._promises.validate()


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
    tenant = request.tenant or NOBODY
    return hash((tenant.name, request.prompt, parts, request.sampling.max_tokens, request.sampling.n))
