"""The embeddings that a vLLM engine may ask for: each is held while a request in the engine needs it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Item:
    """Embedding of one item, [tokens, width], in the memory of the host."""

    identifier: str
    """Equal identifiers mean equal embeddings."""
    embedding: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.embedding.nbytes


class ItemsLost(Exception):
    """A request's items cannot come any more: it must fail."""


class ItemSource(Protocol):
    """Source from which the connector gets a request's items. Called by the engine's thread only."""

    @property
    def waits(self) -> bool:
        """Whether any items are on their way."""
        ...

    def get(self, request_id: str, needed: Mapping[str, int]) -> Mapping[str, torch.Tensor] | None:
        """The embeddings of the items that a request needs, by identifier; None until all are there.

        ``needed`` has the rows of each. They are held for the request until ``drop``. Raises ItemsLost.
        """
        ...

    def settle(self, timeout_s: float) -> None:
        """Wait until one that was on its way has come, for at most this long."""
        ...

    def drop(self, request_id: str) -> object:
        """The request needs no items any more. Unknown ones are ignored."""
        ...

    def close(self) -> None:
        """Release what is held anywhere. Nothing is called afterwards."""
        ...


@dataclass(slots=True)
class _Held:
    item: Item
    holders: set[str] = field(default_factory=set)


class HeldItems:
    """An ``ItemSource`` of items that are handed over before their request enters the engine.

    An item of several requests is held once.
    """

    waits = False

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._of_request: dict[str, dict[str, None]] = {}

    def hold(self, request_id: str, items: Iterable[Item]) -> None:
        """Hold items of a request until ``drop``."""
        of_request = self._of_request.setdefault(request_id, {})
        for item in items:
            of_request[item.identifier] = None
            self._held.setdefault(item.identifier, _Held(item)).holders.add(request_id)

    def drop(self, request_id: str) -> list[str]:
        """Returns the identifiers of items that are not held any more."""
        dropped: list[str] = []
        for identifier in self._of_request.pop(request_id, ()):
            held = self._held[identifier]
            held.holders.discard(request_id)
            if not held.holders:
                del self._held[identifier]
                dropped.append(identifier)
        return dropped

    def get(self, request_id: str, needed: Mapping[str, int]) -> Mapping[str, torch.Tensor]:
        """Raises ItemsLost if one is gone, as items come with their request and will not come again."""
        del request_id
        items: dict[str, torch.Tensor] = {}
        for identifier in needed:
            if (held := self._held.get(identifier)) is None:
                raise ItemsLost("an item is gone")
            items[identifier] = held.item.embedding
        return items

    def find(self, identifier: str) -> Item | None:
        """An item, if it is held."""
        held = self._held.get(identifier)
        return None if held is None else held.item

    def settle(self, timeout_s: float) -> None:
        """Do nothing: no item is on its way."""

    def close(self) -> None:
        """Do nothing: no item is held anywhere else."""

    @property
    def nbytes(self) -> int:
        return sum(held.item.nbytes for held in self._held.values())

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._held

    def __len__(self) -> int:
        return len(self._held)
