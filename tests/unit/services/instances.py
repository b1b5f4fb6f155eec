"""An encoder service and a text service in one process, under virtual time, with fake engines and in-memory pulls."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

from triptych.domain.embedding import LeaseId
from triptych.domain.encoding import EncodeRequest, EncodeResult
from triptych.domain.generation import Finished, Placement, Ready, TextRequest, TokenChunk
from triptych.domain.instance import StageLoad
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import Stage
from triptych.machine.arena.leases import LeaseLimits
from triptych.machine.arena.published import PublishedContents
from triptych.machine.stage_states import StageStates
from triptych.policy.iteration import ImageBudget
from triptych.ports import Encoder
from triptych.runtime.tasks import TaskScope
from triptych.services.encoder.embedding_files import EmbeddingFiles
from triptych.services.encoder.file_tier import FileTier
from triptych.services.encoder.record import Record as EncoderRecord
from triptych.services.encoder.service import EncoderService
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.text.device_scheduler import DeviceScheduler, VisionEncoder
from triptych.services.text.kv_store import KvStore
from triptych.services.text.record import NO_RECORD, Record
from triptych.services.text.service import TextService
from triptych.services.text.settings import TextSettings
from triptych.testing.fake_kv import Spliced, answer_tokens
from triptych.testing.fakes import (
    FAKE_MODEL,
    FAKE_PLACEHOLDER_ID,
    FakeEncoderEngine,
    FakePrepared,
    FakeTextEngine,
)
from triptych.testing.fakes import fake_embedding as embedding_of
from triptych.testing.links import DamagingTransport, Link, LinkedInstance
from triptych.testing.model import fake_tokenizer
from triptych.testing.offload import InlineOffload
from triptych.testing.virtual_time import run
from triptych.tokens.grammar import Grammars
from triptych.transport.arena import HEADER_NBYTES, HostArena
from triptych.transport.arena_store import ArenaStore
from triptych.transport.memory import BeforePull, MemoryNetwork, MemoryTransport
from triptych.transport.peer_pool import PeerPool
from triptych.transport.receiver import TensorReceiver
from triptych.transport.releases import Releases
from triptych.transport.transport_set import TransportSet

VOCABULARY = range(97, 123)
SLOT_NBYTES = 64 * 17
"""Slot of an item of 32 tokens: 1,024 bytes of embedding and two generation words, rounded up."""
ITEM_TOKENS = 32
LASTING_TASKS = 2
"""Background tasks of each service: the engine loop and the lease sweeper."""


class LetterDetokenizer:
    """A detokenizer with one letter per token."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def flush(self) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


def media_of(name: str, *, width: int = 16) -> tuple[bytes, MediaInfo]:
    """An item that the fake engine can embed."""
    media = name.encode().ljust(40, b".")
    return media, MediaInfo(Modality.IMAGE, "png", width, 8, len(media), blake2b(media, digest_size=32).digest())


_leases = count(1)


def new_lease() -> LeaseId:
    return next(_leases).to_bytes(16, "big")


def encode_request(
    name: str,
    *,
    media: bytes | None = None,
    tokens: int = ITEM_TOKENS,
    width: int = 16,
    timeout_s: float = 30.0,
    lease_s: float = 30.0,
    tenant_salt: bytes = b"",
    leases: tuple[LeaseId, LeaseId] | None = None,
) -> EncodeRequest:
    own, info = media_of(name, width=width)
    reader_lease, router_lease = leases or (new_lease(), new_lease())
    return EncodeRequest(
        request_id="request",
        item=0,
        model=FAKE_MODEL.model_id,
        media=own if media is None else media,
        info=info,
        tokens=tokens,
        tenant_salt=tenant_salt,
        timeout_s=timeout_s,
        lease_s=lease_s,
        reader_lease=reader_lease,
        router_lease=router_lease,
    )


class FilesCount(EncoderRecord):
    """How often each outcome was."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()

    def file_read(self, outcome: str) -> None:
        self.reads[outcome] += 1

    def file_written(self, outcome: str) -> None:
        self.writes[outcome] += 1


@dataclass
class EncoderInstance:
    service: EncoderService[FakePrepared]
    engine: FakeEncoderEngine
    store: ArenaStore
    transport: MemoryTransport
    scope: TaskScope
    lasting_tasks: int = LASTING_TASKS
    files: FilesCount = field(default_factory=FilesCount)

    async def settled(self) -> None:
        """Waits until no lease is granted and nothing waits, and checks the invariants."""
        for _ in range(200):
            waits = self.store.memory.leases or self.service.load().at(Stage.ENCODE).pending
            if not waits and len(self.scope) == self.lasting_tasks:
                break
            await asyncio.sleep(0.05)
        assert self.store.memory.leases == 0
        assert self.store.memory.leased_bytes == 0
        assert self.service.load().at(Stage.ENCODE).pending == 0
        assert len(self.scope) == self.lasting_tasks
        self.service.validate()


@asynccontextmanager
async def encoder_instance(
    *,
    network: MemoryNetwork | None = None,
    engine: FakeEncoderEngine | None = None,
    instance_id: str = "encoder",
    epoch: int = 1,
    slots: int = 64,
    max_pull_s: float = 1.0,
    settle: bool = True,
    thread: InlineOffload | None = None,
    files: EmbeddingFiles | None = None,
    states: StageStates | None = None,
    **settings: Any,
) -> AsyncIterator[EncoderInstance]:
    """``slots``: how many embeddings of ITEM_TOKENS tokens the arena holds.

    Checks at the end that nothing leaked. With ``thread``, the text engine's, the caller runs the encoder's batches.
    """
    clock = asyncio.get_running_loop().time
    engine = engine or FakeEncoderEngine(tokens_of=lambda info: 2 * info.width)
    arena = HostArena(HEADER_NBYTES + slots * SLOT_NBYTES, instance_id=instance_id, epoch=epoch)
    copy = InlineOffload(2)
    store = ArenaStore(arena, LeaseLimits(), max_pull_s=max_pull_s, clock=clock, copy=copy)
    transport = MemoryTransport(network or MemoryNetwork(), arena, host="here", check=store.may_read)
    async with TaskScope(instance_id) as scope:
        counts = FilesCount()
        reads, writes = InlineOffload(2), InlineOffload()
        tier = None
        if files is not None:
            tier = FileTier(files, store, scope=scope, reads=reads, writes=writes, clock=clock, record=counts)
        service = EncoderService(
            engine,
            store,
            EncoderSettings(model=Path("unused"), **settings),
            offers=lambda: (transport.offer(),),
            scope=scope,
            prepare=InlineOffload(2),
            max_preparing=2,
            compute=thread or InlineOffload(1),
            copy=copy,
            clock=clock,
            files=tier,
            states=states,
        )
        service.start(runs_batches=thread is None)
        lasting_tasks = LASTING_TASKS - (thread is not None)
        instance = EncoderInstance(service, engine, store, transport, scope, lasting_tasks, counts)
        yield instance
        if settle:
            await instance.settled()


@dataclass
class TextInstance:
    service: TextService
    engine: FakeTextEngine
    receiver: TensorReceiver
    scope: TaskScope
    store: ArenaStore | None = None
    """Of keys and values that it hands over."""

    async def settled(self) -> None:
        """Waits until no request is left and nothing is pinned, and checks the invariants."""
        for _ in range(200):
            held = self.receiver.cache.pinned_bytes or (self.store is not None and self.store.memory.leases)
            if not held and not self.engine.has_work and len(self.scope) == LASTING_TASKS:
                break
            await asyncio.sleep(0.05)
        for one in self.service.load().stages.values():
            assert replace(one, free_tokens=None, served=None) == StageLoad(0, 0)
            assert one.free_tokens in (None, self.engine.kv_tokens)
        assert self.receiver.cache.pinned_bytes == 0
        assert len(self.scope) == LASTING_TASKS
        self.service.validate()


@asynccontextmanager
async def text_instance(
    network: MemoryNetwork,
    holders: Sequence[Encoder],
    *,
    instance_id: str = "text",
    engine: FakeTextEngine | None = None,
    kv_bytes: int = 0,
    max_running: int = 64,
    slots: int = 64,
    damage: Callable[[object], bool] = lambda _: False,
    thread: InlineOffload | None = None,
    vision_encoder: VisionEncoder | None = None,
    budget: ImageBudget | None = None,
    record: Record = NO_RECORD,
    states: StageStates | None = None,
    **settings: Any,
) -> AsyncIterator[TextInstance]:
    """``slots``: how many embeddings of ITEM_TOKENS tokens the cache holds. ``kv_bytes``: size of the arena for keys and values
    that it hands over; 0 for none.

    Checks at the end that nothing leaked. The batches of ``vision_encoder`` run within ``budget`` in the engine's ``thread``.
    """
    clock = asyncio.get_running_loop().time
    engine = engine or FakeTextEngine(vocabulary=VOCABULARY, max_running=max_running)
    said = TextSettings(model=Path("unused"), **settings)
    arena = HostArena(HEADER_NBYTES + slots * SLOT_NBYTES, instance_id=instance_id, epoch=1, part="pulled")
    inner = MemoryTransport(network, arena, host="here", check=lambda *_: False)
    transports = TransportSet((DamagingTransport(inner, damage),), connect_timeout_s=said.connect_timeout_s)
    stubs = {address_of((await one.describe()).instance_id): _stub(one) for one in holders}
    peers = PeerPool(lambda address: stubs[address], transports.connect, limit=8, clock=clock)
    store = None
    if kv_bytes:
        held = HostArena(HEADER_NBYTES + kv_bytes, instance_id=instance_id, epoch=1)
        limits, max_pull_s = LeaseLimits(), said.transfers.max_pull_s
        store = ArenaStore(held, limits, max_pull_s=max_pull_s, clock=clock, copy=InlineOffload(1))
        offering = MemoryTransport(network, held, host="here", check=store.may_read)
    kind = None if engine.kv is None else engine.kv.kind
    async with TaskScope(instance_id) as scope:
        receiver = TensorReceiver(
            arena=arena,
            transport=transports,
            peers=peers,
            releases=Releases(peers, scope=scope, timeout_s=said.release_timeout_s),
            limits=said.tensor_cache,
            pulls=said.pulls,
            max_pull_s=said.transfers.max_pull_s,
            scope=scope,
            offload=InlineOffload(2),
            clock=clock,
        )
        service = TextService(
            engine,
            receiver,
            said,
            offers=transports.offers if store is None else lambda: (offering.offer(),),
            new_detokenizer=LetterDetokenizer,
            new_grammar=Grammars(fake_tokenizer()).start,
            scope=scope,
            offload=InlineOffload(1),
            engine_thread=thread or InlineOffload(1),
            rng=random.Random(2),
            clock=clock,
            record=record,
            scheduler=None
            if vision_encoder is None
            else DeviceScheduler(
                engine, vision_encoder, budget, said.encode_patience_s, clock, encode_first=said.encode_first
            ),
            kv=None
            if store is None or kind is None
            else KvStore(
                store,
                kind,
                shared=False,
                rng=random.Random(3),
                clock=clock,
                published=PublishedContents(1000) if said.kv_prefixes else None,
            ),
            states=states,
        )
        service.start()
        instance = TextInstance(service, engine, receiver, scope, store)
        yield instance
        await instance.settled()
    await peers.close()


def _stub(encoder: Encoder) -> LinkedInstance:
    near = Link("encoder", encoder, latency_s=lambda: 0.0)
    return encoder if isinstance(encoder, LinkedInstance) else LinkedInstance(near)


@dataclass
class Asked:
    """A request and its expected answer."""

    request: TextRequest
    expected: tuple[int, ...]


def question(
    name: str,
    results: Sequence[tuple[str, EncodeResult]],
    *,
    max_tokens: int = 64,
    stop: tuple[str, ...] = (),
    timeout_s: float = 60.0,
) -> Asked:
    """``results``: the items' names and embeddings, in the order of the prompt."""
    token_ids: list[int] = [ord(letter) for letter in name]
    placements: list[Placement] = []
    spliced: list[Spliced] = []
    for item, (media_name, result) in enumerate(results):
        start, tokens = len(token_ids), result.ticket.tokens
        placements.append(Placement(item, start, result.ticket))
        token_ids += [FAKE_PLACEHOLDER_ID] * tokens + [7]
        embedding = embedding_of(media_of(media_name)[0], tokens, FAKE_MODEL.hidden_size)
        spliced.append(Spliced(start, tokens, embedding))
    request = TextRequest(
        name,
        FAKE_MODEL.model_id,
        tuple(token_ids),
        tuple(placements),
        SamplingParams(max_tokens=max_tokens, stop=stop),
        timeout_s,
    )
    return Asked(request, answer_tokens(token_ids, spliced, vocabulary=VOCABULARY)[:max_tokens])


@dataclass
class Answered:
    ready: Ready
    token_ids: tuple[int, ...]
    text: str
    finished: Finished


async def answer(service: TextService, request: TextRequest) -> Answered:
    """The whole stream, concatenated."""
    async with aclosing(service.generate(request)) as stream:
        events = [event async for together in stream for event in together]
    ready, *chunks, finished = events
    assert isinstance(ready, Ready)
    assert isinstance(finished, Finished)
    tokens: list[int] = []
    text = ""
    for chunk in chunks:
        assert isinstance(chunk, TokenChunk)
        tokens += chunk.token_ids
        text += chunk.text
    return Answered(ready, tuple(tokens), text, finished)


async def encode_and_keep_only_tickets(instance: EncoderInstance, *names: str) -> list[tuple[str, EncodeResult]]:
    """Encodes items and releases the caller's own leases: only those of the readers are left."""
    results = await asyncio.gather(*(instance.service.encode(encode_request(name)) for name in names))
    await instance.service.release([result.router_lease for result in results])
    return [(name, addressed(result)) for name, result in zip(names, results, strict=True)]


def address_of(instance_id: str) -> str:
    """The address at which the readers of these tests call an encoder."""
    return f"{instance_id}:50061"


def addressed(result: EncodeResult) -> EncodeResult:
    """The ticket with the holder's address, as the router forwards it."""
    return replace(result, ticket=replace(result.ticket, address=address_of(result.ticket.holder)))


@dataclass
class Instances:
    encoder: EncoderInstance
    text: TextInstance


@asynccontextmanager
async def instances(
    *, before_pull: BeforePull | None = None, encoder: dict[str, Any] | None = None, **text: Any
) -> AsyncIterator[Instances]:
    network = MemoryNetwork(before_pull)
    async with (
        encoder_instance(network=network, **(encoder or {})) as one,
        text_instance(network, [one.service], **text) as two,
    ):
        yield Instances(one, two)


@asynccontextmanager
async def hybrid_instances(
    *, budget: ImageBudget | None = None, encoder: dict[str, Any] | None = None, **text: Any
) -> AsyncIterator[Instances]:
    """Both in one process and one thread, with batches scheduled by the text service's loop."""
    network, thread = MemoryNetwork(), InlineOffload(1)
    async with (
        encoder_instance(network=network, thread=thread, **(encoder or {})) as one,
        text_instance(
            network, [one.service], thread=thread, vision_encoder=one.service.batcher, budget=budget, **text
        ) as two,
    ):
        yield Instances(one, two)


def under_virtual_time(scenario: Callable[[], Coroutine[Any, Any, None]], *, seed: int | None = None) -> None:
    """Runs a scenario of up to an hour of virtual time."""
    run(scenario(), seed=seed)
