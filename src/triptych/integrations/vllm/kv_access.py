"""Keys and values of vLLM's requests, copied out of its KV cache and into it between two steps."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from triptych.domain.kv_segment import KvKind, KvSegment
from triptych.integrations.vllm.choices import Choice, Choices
from triptych.integrations.vllm.kv_cache import VllmKvCache
from triptych.integrations.vllm.kv_connector import KvConnector


class VllmKvAccess:
    """``ports.KvAccess`` to vLLM's KV cache."""

    def __init__(self, engine: Any, scheduler: Any, cache: VllmKvCache, choices: Choices) -> None:
        """``engine`` and ``scheduler`` are vLLM's."""
        connector = scheduler.get_kv_connector()
        assert isinstance(connector, KvConnector)  # by the arguments
        self.connector = connector
        self._engine = engine
        self._scheduler = scheduler
        self._cache = cache
        self._choices = choices

    @property
    def kind(self) -> KvKind:
        return self._cache.kind

    @property
    def awaiting(self) -> AbstractSet[tuple[str, int]]:
        arriving, choices = self.connector.arriving, self._choices.by_name.values()
        return {(choice.request_id, choice.number) for choice in choices if choice.vllm_id in arriving}

    def pause(self, request_id: str) -> None:
        """Pause a request. To vLLM its choices end here; their blocks stay."""
        choices = [
            choice for choice in self._choices.of(request_id).values() if choice.name not in self._choices.paused
        ]
        for choice in choices:
            self.connector.keep(choice.vllm_id)
            self._choices.paused.add(choice.name)
        self._engine.abort_request([choice.name for choice in choices])

    def computed(self, request_id: str, choice: int) -> int:
        _, request = self._found(request_id, choice)
        return 0 if request is None else self.connector.computed(request)

    def prefix_hash(self, request_id: str, choice: int, end: int) -> bytes | None:
        held, request = self._found(request_id, choice)
        if held is None or held.prefixes is None or request is None:
            return None
        return held.prefixes.hash_before(end, request.all_token_ids)

    def pack(self, request_id: str, choice: int, segment: KvSegment, memory: memoryview) -> bool:
        held, _ = self._found(request_id, choice)
        if held is None or self.computed(request_id, choice) < segment.end:
            return False
        self._cache.pack(self._blocks(held), segment, memory)
        return True

    def unpack(self, request_id: str, choice: int, segment: KvSegment, memory: memoryview) -> bool:
        held, _ = self._found(request_id, choice)
        arrival = None if held is None else self.connector.arriving.get(held.vllm_id)
        if held is None or arrival is None or segment.first > arrival.computed:
            return False
        if arrival.computed < (end := min(segment.end, arrival.wanted)):
            self._cache.unpack(self._blocks(held), segment, memory, first=arrival.computed, end=end)
            self.connector.receive(held.vllm_id, end)
        return True

    def arrived(self, request_id: str) -> None:
        for choice in self._choices.of(request_id).values():
            self.connector.end_arrival(choice.vllm_id)

    def _found(self, request_id: str, choice: int) -> tuple[Choice | None, Any]:
        """A choice, and the request that it is to vLLM."""
        held = self._choices.of(request_id).get(choice)
        return held, None if held is None else self._scheduler.requests.get(held.vllm_id)

    def _blocks(self, choice: Choice) -> Sequence[int]:
        (blocks,) = self._scheduler.kv_cache_manager.get_block_ids(choice.vllm_id)
        return list(blocks)
