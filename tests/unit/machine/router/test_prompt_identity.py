"""The router names segments as the instances do that seal them."""

import pytest

from triptych.domain.embedding import DType, whole_key
from triptych.domain.kv_segment import MOST_PREFIX_SEGMENTS, KvKind
from triptych.machine.router.prompt_identity import IdentifiedItem, PromptIdentity, PromptTokens
from triptych.machine.text.prefix_hashes import KeyedItem, PrefixHashes

KIND = KvKind("model", DType.BF16, layers=32, heads=8, head_size=128)
SIZE = KIND.segment_tokens
PLACEHOLDER = 4
TOKENS = (*range(10, 50), PLACEHOLDER, 9, *[PLACEHOLDER] * 70, *range(300))
ITEM = IdentifiedItem(40, 71, b"key")


def named(tokens: tuple[int, ...] = TOKENS, *items: IdentifiedItem, salt: bytes = b"salt") -> tuple[bytes, ...]:
    prompt = PromptTokens(tokens, salt, frozenset({PLACEHOLDER}))
    return PromptIdentity(prompt, items).segment_keys(KIND.digest, SIZE)


def test_keys_are_those_of_the_instances() -> None:
    prefixes = PrefixHashes([KeyedItem(b"key", (40, *range(42, 112)))], salt=b"salt")
    whole = KIND.segments(0, len(TOKENS) // SIZE * SIZE)
    assert named(TOKENS, ITEM) == tuple(segment.key(prefixes.hash_before(segment.end, TOKENS)) for segment in whole)


def test_what_begins_differently_has_other_keys_from_there_on() -> None:
    plain = named(TOKENS, ITEM)
    assert not set(plain) & set(named(TOKENS, ITEM, salt=b"other"))
    assert not set(plain) & set(named(TOKENS, IdentifiedItem(40, 71, whole_key((b"key", b"two")))))
    other = named((*TOKENS[:200], 7, *TOKENS[201:]), ITEM)
    assert [key == other_key for key, other_key in zip(plain, other, strict=True)] == [
        at < 200 // SIZE for at in range(len(plain))
    ]


@pytest.mark.parametrize(("tokens", "segments"), [(1, 0), (SIZE, 0), (SIZE + 1, 1), (2 * SIZE, 1), (2 * SIZE + 1, 2)])
def test_the_last_token_is_always_computed(tokens: int, segments: int) -> None:
    assert len(named(tuple(range(10, 10 + tokens)))) == segments


def test_very_long_prompts_have_a_bounded_number() -> None:
    assert len(named(tuple(range(10, 10 + (MOST_PREFIX_SEGMENTS + 9) * SIZE)))) == MOST_PREFIX_SEGMENTS
