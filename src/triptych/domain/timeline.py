"""The timeline of a request, stage by stage. All times are durations in seconds, as clocks differ between processes."""

from dataclasses import dataclass
from enum import Enum

from triptych.domain.record import record


class Outcome(Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@record
class ItemTimeline:
    """One item or shard, as finally served. ``encode_attempts`` above 1 means that an attempt or embedding was lost."""

    item: int
    modality: str
    width: int
    height: int
    tokens: int
    encoder: str = ""
    encode_attempts: int = 0
    encoder_cached: bool = False
    queue_s: float = 0.0
    encode_s: float = 0.0
    pull_backend: str = ""
    pull_bytes: int = 0
    pull_s: float = 0.0
    text_cached: bool = False
    shard: str = ""
    """``1-4/8``: the units and their total; empty for a whole item."""
    hedges: int = 0
    """Times that it was given to a second encoder, as the first one took long."""
    hedge_won: bool = False
    """The second encoder answered first."""


@record
class Beginning:
    """Times of a request up to its first token, by which it is judged. Meanings as in ``Timeline``."""

    ttft_s: float
    prepare_s: float
    encode_s: float
    queue_s: float
    slowest_encoder: str = ""
    """Id of the encoder that took longest for an item; empty without items."""


@record
class Timeline:
    request_id: str
    model: str
    outcome: Outcome
    items: tuple[ItemTimeline, ...] = ()
    text_instance: str = ""
    text_attempts: int = 0
    continuations: int = 0
    """How often the answer went on at another text instance, after its stream had broken."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prepare_s: float = 0.0
    """Router: inspecting media, hashing, templating, tokenizing."""
    encode_s: float = 0.0
    """From the end of preparation until the last item has its ticket, including retries."""
    queue_s: float = 0.0
    """At the text instance; each item has its encoder's queue time."""
    pull_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    interrupted_s: float = 0.0
    """In all, from such breaks to the next token. It is part of ``decode_s``, which then counts from the first token on."""
    continued_tokens: int = 0
    """Of ``completion_tokens``, those that another router passed on, whose caller then came here."""
    preemptions: int = 0
    """Times that a choice was preempted for want of KV memory, at the text instance that ended it."""
    preempted_s: float = 0.0
    """The gaps between tokens in which that was, of the choice with most. It is part of ``decode_s``."""
    early_tokens: int = 0
    """Of the prompt, those that were sent to the text instance before all items were encoded."""
    prefix_tokens: int = 0
    """Of the prompt, those whose keys and values the instance that computed it has pulled from others, which had computed them before."""
    prefill_instance: str = ""
    """The text instance that computed the prompt, if it handed the answer over: ``text_instance`` went on with it. Times and pulls up
    to the first token are those of the former, and ``decode_s`` counts from the first token on."""
    kv_transfer_s: float = 0.0
    """In all, from the end of an instance that transfers to the next instance's first token, part of ``decode_s``: the copy of keys and
    values, the queue there, what has to be computed, and a step."""
    kv_pulled_tokens: int = 0
    """Of the tokens that were transferred last, those whose keys and values were pulled ..."""
    kv_cached_tokens: int = 0
    """... were there already ..."""
    kv_computed_tokens: int = 0
    """... or were computed, as they could not be pulled."""
    kv_pull_bytes: int = 0
    error: str = ""
    """The error's code if the outcome is FAILED."""

    @property
    def beginning(self) -> Beginning:
        """Times up to the first token, of a request that has one."""
        slowest = max(self.items, key=lambda item: item.queue_s + item.encode_s, default=None)
        encoder = "" if slowest is None else slowest.encoder
        return Beginning(self.ttft_s, self.prepare_s, self.encode_s, self.queue_s, encoder)


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether every stage has an instance; ``missing`` names the stages without one."""

    ready: bool
    missing: tuple[str, ...] = ()
    instances: tuple[str, ...] = ()
