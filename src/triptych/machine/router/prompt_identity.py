"""Identity of a prompt's keys and values: what they depend on, as a router knows it: the names of its segments wherever they are."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from triptych.domain.kv_segment import MOST_PREFIX_SEGMENTS, segment_key
from triptych.domain.record import record
from triptych.families.base import Span, filled_positions
from triptych.machine.text.prefix_hashes import KeyedItem, PrefixHashes


@record
class PromptTokens:
    """A prompt without its items."""

    token_ids: tuple[int, ...]
    salt: bytes
    """Of its tenant and its LoRA adapter (``prefix_hashes.salt_of``)."""
    placeholder_ids: AbstractSet[int] = frozenset()
    """Tokens whose positions items fill."""


@dataclass(frozen=True, slots=True)
class IdentifiedItem:
    """An item of a prompt, with its shards if it has any."""

    start: int
    tokens: int
    key: bytes
    """The full identity, as in its ticket."""


class PromptIdentity:
    """A prompt with its items. Nothing is hashed before it is asked, and then once."""

    def __init__(self, prompt: PromptTokens, items: Sequence[IdentifiedItem]) -> None:
        self._prompt = prompt
        self._items = items
        self._keys: dict[tuple[str, int], tuple[bytes, ...]] = {}

    def segment_keys(self, kind: str, segment_tokens: int) -> tuple[bytes, ...]:
        """The keys of its whole segments, from the first one on, before its last token, which is always computed.

        ``kind``, and the positions of a segment, are those that an instance reports.
        """
        keys = self._keys.get((kind, segment_tokens))
        if keys is None:
            keys = self._keys[kind, segment_tokens] = self._named(kind, segment_tokens)
        return keys

    def _named(self, kind: str, segment_tokens: int) -> tuple[bytes, ...]:
        tokens, placeholders = self._prompt.token_ids, self._prompt.placeholder_ids
        count = min((len(tokens) - 1) // segment_tokens, MOST_PREFIX_SEGMENTS)
        if count < 1:
            return ()
        keyed = [
            KeyedItem(item.key, filled_positions(tokens, Span(item.start, item.tokens), placeholders))
            for item in self._items
            if item.start < count * segment_tokens
        ]
        prefixes = PrefixHashes(keyed, salt=self._prompt.salt)
        ends = range(segment_tokens, (count + 1) * segment_tokens, segment_tokens)
        hashes = [prefixes.hash_before(end, tokens) for end in ends]
        return tuple(
            [
                segment_key(kind, end - segment_tokens, segment_tokens, digest)
                for end, digest in zip(ends, hashes, strict=True)
            ]
        )
