from triptych.machine.text.prefix_hashes import KeyedItem, PrefixHashes


def test_hashes_depend_on_tokens_positions_items_and_tenant() -> None:
    def hashes(tokens: list[int], *items: KeyedItem, salt: bytes = b"") -> list[bytes]:
        return PrefixHashes(4, tokens, items, salt=salt).hashes

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
    grown = PrefixHashes(4, tokens[:5], [KeyedItem(b"a", (2, 3, 4))], salt=b"")
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
