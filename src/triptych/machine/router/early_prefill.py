"""The early prefill of one request: the text instance that computes beginnings of its prompt (docs/adr/0043); or that keeps a place
for it, as it was moved there (docs/adr/0047).
"""

from dataclasses import dataclass

from triptych.machine.router.request_events import Abort, RequestEffect
from triptych.machine.router.shared_events import Grant, Release


@dataclass(slots=True)
class EarlyPrefill:
    """Part of ``machine.router.request.RequestMachine``, which alone changes it."""

    grant: Grant | None = None
    """The request's place at the instance, until the request itself is sent."""
    running: bool = False
    """There is a call for a beginning."""
    tokens: int = 0
    """Of the beginning that was sent last."""
    failed: bool = False
    """Not tried again: the request is sent as a whole."""

    def has(self, credit: int) -> bool:
        return self.grant is not None and self.grant.credit == credit

    @property
    def kept_credit(self) -> int | None:
        return None if self.grant is None else self.grant.credit

    def stop(self, reason: str) -> list[RequestEffect]:
        """The request itself is about to be sent. What was computed is found there."""
        effects: list[RequestEffect] = []
        if self.grant is not None and self.running:
            effects.append(Abort(self.grant.credit, reason))
        self.grant, self.running = None, False
        return effects

    def give_up(self, reason: str) -> list[RequestEffect]:
        """Return the place too."""
        grant = self.grant
        effects = self.stop(reason)
        self.tokens = 0
        return effects if grant is None else [*effects, Release(grant.name, grant.credit, (), reason)]
