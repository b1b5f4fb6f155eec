"""The requests of the text service, and what they add to its load."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.domain.generation import TextRequest
from triptych.domain.stage import Stage
from triptych.policy.queueing import Turn

from .arriving import Arriving
from .handing import Handing
from .keeping import Keeping

PREFILL, DECODE = frozenset({Stage.PREFILL}), frozenset({Stage.DECODE})
BOTH = PREFILL | DECODE


@dataclass(slots=True)
class Job:
    """One request. Its id is unique in this instance, as a caller may send the same request again."""

    job_id: str
    request: TextRequest
    arrived_s: float
    deadline_s: float
    turn: Turn
    """Its position in every queue of this instance."""
    tokens: int
    """Prompt tokens and the most that may be generated here."""
    in_receiver: bool = False
    """The receiver has the tickets and releases their leases."""
    in_engine: bool = False
    """The engine has the request and signals when it no longer needs the embeddings. Set by ``Jobs``."""
    has_begun: bool = False
    """The engine has started the request."""
    has_answered: bool = False
    """There is a first token, so its prompt has been computed. Set by ``Jobs``."""
    arriving: Arriving | None = None
    """Has the tickets of its keys and values, and releases their leases."""
    handing: Handing | None = None
    keeping: Keeping | None = None
    limit: asyncio.Timeout | None = None
    """What ends its present wait in time."""
    has_been_held_up: bool = False
    """It is moved for that once, as it may be held up anywhere."""
    is_leaving: bool = False
    """The instance drains, a stage closes, or items hold it up: it goes on elsewhere if it can."""
    why_leaving: str = ""
    """As in ``Record.handed_over``."""
    is_decoded: bool = False
    """There is a token that the decode stage has computed."""

    @property
    def needs(self) -> frozenset[Stage]:
        """The stages that compute it."""
        if self.request.continued:
            return DECODE
        return PREFILL if self.request.hands_over or self.request.early else BOTH

    def runs_at(self, stage: Stage) -> bool:
        """Whether this stage has something to do for it, or to hand over."""
        over = stage is Stage.PREFILL and self.has_answered and not self.request.hands_over
        return stage in self.needs and not over


class Jobs:
    """Those that are admitted and not over. Its sums are kept, as load is asked for often and many may wait."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self.outside = 0
        """Number of those that the engine does not have yet ..."""
        self.outside_tokens = 0
        """... and their tokens."""
        self.unanswered_tokens = 0
        """Prompt tokens of those without a first token."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def add(self, job: Job) -> None:
        self._jobs[job.job_id] = job
        self._count(job, 1)

    def enters_engine(self, job: Job) -> None:
        self._count(job, -1)
        job.in_engine = True
        self._count(job, 1)

    def answered(self, job: Job) -> None:
        """Its first token is there."""
        self._count(job, -1)
        job.has_answered = True
        self._count(job, 1)

    def over(self, job: Job) -> None:
        """Of one that may not have been admitted."""
        if self._jobs.pop(job.job_id, None) is not None:
            self._count(job, -1)

    def _count(self, job: Job, times: int) -> None:
        if not job.in_engine:
            self.outside += times
            self.outside_tokens += times * job.tokens
        if not job.has_answered:
            self.unanswered_tokens += times * len(job.request.token_ids)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is violated."""
        outside = [job.tokens for job in self if not job.in_engine]
        assert (self.outside, self.outside_tokens) == (len(outside), sum(outside)), "jobs do not add up"  # noqa: S101 - invariant
        prompts = sum(len(job.request.token_ids) for job in self if not job.has_answered)
        assert self.unanswered_tokens == prompts, "prompts do not add up"  # noqa: S101 - invariant
