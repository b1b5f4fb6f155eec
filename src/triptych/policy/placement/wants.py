"""Wants, which are to be placed: an item at an encoder, or a request at a text instance."""

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import ClassVar

from triptych.domain.item_plan import Content
from triptych.domain.record import record
from triptych.policy.backlog import Held, Work

_NOTHING: Mapping[str, int] = MappingProxyType({})


@record
class Want:
    """An item that needs an encoder. ``nbytes`` is the arena space of its embedding."""

    item: int
    tokens: int
    nbytes: int
    content: Content
    avoid: frozenset[str] = frozenset()
    """Encoders that failed this item: used only if there is no other."""
    exclude: frozenset[str] = frozenset()
    """Encoders that must not be used."""
    media_nbytes: int = 0
    pixels: int = 0
    """Of an image or of a video's frames; samples of a sound."""
    lora: str = ""
    """Digest of the LoRA adapter that it is encoded with; empty without one."""
    holders: ClassVar[Mapping[str, int]] = _NOTHING

    def work(self, hosts: Mapping[str, str]) -> Work:
        """Work that it asks of an encoder."""
        del hosts
        return Work(self.tokens, self.nbytes, self.media_nbytes, self.pixels)


@record
class RequestWant:
    """A request that needs a text instance: for its prompt, or to go on with its answer."""

    tokens: int
    """Of the prompt, as far as they are to be computed."""
    answer_tokens: int = 0
    """Expected of each choice."""
    choices: int = 1
    kv_tokens: int = 0
    """KV memory for the prompt and its answers."""
    avoid: frozenset[str] = frozenset()
    """Not used for a prompt; for an answer only if there is no other."""
    exclude: frozenset[str] = frozenset()
    """Must not be used: they may end with another request."""
    holders: Mapping[str, int] = field(default_factory=dict)
    """Bytes of its embeddings, or of its keys and values, by the ids of their holders."""
    continues: bool = False
    """Whether some of its answer has been sent."""
    early: bool = False
    """For the prefix of its prompt, while items are missing."""
    first_in_line: bool = True
    """No other prompt waits for KV memory before it."""
    promised_kv_tokens: int = 0
    """KV memory that is promised to answers which are still being prefilled."""
    sender: str = ""
    """The address of the instance that hands its answer over; empty without one."""
    sender_kv_kind: str = ""
    """The kind of that one's keys and values; empty if nobody takes them."""
    moves: int = 0
    """How often it has left an instance where it waited."""
    lora: str = ""
    """Digest of its LoRA adapter; empty without one."""
    content: ClassVar[Content | None] = None

    @property
    def all_answer_tokens(self) -> int:
        """Expected of all choices together."""
        return self.choices * self.answer_tokens

    def work(self, hosts: Mapping[str, str]) -> Work:
        """Work that it asks of a text instance. ``hosts`` are those of instances by their ids, as far as they are known."""
        held = Held.of(self.holders, hosts) if self.holders else None
        return Work(self.tokens, answer_tokens=self.answer_tokens, held=held)


Placeable = Want | RequestWant
