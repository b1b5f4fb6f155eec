"""A request of the plan, its items, and its visits to text instances."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.domain.embedding import embedding_tokens
from triptych.domain.item_plan import ItemPlan
from triptych.domain.queue_position import FIRST_COME, QueuePosition
from triptych.workload.requests import Planned

if TYPE_CHECKING:
    from .instance import Instance


@dataclass(frozen=True, slots=True)
class ItemSize:
    """What an item or shard takes."""

    tokens: int
    """In the prompt."""
    embedding_tokens: int
    nbytes: int
    """Of its embedding, in an arena."""
    prepared_nbytes: int
    """For the pass of the encoder."""
    media_nbytes: int
    pixels: int
    """Of an image or of a video's frames; samples of a sound."""

    @classmethod
    def of(cls, plan: ItemPlan) -> "ItemSize":
        return cls(
            plan.tokens,
            embedding_tokens(plan.tensors),
            plan.nbytes,
            sum(spec.nbytes for spec in plan.tensors),
            plan.info.nbytes,
            plan.info.samples_or_pixels,
        )


class Request:
    """One request, from when it comes to its end."""

    __slots__ = (
        "answer_tokens",
        "deadline_s",
        "encode_position",
        "encoded_s",
        "first_s",
        "is_over",
        "items",
        "items_left",
        "kv_tokens",
        "media_bytes",
        "needs_prefill_s",
        "number",
        "planned",
        "position",
        "prefill_s",
        "prefiller",
        "prepared_s",
        "prompt_tokens",
        "pull_s",
        "queue_s",
        "sizes",
        "ttft_limit_s",
        "visit",
    )

    def __init__(self, number: int, planned: Planned) -> None:
        """``number``: in the plan."""
        self.number = number
        self.planned = planned
        self.deadline_s = 0.0
        self.is_over = False
        self.prompt_tokens = 0
        self.media_bytes = 0
        self.sizes: tuple[ItemSize, ...] = ()
        """Of its items and shards."""
        self.items: list[Item] = []
        """Those at encoders, and those that are encoded and not released."""
        self.items_left = 0
        """To be encoded."""
        self.position: QueuePosition = FIRST_COME
        """In the queue that it is in at the router."""
        self.encode_position: QueuePosition = FIRST_COME
        self.visit: Visit | None = None
        """The text instance that it is at."""
        self.prefiller: Visit | None = None
        """The one whose keys and values it is to go on with."""
        self.answer_tokens = self.kv_tokens = 0
        """Expected of its answer, and of KV memory for both."""
        self.ttft_limit_s: float | None = None
        self.needs_prefill_s = 0.0
        self.prepared_s = self.encoded_s = 0.0
        self.pull_s = self.queue_s = self.prefill_s = 0.0
        """How long they took."""
        self.first_s = 0.0
        """When its first token was at the router; 0 before."""


class Item:
    """An item at its encoder."""

    __slots__ = ("encoder", "is_encoded", "request", "size")

    def __init__(self, request: Request, size: ItemSize, encoder: "Instance") -> None:
        self.request = request
        self.size = size
        self.encoder = encoder
        self.is_encoded = False

    @property
    def position(self) -> QueuePosition:
        return self.request.encode_position


class Visit:
    """A request at a text instance, from its arrival to its last token there."""

    __slots__ = (
        "arrived_s",
        "arrives",
        "begun",
        "came_s",
        "computed",
        "copied",
        "end_step",
        "has_place",
        "holds_nbytes",
        "is_over",
        "joined_s",
        "limit",
        "offered",
        "position",
        "prompt_tokens",
        "request",
        "sent",
        "text",
        "transfers_kv",
    )

    def __init__(self, request: Request, text: "Instance", position: QueuePosition, *, transfers_kv: bool) -> None:
        self.request = request
        self.text = text
        self.position = position
        self.prompt_tokens = request.prompt_tokens
        self.limit = request.planned.output_tokens
        self.begun = 0 if request.prefiller is None else 1
        """Tokens of the answer that it comes with."""
        self.transfers_kv = transfers_kv
        """It goes on elsewhere once it has a token."""
        self.computed = 0
        """Of the prompt, and of ``begun``."""
        self.sent = self.begun
        """Tokens of the answer."""
        self.end_step = 0
        """The step of the instance that has its last token; 0 until it decodes."""
        self.has_place = False
        """It has a place in the batch, and KV memory."""
        self.is_over = False
        self.joined_s: float | None = None
        """When the first step began that computed some of it."""
        self.arrived_s = 0.0
        self.came_s = 0.0
        """When its first token was at the router."""
        self.copied = 0
        """Positions whose keys and values are copied out, or are about to be."""
        self.offered: int = 0
        """Positions whose keys and values it exports; others are computed again."""
        self.arrives = request.prefiller is not None and request.prefiller.offered > 0
        """Keys and values of its prompt are yet to come."""
        self.holds_nbytes = 0
        """Of the memory for these."""

    @property
    def left(self) -> int:
        """Positions to compute before the next token."""
        return self.prompt_tokens + self.begun - self.computed

    @property
    def most_tokens(self) -> int:
        """KV memory that it may come to need."""
        return self.prompt_tokens + self.limit
