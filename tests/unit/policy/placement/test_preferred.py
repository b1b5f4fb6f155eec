from collections import Counter

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


def test_contents_spread_evenly_and_so_do_their_second_choices() -> None:
    chosen = [preferred_two(range(6), HASHES, (b"%d" % number, b"")) for number in range(1200)]
    for counts in (Counter(first for first, _ in chosen), Counter(second for _, second in chosen)):
        assert all(160 < counts[place] < 240 for place in range(6))


def test_an_instance_that_joins_takes_contents_from_others_and_moves_no_other_content() -> None:
    contents = [(b"%d" % number, b"") for number in range(600)]
    before = [preferred(range(5), HASHES[:5], content) for content in contents]
    after = [preferred(range(6), HASHES, content) for content in contents]
    assert all(new in {old, 5} for old, new in zip(before, after, strict=True))
    assert 70 < after.count(5) < 130


def test_routers_of_other_releases_prefer_the_same_places() -> None:
    """Pinned: in a rolling update routers of two releases must agree."""
    chosen = [preferred(range(6), HASHES, (b"%d" % number, b"salt")) for number in range(60)]
    assert "".join(map(str, chosen)) == "323040431441240521140552053304505531405532005104331155134051"
