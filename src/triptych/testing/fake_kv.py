"""Keys and values of the fake text engine, and the tokens that follow from them.

A position's are a digest of its token, of its row of an embedding, and of those of the position before. A token of the answer
is a digest of those of all positions before it. So positions that are wrong, missing, stale or in another place change the answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from triptych.domain.embedding import DType
from triptych.domain.instance import ModelInfo
from triptych.domain.kv_segment import KvKind, KvSegment

_HALF_NBYTES = 16
POSITION_NBYTES = 2 * _HALF_NBYTES
"""Of a position: its keys, then its values."""
_SEGMENT_TOKENS = 16


class FakeKvKind(KvKind):
    """With short segments, as prompts of tests are short."""

    __slots__ = ()

    @property
    def segment_tokens(self) -> int:
        return _SEGMENT_TOKENS


class FakeStateKind(FakeKvKind):
    """In whole segments, as if each position overwrote the one before."""

    __slots__ = ()

    @property
    def is_whole(self) -> bool:
        return True

    @property
    def segment_tokens(self) -> int:
        return 0

    def segments(self, first: int, end: int) -> tuple[KvSegment, ...]:
        return (KvSegment(self, first, end - first),) if end > first else ()


def fake_kv_kind(model: ModelInfo, *, has_states: bool = False) -> KvKind:
    head_size = _HALF_NBYTES // DType.F32.itemsize
    kind = FakeStateKind if has_states else FakeKvKind
    return kind(model.revision, DType.F32, layers=1, heads=1, head_size=head_size)


@dataclass(frozen=True, slots=True)
class Spliced:
    """An embedding at its position in the prompt, as the text engine received it."""

    start: int
    tokens: int
    embedding: bytes


def rows_of(items: Sequence[Spliced], lora: str = "") -> dict[int, bytes]:
    """The rows of embeddings, by position. The first has the digest of a LoRA adapter too, so that all that follows depends on it."""
    rows: dict[int, bytes] = {}
    for item in items:
        size = -(-len(item.embedding) // max(1, item.tokens))
        for index in range(item.tokens):
            rows[item.start + index] = item.embedding[index * size : (index + 1) * size]
    if lora:
        rows[0] = rows.get(0, b"") + bytes.fromhex(lora)
    return rows


def extend(contents: bytearray, token_ids: Sequence[int], rows: Mapping[int, bytes]) -> None:
    """Compute the next positions, after those in ``contents``."""
    first = len(contents) // POSITION_NBYTES
    for position, token in enumerate(token_ids, start=first):
        digest = blake2b(contents[-POSITION_NBYTES:], digest_size=POSITION_NBYTES)
        digest.update(token.to_bytes(8, "little", signed=True))
        digest.update(rows.get(position, b""))
        contents += digest.digest()


def next_token(contents: bytes | bytearray, vocabulary: range, choice: int) -> int:
    """The token that follows the positions in ``contents``."""
    digest = blake2b(contents, digest_size=8, salt=choice.to_bytes(2, "little")).digest()
    return vocabulary[int.from_bytes(digest, "little") % len(vocabulary)]


def answer_length(token_ids: Sequence[int], items: Sequence[Spliced], choice: int) -> int:
    """One token per item, then 4 to 11 that depend on all inputs and the choice."""
    whole = blake2b(b"".join(token.to_bytes(8, "little", signed=True) for token in token_ids), digest_size=32)
    for item in sorted(items, key=lambda item: item.start):
        whole.update(b"%d:%d:" % (item.start, item.tokens) + item.embedding)
    whole.update(choice.to_bytes(2, "little"))
    return len(items) + 4 + whole.digest()[31] % 8


def answer_tokens(
    token_ids: Sequence[int],
    items: Sequence[Spliced],
    *,
    vocabulary: range,
    choice: int = 0,
    length: int | None = None,
    lora: str = "",
) -> tuple[int, ...]:
    """The right answer to a prompt, or so many tokens if it goes on beyond its end. All tokens are in ``vocabulary``."""
    contents, rows = bytearray(), rows_of(items, lora)
    extend(contents, token_ids, rows)
    answer: list[int] = []
    for _ in range(answer_length(token_ids, items, choice) if length is None else length):
        extend(contents, answer[-1:], rows)
        answer.append(next_token(contents, vocabulary, choice))
    return tuple(answer)


def read(contents: bytearray, first: int, end: int) -> bytes:
    """Positions as in a segment: all keys, then all values."""
    positions = [contents[at * POSITION_NBYTES : (at + 1) * POSITION_NBYTES] for at in range(first, end)]
    return b"".join(position[:_HALF_NBYTES] for position in positions) + b"".join(
        position[_HALF_NBYTES:] for position in positions
    )


def write(contents: bytearray, segment: bytes, skipped: int) -> None:
    """Append a segment's positions to ``contents``, but for the first ``skipped``."""
    half = len(segment) // 2
    for at in range(skipped * _HALF_NBYTES, half, _HALF_NBYTES):
        contents += segment[at : at + _HALF_NBYTES] + segment[half + at : half + at + _HALF_NBYTES]
