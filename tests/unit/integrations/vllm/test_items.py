"""Embeddings are held while a request in the engine needs them."""

import torch

from triptych.integrations.vllm.items import HeldItems, Item


def item(name: str) -> Item:
    return Item(name, torch.zeros(2, 3))


def test_an_item_of_several_requests_is_held_once_until_the_last_has_ended() -> None:
    items = HeldItems()
    items.hold("one", [item("cat"), item("dog"), item("cat")])
    items.hold("two", [item("cat")])
    assert (len(items), items.nbytes) == (2, 2 * 2 * 3 * 4)
    items.drop("one")
    assert "cat" in items
    assert "dog" not in items
    assert items.find("dog") is None
    items.drop("one")
    items.drop("unknown")
    assert items.find("cat") is not None
    items.drop("two")
    assert (len(items), items.nbytes) == (0, 0)
