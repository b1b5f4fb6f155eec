"""The embeddings that a vLLM engine may ask for: each is held while a request in the engine needs it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Item:
    """One item's embedding, [tokens, width], in the memory of the host."""

    identifier: str
    """Equal identifiers mean equal embeddings."""
    embedding: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.embedding.nbytes


@dataclass(slots=True)
class _Held:
    item: Item
    holders: set[str] = field(default_factory=set)


class HeldItems:
    """Called by the engine's thread only. An item of several requests is held once."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._of_request: dict[str, tuple[str, ...]] = {}

    def hold(self, request_id: str, items: Iterable[Item]) -> None:
        """Hold the items of a request until ``drop``."""
        named = {item.identifier: item for item in items}
        self._of_request[request_id] = tuple(named)
        for identifier, item in named.items():
            self._held.setdefault(identifier, _Held(item)).holders.add(request_id)

    def drop(self, request_id: str) -> None:
        """The request needs no items any more. Unknown ones are ignored."""
        for identifier in self._of_request.pop(request_id, ()):
            held = self._held[identifier]
            held.holders.discard(request_id)
            if not held.holders:
                del self._held[identifier]

    def find(self, identifier: str) -> torch.Tensor | None:
        """An item's embedding, if it is held."""
        held = self._held.get(identifier)
        return None if held is None else held.item.embedding

    @property
    def nbytes(self) -> int:
        return sum(held.item.nbytes for held in self._held.values())

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._held

    def __len__(self) -> int:
        return len(self._held)
