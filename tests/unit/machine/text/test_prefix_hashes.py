import pytest

from triptych.machine.text.prefix_hashes import BlockHashes, KeyedItem, PrefixHashes


def test_hashes_depend_on_tokens_positions_items_and_tenant() -> None:
    def hashes(tokens: list[int], *items: KeyedItem, salt: bytes = b"") -> list[bytes]:
        return BlockHashes(4, tokens, items, salt=salt).hashes

    tokens = [1, 2, 9, 9, 9, 3, 4, 5]
    base = hashes(tokens, KeyedItem(b"a", (2, 3, 4)))
    assert len(base) == 2
    others = [
        hashes(tokens),
        hashes(tokens, KeyedItem(b"b", (2, 3, 4))),
        hashes(tokens, KeyedItem(b"a", (2, 3))),
        hashes(tokens, KeyedItem(b"a", (2,)), KeyedItem(b"a", (3, 4))),
        hashes(tokens, KeyedItem(b"a", (2, 3, 4)), salt=b"tenant"),
        hashes([1, 2, 9, 9, 9, 3, 4, 6], KeyedItem(b"a", (2, 3, 4))),
    ]
    assert all(other[1] != base[1] for other in others)
    assert others[-1][0] == base[0]
    grown = BlockHashes(4, tokens[:5], [KeyedItem(b"a", (2, 3, 4))], salt=b"")
    twin = grown.fork()
    for token in tokens[5:]:
        grown.append(token)
    assert grown.hashes == base
    assert twin.hashes == base[:1]
    for token in tokens[5:7]:
        twin.append(token)
    assert twin.hashes == base[:1]
    another = twin.fork()
    twin.append(5)
    another.append(6)
    assert twin.hashes == base
    assert another.hashes == others[-1]


TOKENS = list(range(200))
ITEM = KeyedItem(b"a", tuple(range(100, 140)))


def hash_before(end: int, tokens: list[int] = TOKENS, *items: KeyedItem, salt: bytes = b"") -> bytes:
    return PrefixHashes(items, salt=salt).hash_before(end, tokens)


@pytest.mark.parametrize("end", [0, 1, 63, 64, 65, 120, 128, 130, 200])
def test_a_beginning_has_one_hash_in_whatever_order_it_is_asked(end: int) -> None:
    hashes = PrefixHashes([ITEM], salt=b"t")
    for other in (200, 3, 64):
        hashes.hash_before(other, TOKENS)
    expected = PrefixHashes([ITEM], salt=b"t").hash_before(end, TOKENS[:end])
    assert hashes.hash_before(end, TOKENS) == expected
    grown = TOKENS[:end]
    twice = PrefixHashes([ITEM], salt=b"t")
    twice.hash_before(end // 2, grown)
    assert twice.hash_before(end, [*grown, 7, 8]) == expected


def test_hashes_of_beginnings_depend_on_all_before_and_on_nothing_after() -> None:
    assert len({hash_before(end) for end in range(201)}) == 201, "of their lengths"
    for end in (101, 128, 139, 140, 200):
        base = hash_before(end, TOKENS, ITEM)
        assert hash_before(end, [*TOKENS[:end], 5, 5, 5], ITEM, KeyedItem(b"b", (end + 1,))) == base
        others = [
            hash_before(end),
            hash_before(end, TOKENS, KeyedItem(b"b", ITEM.positions)),
            hash_before(end, TOKENS, KeyedItem(b"a", tuple(range(99, 140)))),
            hash_before(end, TOKENS, ITEM, salt=b"t"),
            hash_before(end, [*TOKENS[: end - 1], 999], ITEM),
            hash_before(end, [999, *TOKENS[1:]], ITEM),
        ]
        assert base not in others
    assert hash_before(100, TOKENS, ITEM) == hash_before(100)
