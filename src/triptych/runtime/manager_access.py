"""Access of a process to the pool managers."""

from dataclasses import dataclass

from triptych.domain.limits import PositiveSeconds, check_limits
from triptych.policy.addresses import why_not_called
from triptych.policy.retrying import pause_s

_MAX_MANAGERS = 8


@dataclass(frozen=True, slots=True)
class ManagerAccess:
    """The pool managers, and when to try again."""

    pool_manager: tuple[str, ...] = ()
    """HOST:PORT of every pool manager. A member registers with all of them; a watcher follows the first that answers."""
    heartbeat_s: PositiveSeconds = 1.0
    """Longest time between two reports of a member."""
    manager_retry_min_s: PositiveSeconds = 0.1
    """First pause before calling a pool manager again; it doubles with each attempt."""
    manager_retry_max_s: PositiveSeconds = 5.0
    """Longest such pause."""
    manager_silence_s: PositiveSeconds = 5.0
    """A watcher that hears nothing of its pool manager for this long tries the next. It sends something every second."""

    def __post_init__(self) -> None:
        check_limits(self, ("manager_retry_min_s", "manager_retry_max_s"))
        if len(self.pool_manager) > _MAX_MANAGERS:
            raise ValueError(f"pool_manager names {len(self.pool_manager)} pool managers, at most {_MAX_MANAGERS}")
        for address in self.pool_manager:
            if (reason := why_not_called(address, beyond_loopback=True)) is not None:
                raise ValueError(f"pool_manager {address!r}: {reason}")
        if twice := sorted({address for address in self.pool_manager if self.pool_manager.count(address) > 1}):
            raise ValueError(f"pool_manager names {', '.join(twice)} twice")

    def pause_s(self, name: str, failures: int) -> float:
        """The pause after so many failures in a row, jittered by ``name``."""
        return pause_s(name, failures, first_s=self.manager_retry_min_s, longest_s=self.manager_retry_max_s)
