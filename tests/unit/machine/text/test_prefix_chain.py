from triptych.machine.text.prefix_chain import KeyedItem, PrefixChain


def test_keys_tell_tokens_places_items_and_tenants_apart() -> None:
    def chain(tokens: list[int], *items: KeyedItem, salt: bytes = b"") -> list[bytes]:
        return PrefixChain(4, tokens, items, salt=salt).keys

    tokens = [1, 2, 9, 9, 9, 3, 4, 5]
    base = chain(tokens, KeyedItem(b"a", (2, 3, 4)))
    assert len(base) == 2
    others = [
        chain(tokens),
        chain(tokens, KeyedItem(b"b", (2, 3, 4))),
        chain(tokens, KeyedItem(b"a", (2, 3))),
        chain(tokens, KeyedItem(b"a", (2,)), KeyedItem(b"a", (3, 4))),
        chain(tokens, KeyedItem(b"a", (2, 3, 4)), salt=b"tenant"),
        chain([1, 2, 9, 9, 9, 3, 4, 6], KeyedItem(b"a", (2, 3, 4))),
    ]
    assert all(other[1] != base[1] for other in others)
    assert others[-1][0] == base[0]
    grown = PrefixChain(4, tokens[:5], [KeyedItem(b"a", (2, 3, 4))], salt=b"")
    twin = grown.fork()
    for token in tokens[5:]:
        grown.append(token)
    assert grown.keys == base
    assert twin.keys == base[:1]
    for token in tokens[5:7]:
        twin.append(token)
    assert twin.keys == base[:1]
    another = twin.fork()
    twin.append(5)
    another.append(6)
    assert twin.keys == base
    assert another.keys == others[-1]
