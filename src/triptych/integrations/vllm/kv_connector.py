"""Triptych's KV connector: keys and values that arrive, or stay for a KV transfer, between the steps of a vLLM engine
(ADR 44).

It copies nothing: the engine does, between two steps and in their thread (``kv_cache``). The scheduler side tells vLLM
which requests wait for keys and values and which blocks stay. vLLM learns of an end from the worker side, in the next
step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.request import RequestStatus

KV_CONNECTOR = "KvConnector"
"""Name of the connector in vLLM's settings."""
KV_MODULE = __name__
"""Module of the connector in vLLM's settings."""

_KEPT_AFTER = frozenset({RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ABORTED})


@dataclass
class Ended(KVConnectorMetadata):
    """Requests that have ended since the last step."""

    arrivals: frozenset[str] = frozenset()
    missing: frozenset[int] = frozenset()
    """Blocks of these requests that are to be computed: nothing arrived for them, or not for all of their positions."""
    kept: frozenset[str] = frozenset()
    """Requests whose blocks are kept no longer."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that has memory for positions that arrive."""

    computed: int
    """Positions that it has, from 0 on ..."""
    wanted: int
    """Positions that it should have: all that arrive but its last one, which is computed."""


class KvConnector(KVConnectorBase_V1):
    """Requests go by vLLM's own ids. A single worker, in the process of the scheduler."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._expected: dict[str, int] = {}
        """Positions that will arrive, of requests that have no memory for them yet."""
        self._arriving: dict[str, Arrival] = {}
        self._arrived: dict[str, Arrival] = {}
        """Arrivals that await nothing any more, until the next step."""
        self._keeps: set[str] = set()
        self._kept: set[str] = set()
        self._dropped: set[str] = set()

    # --- for the engine, between two steps ---------------------------------------------------------------------------

    def expect(self, request_id: str, positions: int) -> None:
        """Expect so many of the request's positions to arrive. It gets memory for them when vLLM starts it."""
        self._expected[request_id] = positions

    @property
    def arriving(self) -> Mapping[str, Arrival]:
        """The requests that have this memory and wait."""
        return self._arriving

    def receive(self, request_id: str, end: int) -> None:
        """Positions up to ``end`` have been written to the blocks of a request that waits."""
        self._arriving[request_id] = replace(self._arriving[request_id], computed=end)

    def end_arrival(self, request_id: str) -> None:
        """End the arrival: from the next step on the request computes what is missing, in whole blocks."""
        self._expected.pop(request_id, None)
        if (arrival := self._arriving.pop(request_id, None)) is not None:
            self._arrived[request_id] = arrival

    def computed(self, request: Any) -> int:
        """Positions in the blocks of a request of vLLM."""
        name = request.request_id
        arrival = self._arriving.get(name) or self._arrived.get(name)
        return int(request.num_computed_tokens) if arrival is None else arrival.computed

    def keep(self, request_id: str) -> None:
        """Keep the request's blocks when it has all of its tokens, or is aborted, until ``drop``."""
        self._keeps.add(request_id)

    def drop(self, request_id: str) -> None:
        """Free the request's blocks from the next step on, or when it ends."""
        self._keeps.discard(request_id)
        if request_id in self._kept:
            self._kept.remove(request_id)
            self._dropped.add(request_id)

    @property
    def has_news(self) -> bool:
        """Whether something has ended that vLLM does not know of."""
        return bool(self._arrived or self._dropped)

    # --- scheduler side ----------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """True: what is preempted is computed again, here or by whoever goes on."""
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """The positions beyond those in the prefix cache that will arrive; the last token is always computed."""
        awaited = min(self._expected.get(request.request_id, 0), request.num_tokens - 1) - num_computed_tokens
        return max(0, awaited), awaited > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note that the request has its memory: all of it that is not in the prefix cache will arrive."""
        del blocks
        expected = self._expected.pop(request.request_id, None)
        if expected is not None and num_external_tokens:
            wanted = min(expected, request.num_tokens - 1)
            self._arriving[request.request_id] = Arrival(wanted - num_external_tokens, wanted)

    def build_connector_meta(self, scheduler_output: Any) -> Ended:
        del scheduler_output
        assert self._kv_cache_manager is not None  # bound when the scheduler is made
        arrived, self._arrived = self._arrived, {}
        dropped, self._dropped = self._dropped, set()
        missing: set[int] = set()
        for request_id, arrival in arrived.items():
            if arrival.computed < arrival.wanted:
                (blocks,) = self._kv_cache_manager.get_block_ids(request_id)
                missing.update(blocks[arrival.computed // self._vllm_config.cache_config.block_size :])
        return Ended(frozenset(arrived), frozenset(missing), frozenset(dropped))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """The request has ended, however. True keeps its blocks."""
        del block_ids
        name = request.request_id
        self._expected.pop(name, None)
        keeps = name in self._keeps
        self._keeps.discard(name)
        if name in self._arriving or name in self._arrived:  # vLLM keeps its blocks until it hears that nothing arrives
            self._arriving.pop(name, None)
            self._arrived[name] = Arrival(0, 0)
            return False, None
        if keeps and request.status in _KEPT_AFTER:
            self._kept.add(name)
            return True, None
        return False, None

    # --- worker side -------------------------------------------------------------------------------------------------

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """The requests whose blocks are free, and those that run as soon as there is room in a step."""
        del finished_req_ids
        ended = self._ended
        return set(ended.kept), set(ended.arrivals)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set(self._ended.missing)

    @property
    def _ended(self) -> Ended:
        ended = self._get_connector_metadata()
        assert isinstance(ended, Ended)  # vLLM passes what ``build_connector_meta`` has made
        return ended

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: no bytes are copied within a step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no bytes are copied within a step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: no bytes are copied within a step."""

    def wait_for_save(self) -> None:
        """Do nothing: no bytes are copied within a step."""
