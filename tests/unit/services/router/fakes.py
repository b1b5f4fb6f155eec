"""Fake encoders and text instances that record leases, calls, and deaths."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import blake2b
from secrets import token_bytes
from typing import Any

from triptych.domain.chat import ChatRequest, MediaPart, Message, Part, TextPart
from triptych.domain.embedding import DType, LeaseId, TensorSpec, Ticket, payload_nbytes
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.generation import (
    ChatEvent,
    Finished,
    FinishReason,
    KvReport,
    KvTransferred,
    PullReport,
    Ready,
    TextEvent,
    TextRequest,
    TokenChunk,
)
from triptych.domain.instance import InstanceInfo, InstanceLoad, ModelInfo, ServedPart, StageLoad
from triptych.domain.kv_segment import KvPlacement, SealedSegment
from triptych.domain.lora import LoadedLora, LoadLora
from triptych.domain.media import Modality
from triptych.domain.profile import Profile
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import Role, Stage
from triptych.errors import ArenaFull, InstanceLost, LeaseLost, ModelNotFound, StageClosed, TransferFailed
from triptych.media.sniff import MediaLimits
from triptych.runtime.profiles import KnownProfiles
from triptych.runtime.watched_value import ReportIntervals, WatchedValue
from triptych.services.router.build import build
from triptych.services.router.membership import FixedMembership
from triptych.services.router.prepare import ModelPrepare
from triptych.services.router.service import RouterService
from triptych.services.router.settings import RouterSettings
from triptych.testing.fakes import FAKE_MODEL, fake_tensors
from triptych.testing.media import png
from triptych.testing.model import fake_prompt_builder, fake_tokenizer
from triptych.tokens.grammar import Grammars
from triptych.virtual.world import virtual_world

ENCODES = "encodes"


def lora_of(name: str, directory: str) -> LoadedLora:
    """The adapter that a fake instance finds in a directory: it changes embeddings if that is called so."""
    return LoadedLora(name, blake2b(directory.encode(), digest_size=32).hexdigest(), 8, 100, directory == ENCODES)


class KillableInstance:
    """A fake instance: killing it fails every running call; after a restart it has another epoch."""

    def __init__(self, instance_id: str, role: Role, model: ModelInfo, arena_bytes: int) -> None:
        self.instance_id = instance_id
        self.role = role
        self.model = model
        self.arena_bytes = arena_bytes
        self.epoch = 1
        self.failures: deque[Exception] = deque()
        self.kv_tokens = 0
        self.kv_block_tokens = 0
        self.parts: tuple[ServedPart, ...] = ()
        self.continues = False
        self.prefills_early = False
        self.kv_kind = ""
        self.transfers_kv = False
        self.closed = 0
        self.loras: dict[str, LoadedLora] = {}
        self.lora_errors: deque[Exception] = deque()
        self._died = asyncio.Event()

    def kill(self) -> None:
        self._died.set()

    def restart(self) -> None:
        self.epoch += 1
        self._died = asyncio.Event()

    async def spend(self, duration_s: float) -> None:
        died = self._died
        try:
            async with asyncio.timeout(duration_s):
                await died.wait()
        except TimeoutError:
            return
        raise InstanceLost(f"{self.instance_id} is dead")

    async def close(self) -> None:
        """Part of a stub's interface."""
        self.closed += 1

    async def load_lora(self, order: LoadLora) -> LoadedLora:
        await self.spend(0.01)
        if self.lora_errors:
            raise self.lora_errors.popleft()
        self.loras[order.name] = lora_of(order.name, order.directory)
        return self.loras[order.name]

    async def unload_lora(self, name: str) -> None:
        await self.spend(0.01)
        if self.loras.pop(name, None) is None:
            raise ModelNotFound(f"no LoRA adapter {name!r} is loaded", param="name")

    def check_lora(self, digest: str) -> None:
        if digest and all(lora.digest != digest for lora in self.loras.values()):
            raise StageClosed("the LoRA adapter is not loaded here any more")

    async def describe(self) -> InstanceInfo:
        await self.spend(0.001)
        return InstanceInfo(
            self.instance_id,
            self.epoch,
            self.role,
            self.model,
            self.arena_bytes,
            (),
            "fake-1",
            kv_tokens=self.kv_tokens,
            kv_block_tokens=self.kv_block_tokens,
            parts=self.parts,
            continues=self.continues,
            prefills_early=self.prefills_early,
            kv_kind=self.kv_kind,
            transfers_kv=self.transfers_kv,
        )


class FakeEncoder(KillableInstance):
    def __init__(self, instance_id: str, *, model: ModelInfo = FAKE_MODEL, arena_bytes: int = 1 << 20) -> None:
        super().__init__(instance_id, Role.E, model, arena_bytes)
        self.encode_s = 0.01
        self.extra_tokens = 0
        self.encoded: list[bytes] = []
        self.encoded_loras: list[str] = []
        self.leases: dict[LeaseId, Ticket] = {}
        self.forgets = False
        self.working = 0
        self.most_leased_bytes = 0
        self._watched_load = WatchedValue(self._load, ReportIntervals())

    @property
    def leased_bytes(self) -> int:
        return sum({ticket.key: ticket.slot_nbytes for ticket in self.leases.values()}.values())

    def _load(self) -> InstanceLoad:
        encode = StageLoad(self.working * 4, self.working, self.leased_bytes)
        return InstanceLoad({Stage.ENCODE: encode}, loras=tuple(self.loras.values()))

    def restart(self) -> None:
        super().restart()
        self.leases.clear()
        self.working = 0

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        self.check_lora(request.info.lora)
        if self.failures:
            raise self.failures.popleft()
        self.working += 1
        self._watched_load.notify()
        try:
            await self.spend(self.encode_s)
        finally:
            self.working -= 1
            self._watched_load.notify()
        tokens = request.tokens + self.extra_tokens
        tensors = fake_tensors(tokens, self.model.hidden_size)
        nbytes = payload_nbytes(tensors)
        if self.leased_bytes + nbytes + 16 > self.arena_bytes:
            raise ArenaFull("the arena is full")
        own, reader = request.router_lease, request.reader_lease
        ticket = Ticket(
            request.info.digest, self.instance_id, self.epoch, 0, nbytes, 1, 0, tensors, tokens, reader, request.lease_s
        )
        self.leases |= {own: ticket, reader: ticket}
        self.most_leased_bytes = max(self.most_leased_bytes, self.leased_bytes)
        self.encoded.append(request.media)
        self.encoded_loras.append(request.info.lora)
        return EncodeResult(ticket, own, cached=False, queue_s=0.0, encode_s=self.encode_s)

    async def lease(self, request: LeaseRequest) -> Ticket:
        await self.spend(0.001)
        held = next((ticket for ticket in self.leases.values() if ticket.key == request.key), None)
        if held is None or self.forgets:
            raise LeaseLost("the embedding is gone")
        reader = request.lease_id
        ticket = Ticket(
            held.key,
            held.holder,
            held.epoch,
            held.offset,
            held.payload_nbytes,
            held.generation,
            held.checksum,
            held.tensors,
            held.tokens,
            reader,
            request.lease_s,
        )
        self.leases[reader] = ticket
        return ticket

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        await self.spend(0.001)
        for lease_id in lease_ids:
            self.leases.pop(lease_id, None)
        self._watched_load.notify()

    async def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        while True:
            yield self._load()
            await self.spend(0.05)


class FakeText(KillableInstance):
    """A text instance that transfers and takes what others have, once it knows them as ``peers``."""

    def __init__(
        self,
        instance_id: str,
        encoders: Sequence[FakeEncoder],
        *,
        model: ModelInfo = FAKE_MODEL,
        role: Role = Role.PD,
    ) -> None:
        super().__init__(instance_id, role, model, 0)
        self.encoders = {encoder.instance_id: encoder for encoder in encoders}
        self.peers: dict[str, FakeText] = {}
        self.segments: dict[LeaseId, Ticket] = {}
        """Leases on what it has transferred."""
        self.seals = True
        self.transfers_kv_at_the_end = False
        """Although nothing is left to go on with."""
        self.drain_after: int | None = None
        """Tokens after which it transfers."""
        self.seal_s = 0.001
        self.free_tokens: int | None = None
        self.kv_reports: list[KvReport] = []
        self.requests: list[TextRequest] = []
        self.running = 0
        self.token_s = 0.005
        self.late_failures: deque[Exception] = deque()
        self.tokens = 4
        self.finishes = True
        self.continues = True
        self.drains = False

    async def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        self.requests.append(request)
        self.running += 1
        try:
            await self.spend(0.002)
            self.check_lora(request.lora)
            if self.failures:
                raise self.failures.popleft()
            lost = [place.item for place in request.placements if not self._held(place.ticket)]
            if lost:
                raise TransferFailed("not there any more", items=tuple(lost))
            for place in request.placements:
                await self.encoders[place.ticket.holder].release([place.ticket.lease_id])
            pulls = (PullReport(p.item, "memory", 1, 0.001, cached=False) for p in request.placements)
            yield (Ready(tuple(pulls), 0.1, 0.2, await self._arrive(request) if request.kv_segments else None),)
            begun = request.begun
            for number in range(min(map(len, begun.values())), self.tokens):
                if self.drain_after is not None and number >= self.drain_after:
                    yield [await self._transfer_kv(request, number)]
                    return
                await self.spend(self.token_s)
                yield [TokenChunk((number,), f"w{number} ", choice) for choice in begun if number >= len(begun[choice])]
                if self.late_failures:
                    raise self.late_failures.popleft()
                if request.transfers_kv and self.tokens > 1:
                    yield [await self._transfer_kv(request, 1)]
                    return
            if self.finishes:
                yield [Finished(FinishReason.STOP, self.tokens, 0.3, 0.4 + choice, choice) for choice in begun]
            if self.transfers_kv_at_the_end:
                yield [await self._transfer_kv(request, self.tokens)]
        finally:
            self.running -= 1

    async def _transfer_kv(self, request: TextRequest, sent: int) -> KvTransferred:
        await self.spend(self.seal_s)
        if not self.seals:
            return KvTransferred(())
        positions, sealed = len(request.token_ids) + sent - 1, list[SealedSegment]()
        for first in range(0, positions, 2):
            tokens = min(2, positions - first)
            tensors = (TensorSpec("kv", DType.F32, (2, 1, tokens, 1, 4)),)
            key, router, reader = first.to_bytes(32, "big"), token_bytes(16), token_bytes(16)
            ticket = Ticket(
                key, self.instance_id, self.epoch, 0, 32 * tokens, 1, 0, tensors, tokens, reader, request.kv_lease_s
            )
            self.segments |= {router: ticket, reader: ticket}
            sealed.append(SealedSegment(KvPlacement(first, ticket), router))
        return KvTransferred(tuple(sealed))

    async def _arrive(self, request: TextRequest) -> KvReport:
        """Pull up to the first segment that is not there."""
        pulled = nbytes = 0
        for place in request.kv_segments:
            source, ticket = self.peers[place.ticket.holder], place.ticket
            assert ticket.address == source.instance_id
            if source._died.is_set() or source.segments.get(ticket.lease_id) is None:
                break
            await source.release([ticket.lease_id])
            pulled, nbytes = place.end, nbytes + ticket.payload_nbytes
        needed = len(request.token_ids) + max(map(len, request.begun.values())) - 1
        self.kv_reports.append(KvReport(pulled, 0, needed - pulled, nbytes, 0.001))
        return self.kv_reports[-1]

    async def lease(self, request: LeaseRequest) -> Ticket:
        await self.spend(0.001)
        held = next((ticket for ticket in self.segments.values() if ticket.key == request.key), None)
        if held is None:
            raise LeaseLost("the segment is gone")
        ticket = replace(held, lease_id=request.lease_id, lease_s=request.lease_s)
        self.segments[request.lease_id] = ticket
        return ticket

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        await self.spend(0.001)
        for lease_id in lease_ids:
            self.segments.pop(lease_id, None)

    def _held(self, ticket: Ticket) -> bool:
        encoder = self.encoders[ticket.holder]
        return encoder.epoch == ticket.epoch and not encoder._died.is_set() and ticket.lease_id in encoder.leases

    async def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        while True:
            decode = StageLoad(self.running * 10, self.running, free_tokens=self.free_tokens)
            stages = {Stage.DECODE: decode} if self.role.serves(Stage.DECODE) else {}
            yield InstanceLoad(stages, self.drains, loras=tuple(self.loras.values()))
            await self.spend(0.05)


class Bench:
    """A router over fakes, under the loop that runs it."""

    def __init__(self, encoders: list[FakeEncoder], texts: list[FakeText], router: RouterService) -> None:
        self.encoders = encoders
        self.texts = texts
        self.router = router

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits, or is leased or reserved anywhere."""
        return (
            self.router.running == 0
            and self.router.cluster.machine.outstanding == 0
            and self.router.cluster.machine.leases == 0
            and not any(encoder.leases or encoder.working for encoder in self.encoders)
            and not any(text.running or text.segments for text in self.texts)
        )


@asynccontextmanager
async def bench(
    encoders: int = 2,
    texts: int = 1,
    *,
    arena_bytes: int = 1 << 20,
    settings: RouterSettings | None = None,
    profiles: Sequence[Profile] = (),
    prefills_early: bool = False,
    roles: Sequence[Role] = (),
) -> AsyncIterator[Bench]:
    """A router that has seen all instances, which run the parts of ``profiles``. Afterwards the instances that are alive must
    hold nothing. ``prefills_early``: what text instances say. With ``roles`` there is a text instance of each, and they transfer.
    """
    pool = [FakeEncoder(f"encoder-{number}", arena_bytes=arena_bytes) for number in range(encoders)]
    text_pool = [FakeText(f"text-{number}", pool, role=role) for number, role in enumerate(roles or (Role.PD,) * texts)]
    for text in text_pool if roles else ():
        text.kv_kind, text.transfers_kv = "kind", True
        text.peers = {peer.instance_id: peer for peer in text_pool}
    for text in text_pool:
        text.prefills_early = prefills_early
    instances: dict[str, Any] = {instance.instance_id: instance for instance in (*pool, *text_pool)}
    for instance in (*pool, *text_pool):
        instance.parts = tuple(
            ServedPart(profile.identity, 8) for profile in profiles if instance.role.stages & profile.identity.stages
        )
    world = virtual_world("router")
    async with world.scope:
        router = build(
            settings or RouterSettings(),
            world,
            membership=FixedMembership(instances),
            connect=instances.__getitem__,
            prepare=ModelPrepare(fake_prompt_builder(), MediaLimits(), Grammars(fake_tokenizer())),
            profiles=KnownProfiles(profiles),
        )
        await asyncio.sleep(0.1)
        made = Bench(pool, text_pool, router)
        yield made
        await asyncio.sleep(3)
        router.cluster.validate()
        for encoder in pool:
            if encoder._died.is_set():
                encoder.leases.clear()
        for text in text_pool:
            if text._died.is_set():
                text.segments.clear()
        assert made.idle
        router.close()


def ask(
    request_id: str,
    images: Sequence[bytes] = (),
    *,
    model: str = FAKE_MODEL.model_id,
    sampling: SamplingParams | None = None,
    timeout_s: float = 60.0,
) -> ChatRequest:
    parts: tuple[Part, ...] = (*(MediaPart(Modality.IMAGE, image) for image in images), TextPart("w5 w6"))
    return ChatRequest(
        request_id, model, (Message("user", parts),), sampling or SamplingParams(max_tokens=16), timeout_s=timeout_s
    )


def image(seed: int, side_px: int = 28) -> bytes:
    """An image of 28 pixels: 4 tokens, 128 bytes of embedding."""
    return png(side_px, side_px, seed=seed)


async def collect(router: RouterService, request: ChatRequest) -> list[ChatEvent]:
    return [event async for events in router.chat(request) for event in events]
