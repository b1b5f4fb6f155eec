"""Triptych's encoder cache connector: it passes embeddings of Triptych's encoders to a vLLM engine (ADR 28, ADR 29).

vLLM makes two of it: one beside its scheduler and one in each worker.


    source of items  -->  scheduler side  -- metadata of a step -->  worker side  -->  vLLM's encoder cache

An exception within a step ends vLLM's engine, and so does an item that is missing there. So embeddings are checked before they
get here. In each step the scheduler side takes what a request needs before vLLM plans with it. A request whose items are
on their way is kept out of the step, and one whose item is gone fails alone.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole
from vllm.platforms import current_platform

from triptych.integrations.vllm.items import HeldItems, ItemsLost, ItemSource
from triptych.integrations.vllm.models import register_changes

logger = logging.getLogger(__name__)

_PAUSE_S = 0.005
"""Pause of vLLM's loop when all its requests wait for items, seconds. Others that come meanwhile wait as long."""

CONNECTOR = "TriptychConnector"
"""Name of the connector in vLLM's settings."""
MODULE = __name__
"""Module of the connector in vLLM's settings."""


@dataclass
class Embeddings(ECConnectorMetadata):
    """Embeddings that the workers add to their caches before a step, by identifier."""

    by_identifier: dict[str, torch.Tensor] = field(default_factory=dict)


class ItemConnector(ECConnectorBase):
    """A consumer. The scheduler side takes items from ``items``."""

    items: ItemSource

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        self._taken: dict[str, torch.Tensor] = {}
        """The items that requests may use in the step that is being planned."""
        self._loads: dict[str, torch.Tensor] = {}
        """Embeddings that the workers do not have yet."""
        self._lost: set[str] = set()
        self._dtype = vllm_config.model_config.dtype
        if role is ECConnectorRole.WORKER:
            register_changes(vllm_config.model_config.architectures)  # a worker may be a process of its own

    # --- scheduler side ----------------------------------------------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        """Whether vLLM may take this item from the connector. There is no encoder to compute it instead."""
        return identifier in self._taken

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Take the items that the request still needs; called before vLLM plans with it, in every step.

        Returns False if one is not there. If it cannot come, the request fails.
        """
        try:
            needed = _needed(request, num_computed_tokens)
            held = self.items.get(request.request_id, needed) if needed else {}
        except ItemsLost as error:
            logger.warning("request %s fails: %s", request.request_id, error)
            self._lost.add(request.request_id)
            return False
        except Exception:
            logger.exception("request %s fails", request.request_id)  # raised here, it would end the engine
            self._lost.add(request.request_id)
            return False
        if held is None:
            return False
        self._taken.update(held)
        return True

    def take_unavailable_requests(self) -> set[str]:
        """The requests that vLLM ends with an error now."""
        lost, self._lost = self._lost, set()
        return lost

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """VLLM has reserved room for an item in its encoder cache."""
        identifier = request.mm_features[index].identifier
        self._loads[identifier] = self._taken[identifier]

    def build_connector_meta(self, scheduler_output: Any) -> Embeddings:
        if self.items.waits and not scheduler_output.total_num_scheduled_tokens:
            self.items.settle(_PAUSE_S)  # vLLM would go round and round
        loads, self._loads = self._loads, {}
        self._taken = {}
        return Embeddings(loads)

    def request_finished(self, request: Any) -> tuple[bool, None]:
        """The request has left the engine, however it ended."""
        self.items.drop(request.request_id)
        self._lost.discard(request.request_id)
        return False, None

    def shutdown(self) -> None:
        """The engine ends. Only the scheduler side has a source."""
        if self.role is ECConnectorRole.SCHEDULER:
            self.items.close()

    # --- worker side -------------------------------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **_: Any) -> None:
        """Add a step's embeddings to the worker's encoder cache."""
        loads = self._get_connector_metadata()
        assert isinstance(loads, Embeddings)  # vLLM passes what ``build_connector_meta`` has made
        for identifier, embedding in loads.by_identifier.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = embedding.to(current_platform.device_type, self._dtype)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **_: Any) -> None:
        """Do nothing: no item is encoded here."""


def _needed(request: Any, num_computed_tokens: int) -> Mapping[str, int]:
    """The rows of each item that the request still needs. Raises ItemsLost for an item that has several lengths.

    A step that has only one of its places would fail, and vLLM compares places within a step alone.
    """
    needed: dict[str, int] = {}
    for feature in request.mm_features:
        place = feature.mm_position
        if place.offset + place.length > num_computed_tokens:
            rows = place.get_num_embeds()
            if needed.setdefault(feature.identifier, rows) != rows:
                raise ItemsLost(
                    f"item {feature.identifier} has places of {needed[feature.identifier]} and of {rows} rows"
                )
    return needed


class TriptychConnector(ItemConnector):
    """Connector of an engine in the process of a text instance, which fills ``items`` before it adds a request."""

    items: HeldItems

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self.items = HeldItems()
