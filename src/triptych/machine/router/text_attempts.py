"""A request's attempts at text instances: which one has it, and what the ones before came to."""

from dataclasses import dataclass

from triptych.errors import (
    EngineFailure,
    InstanceLost,
    LeaseLost,
    Overloaded,
    TransferFailed,
    TriptychError,
    Unavailable,
)
from triptych.machine.router.shared_events import Grant


@dataclass(slots=True)
class TextAttempts:
    """A part of ``machine.router.request.RequestMachine``, which alone changes it."""

    most: int
    sent: int = 0
    expired: int = 0
    """Of those, the ones that ended because leases had run out in the text instance's queue."""
    refusals: int = 0
    """Times that there was no instance to send it to."""
    current: Grant | None = None
    """Where the request is; None while it is nowhere."""
    avoid: frozenset[str] = frozenset()
    error: TriptychError | None = None
    """Why the last attempt failed: what the client is told when there is no other text instance."""
    _engine_failed: bool = False

    @property
    def counted(self) -> int:
        """Those that count against ``most``."""
        return self.sent - self.expired

    def has(self, credit: int) -> bool:
        """Whether the call of this credit is the one that the request waits for."""
        return self.current is not None and self.current.credit == credit

    def send(self, grant: Grant) -> None:
        self.current = grant
        self.sent += 1

    def expire(self, error: TriptychError) -> None:
        """It waited at the text instance for longer than a lease lasts: nobody's fault, and fresh leases will do."""
        self.current, self.error = None, error
        self.expired += 1

    def fail(self, error: TriptychError) -> bool:
        """Whether another attempt may follow. ``error`` becomes what the client would be told."""
        retryable = isinstance(error, Unavailable | Overloaded | LeaseLost)
        if isinstance(error, EngineFailure):
            retryable = not self._engine_failed
            self._engine_failed = True
        name = self.current.name if self.current is not None else ""
        if not isinstance(error, TransferFailed | LeaseLost):
            self.avoid |= {name}
        if isinstance(error, Unavailable) and not isinstance(error, TransferFailed):
            instance_id = self.current.instance_id if self.current is not None else ""
            error = InstanceLost(f"text instance {instance_id} was lost while it worked on the request")
        self.current, self.error = None, error
        return retryable and self.counted < self.most
