"""What happened to a request, stage by stage. All times are durations in seconds; no clock leaves its process."""

from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ItemTimeline:
    """One item, or one shard of it, as served in the end.

    ``encode_attempts`` above 1 tells that something was lost on the way.
    """

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
    """``1-4/8``: which units of the item, of how many; empty for all of it."""


@dataclass(frozen=True, slots=True)
class Timeline:
    request_id: str
    model: str
    outcome: Outcome
    items: tuple[ItemTimeline, ...] = ()
    text_instance: str = ""
    text_attempts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prepare_s: float = 0.0
    """Router: sniffing, hashing, templating, tokenizing."""
    encode_s: float = 0.0
    """From the end of preparation until the last item had its ticket, waits and repeats included."""
    queue_s: float = 0.0
    """At the text instance; each item has its own at its encoder."""
    pull_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    error: str = ""
    """The error's code, when the outcome is FAILED."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether every stage of a model has an instance; ``missing`` names the stages that have none."""

    ready: bool
    missing: tuple[str, ...] = ()
    instances: tuple[str, ...] = ()
