"""Preference: which of several instances a content prefers (rendezvous hashing: Thaler and Ravishankar, 1998).

Routers that know nothing of each other agree on it. So the encoder joins what they send it at the same time, and finds what
it encoded for another. Different contents spread evenly. An instance that joins takes only its own share of the contents
from the others; of one that leaves, the others get equal parts.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from triptych.domain.item_plan import Content

_MASK = (1 << 30) - 1
"""Of 30 bits, as Python computes with as many at once."""
_MULTIPLIER = 0x278DDE6D
"""2**30 over the golden ratio, as in Fibonacci hashing."""


@lru_cache(maxsize=4096)
def hash_of(instance_id: str) -> int:
    """The hash of an instance's id."""
    return _hashed(instance_id.encode())


def preferred(places: Sequence[int], hashes: Sequence[int], content: Content) -> int:
    """The place of which the hash has the highest weight for this content."""
    weights = _weights(places, hashes, content)
    return places[weights.index(max(weights))]


def preferred_two(places: Sequence[int], hashes: Sequence[int], content: Content) -> list[int]:
    """The two of these places with the highest weights, or all if they are fewer; the highest first."""
    weights = _weights(places, hashes, content)
    first = weights.index(max(weights))
    if len(places) == 1:
        return [places[first]]
    weights[first] = -1
    return [places[first], places[weights.index(max(weights))]]


def _weights(places: Sequence[int], hashes: Sequence[int], content: Content) -> list[int]:
    digest, salt = content
    item = _hashed(b"%d %b %b" % (len(digest), digest, salt))
    # Of two hashes the product's upper bits depend on all bits of both, which is all that a comparison needs.
    these = hashes if isinstance(places, range) else [hashes[place] for place in places]  # a range has all
    return [(item ^ hashed) * _MULTIPLIER & _MASK for hashed in these]


def _hashed(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=4, person=b"triptych-prefer").digest(), "little") & _MASK
