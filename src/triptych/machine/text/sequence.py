"""One sequence: an answer to a request, from its prompt to its last token."""

from dataclasses import dataclass, field
from typing import Self

from triptych.domain.queue_position import FIRST_COME, QueuePosition
from triptych.families.base import Span
from triptych.machine.text.host_copies import HostCopy
from triptych.machine.text.prefix_hashes import BlockHashes


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """Prompt, answer so far, and how much of it is in the KV cache. Only ``RunningBatch`` changes it."""

    request_id: str
    choice: int = 0
    token_ids: list[int]
    """Prompt and answer."""
    prompt_tokens: int
    max_tokens: int
    """Most tokens of the answer."""
    bidirectional: tuple[Span, ...] = ()
    prefix_hashes: BlockHashes | None = None
    """Of its full blocks, or up to its borders; None if the prefix cannot be shared."""
    queue_position: QueuePosition = FIRST_COME
    """The caller's queue position."""
    arrival: int = 0
    computed: int = 0
    """Tokens whose keys and values are in the KV cache."""
    arriving: int = 0
    """First tokens whose keys and values come from elsewhere, when it has blocks: until then it is not computed."""
    pauses: bool = False
    """Whether it pauses at its next token."""
    paused: bool = False
    """Whether it gets no more tokens. It keeps its blocks until it is removed or preempted."""
    borders: tuple[int, ...] | None = None
    """Positions within its prompt before which a pass ends, so that its state there is kept. None until states are looked up for it."""
    copy: HostCopy | None = None
    """Positions that are in host memory, while it is preempted."""
    preemptions: int = 0
    cached: int | None = None
    """Tokens found in the prefix cache when it first started; None before."""
    followers: list[Self] = field(default_factory=list)
    """The other choices of its request, until the prompt is computed."""

    @property
    def sequence_id(self) -> str:
        return f"{self.request_id}/{self.choice}"

    @property
    def order(self) -> tuple[QueuePosition, int, int]:
        return self.queue_position, self.arrival, self.choice

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def answer(self) -> list[int]:
        return self.token_ids[self.prompt_tokens :]

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    @property
    def is_decoding(self) -> bool:
        return self.generated > 0 and self.length == self.computed + 1

    @property
    def is_arriving(self) -> bool:
        return self.computed < self.arriving

    @property
    def is_idle(self) -> bool:
        """Whether it computes nothing although it has blocks."""
        return self.paused or self.is_arriving

    @property
    def pending_tokens(self) -> int:
        """Tokens to compute before the next one, and to generate, for this sequence and its followers."""
        if self.paused:
            return 0
        known = max(self.computed, self.arriving) if self.copy is None else self.copy.segment.positions
        first = max(0, self.length - known - (self.generated > 0))
        return first + self.left_tokens + sum(follower.left_tokens for follower in self.followers)

    @property
    def left_tokens(self) -> int:
        """Most tokens still to generate."""
        return self.max_tokens - self.generated

    def append(self, token: int) -> None:
        self.token_ids.append(token)
        self.paused |= self.pauses
        if self.prefix_hashes is not None:
            self.prefix_hashes.append(token)
