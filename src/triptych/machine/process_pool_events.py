"""Events and effects of ``machine.process_pools``. Pools and processes go by name."""

from dataclasses import dataclass

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Adopt:
    """Processes that run already join a pool; its wanted size becomes their number."""

    pool: str
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetSize:
    """The wanted size of a pool, ordered under a fencing token."""

    pool: str
    size: int
    token: int


@dataclass(frozen=True, slots=True)
class Remove:
    """Stop one process, ordered under a fencing token. The wanted size stays as it is."""

    pool: str
    process: str
    token: int


@dataclass(frozen=True, slots=True)
class SetDegree:
    """The tensor-parallel degree of processes that are new from now on, ordered under a fencing token."""

    pool: str
    degree: int
    token: int


@dataclass(frozen=True, slots=True)
class ProcessReady:
    """A started process has become ready."""

    process: str


@dataclass(frozen=True, slots=True)
class ProcessAnswered:
    """A running process has done what it is for at least once."""

    process: str


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """A started process has ended, or could not be started."""

    process: str
    reason: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time has passed: effects may be due (``ProcessPools.due_s``)."""


Event = Adopt | SetSize | Remove | SetDegree | ProcessReady | ProcessAnswered | ProcessEnded | TimePassed

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start it, for the first time or again. Answered by ProcessReady or ProcessEnded."""

    pool: str
    process: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopProcess:
    """Ask it to finish what runs and to end. Answered by ProcessEnded."""

    process: str
    reason: str


@dataclass(frozen=True, slots=True)
class KillProcess:
    """End it at once. Answered by ProcessEnded."""

    process: str
    reason: str


@dataclass(frozen=True, slots=True)
class GaveUp:
    """End of all attempts to start one process of the pool, or all of them, until a size is declared again."""

    pool: str
    reason: str


Effect = StartProcess | StopProcess | KillProcess | GaveUp
