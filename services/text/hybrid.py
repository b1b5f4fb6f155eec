"""Combines a text service and an encoder service in one process into one instance."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from triptych import ports
from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.generation import TextEvent, TextRequest
from triptych.domain.instance import InstanceInfo, InstanceLoad
from triptych.domain.lora import LoadedLora, LoadLora
from triptych.domain.stage import Role
from triptych.machine.arena.published import HintReader
from triptych.rpc.settings import InstanceSettings
from triptych.runtime.batch_limits import Batching, LiveLimits
from triptych.runtime.hinted_load import watch_with_hints
from triptych.runtime.watched_value import WatchedValue

from .service import TextService


class ReportingEncoder(ports.Encoder, Batching, Protocol):
    """The encoder service."""

    async def missing(self) -> Sequence[str]: ...

    async def drain(self) -> None: ...

    def load(self) -> InstanceLoad: ...

    def on_change(self, listener: Callable[[], None]) -> None: ...

    def hints(self) -> HintReader: ...


class HybridInstance:
    """``ports.Encoder`` and ``ports.Text`` with one description and one load report over the stages of both."""

    def __init__(self, text: TextService, encoder: ReportingEncoder, settings: InstanceSettings) -> None:
        self._text = text
        self._encoder = encoder
        self._watched_load = WatchedValue(self.load, settings.load_reports)
        self.live_limits = LiveLimits((text, encoder), self._watched_load.notify)
        text.on_change(self._watched_load.notify)
        encoder.on_change(self._watched_load.notify)

    async def describe(self) -> InstanceInfo:
        """The encoder's description with both roles: readers read from its arena."""
        text, encoder = await self._text.describe(), await self._encoder.describe()
        return replace(
            encoder,
            role=Role.of(text.role.stages | encoder.role.stages) if text.switchable is None else text.role,
            kv_tokens=text.kv_tokens,
            kv_block_tokens=text.kv_block_tokens,
            parts=encoder.parts + text.parts,
            continues=text.continues,
            prefills_early=text.prefills_early,
            kv_kind=text.kv_kind,
            transfers_kv=text.transfers_kv,
            kv_segment_tokens=text.kv_segment_tokens,
            kv_position_bytes=text.kv_position_bytes,
            switchable=text.switchable,
        )

    def load(self) -> InstanceLoad:
        text, encoder = self._text.load(), self._encoder.load()
        draining = text.draining or encoder.draining
        stages = {**encoder.stages, **text.stages}
        return InstanceLoad(
            stages,
            draining,
            stages_version=text.stages_version,
            closed=text.closed,
            limits=self.live_limits.report(),
            loras=text.loras,
        )

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever the load may have changed."""
        self._watched_load.on_change(listener)

    def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        return watch_with_hints(self._watched_load, self._encoder.hints())

    async def missing(self) -> tuple[str, ...]:
        """What either service lacks, without duplicates."""
        return tuple(dict.fromkeys((*await self._text.missing(), *await self._encoder.missing())))

    async def drain(self) -> None:
        """Drain both: running answers read embeddings from here, and encoded items may be for other instances."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._text.drain())
            group.create_task(self._encoder.drain())

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        return await self._encoder.encode(request)

    async def lease(self, request: LeaseRequest) -> Ticket:
        return await self._encoder.lease(request)

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        await self._encoder.release(lease_ids)

    async def load_lora(self, order: LoadLora) -> LoadedLora:
        """Where a report says that it is loaded, both have it."""
        await self._encoder.load_lora(order)
        try:
            return await self._text.load_lora(order)
        except BaseException:
            await self._encoder.unload_lora(order.name)
            raise

    async def unload_lora(self, name: str) -> None:
        await self._text.unload_lora(name)
        await self._encoder.unload_lora(name)

    def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        return self._text.generate(request)
