"""The requests of the text service, and what they add to its load."""

from collections.abc import Iterator
from dataclasses import dataclass

from triptych.domain.generation import TextRequest
from triptych.domain.queue_position import QueuePosition
from triptych.domain.stage import Stage

from .departure import Departure
from .open_stages import BOTH, DECODE, PREFILL


@dataclass(slots=True)
class Job:
    """A request as the instance knows it. Its id is unique in this instance, as a caller may send the same request again."""

    job_id: str
    request: TextRequest
    arrived_s: float
    deadline_s: float
    queue_position: QueuePosition
    """The job's position in every queue of this instance."""
    departure: Departure
    tokens: int
    """Prompt tokens and the most that may be generated here."""
    in_engine: bool = False
    """The engine has the request and signals when it no longer needs the embeddings. Set by ``Jobs``."""
    has_begun: bool = False
    """The engine has started the request."""
    has_answered: bool = False
    """Whether there is a first token, so that the prompt has been computed. Set by ``Jobs``."""
    is_decoded: bool = False
    """Whether there is a token that the decode stage has computed."""

    @property
    def needs(self) -> frozenset[Stage]:
        """The stages that compute it."""
        if self.request.continued:
            return DECODE
        return PREFILL if self.request.transfers_kv or self.request.early else BOTH

    def runs_at(self, stage: Stage) -> bool:
        """Whether this stage has something to do for it, or to transfer."""
        is_over = stage is Stage.PREFILL and self.has_answered and not self.request.transfers_kv
        return stage in self.needs and not is_over


class Jobs:
    """Jobs that are admitted and not over. Sums are kept, as load is asked for often and many may wait."""

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

    def names_lora(self, digest: str) -> bool:
        """Whether a request with the LoRA adapter of this digest is among them."""
        return any(job.request.lora == digest for job in self)

    def add(self, job: Job) -> None:
        self._jobs[job.job_id] = job
        self.outside += 1
        self.outside_tokens += job.tokens
        self.unanswered_tokens += len(job.request.token_ids)

    def enters_engine(self, job: Job) -> None:
        job.in_engine = True
        self.outside -= 1
        self.outside_tokens -= job.tokens

    def got_tokens(self, job: Job) -> frozenset[Stage]:
        """Returns the stages that have computed their part of it with these tokens."""
        is_first, done = not job.has_answered, frozenset[Stage]()
        if is_first:
            job.has_answered = True
            self.unanswered_tokens -= len(job.request.token_ids)
            done |= PREFILL
        if not job.is_decoded and (job.request.continued or not is_first):
            job.is_decoded = True
            done |= DECODE
        return done & job.needs

    def ended(self, job: Job) -> None:
        """Of one that may not have been admitted."""
        if self._jobs.pop(job.job_id, None) is None:
            return
        if not job.in_engine:
            self.outside -= 1
            self.outside_tokens -= job.tokens
        if not job.has_answered:
            self.unanswered_tokens -= len(job.request.token_ids)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is violated."""
        outside = [job.tokens for job in self if not job.in_engine]
        assert (self.outside, self.outside_tokens) == (len(outside), sum(outside)), "jobs do not add up"  # noqa: S101 - invariant
        prompts = sum(len(job.request.token_ids) for job in self if not job.has_answered)
        assert self.unanswered_tokens == prompts, "prompts do not add up"  # noqa: S101 - invariant
