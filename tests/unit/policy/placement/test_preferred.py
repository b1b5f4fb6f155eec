from hypothesis import given
from hypothesis import strategies as st

from triptych.policy.placement.preferred import hash_of, preferred, preferred_two

HASHES = [hash_of(name) for name in "abcdef"]


@given(st.permutations(range(6)), st.integers(1, 6), st.binary(max_size=8), st.binary(max_size=8))
def test_the_preferred_places_depend_on_the_content_alone(
    order: list[int], number: int, digest: bytes, salt: bytes
) -> None:
    places, content = order[:number], (digest, salt)
    first, *second = preferred_two(places, HASHES, content)
    assert first == preferred(places, HASHES, content) == preferred(sorted(places), HASHES, content)
    rest = [place for place in places if place != first]
    assert second == ([preferred(rest, HASHES, content)] if rest else [])


def test_contents_that_differ_in_salt_only_prefer_different_places() -> None:
    assert len({preferred(range(6), HASHES, (b"cat", b"%d" % salt)) for salt in range(40)}) == 6
