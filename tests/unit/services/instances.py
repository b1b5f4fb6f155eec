"""An encoder service and a text service in one process, under virtual time, with fake engines and in-memory pulls."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult
from triptych.domain.generation import Finished, Placement, Ready, TextRequest, TokenChunk
from triptych.domain.instance import ServedPart, StageLoad
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.profile import ProfileIdentity
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.policy.iteration import ImageBudget
from triptych.ports import Encoder
from triptych.runtime.tasks import TaskScope
from triptych.services.encoder import build as encoders
from triptych.services.encoder.embedding_files import EmbeddingFiles
from triptych.services.encoder.record import Record as EncoderRecord
from triptych.services.encoder.service import EncoderService, LoadedEncoder
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.text import build as texts
from triptych.services.text.build import Instance
from triptych.services.text.encoder_part import EncoderPart
from triptych.services.text.record import NO_RECORD, NO_SWITCH_RECORD, Record, SwitchRecord
from triptych.services.text.service import LoadedText, TextService
from triptych.services.text.settings import TextSettings
from triptych.testing.damage import DamagingDataPlane
from triptych.testing.fake_kv import Spliced, answer_tokens
from triptych.testing.fakes import (
    FAKE_MODEL,
    FAKE_PLACEHOLDER_ID,
    FakeEncoderEngine,
    FakePrepared,
    FakeTextEngine,
)
from triptych.testing.fakes import fake_embedding as embedding_of
from triptych.testing.model import fake_tokenizer
from triptych.tokens.grammar import Grammars
from triptych.transport.arena import HEADER_NBYTES
from triptych.transport.arena_store import ArenaStore
from triptych.transport.memory import BeforePull, MemoryNetwork
from triptych.transport.options import TransferOptions
from triptych.transport.receiver import TensorReceiver
from triptych.virtual.links import Link, LinkedInstance
from triptych.virtual.offload import InlineOffload
from triptych.virtual.virtual_time import run
from triptych.virtual.world import virtual_world

VOCABULARY = range(97, 123)
SLOT_NBYTES = 64 * 17
"""Slot of an item of 32 tokens: 1,024 bytes of embedding and two generation words, rounded up."""
ITEM_TOKENS = 32
LASTING_TASKS = 2
"""Background tasks of each service: the engine loop and the lease sweeper."""
_STAGES = frozenset({Stage.PREFILL, Stage.DECODE})
PART = ServedPart(
    ProfileIdentity(ModelPart.DECODER, "0" * 64, _STAGES, "fake", FAKE_MODEL.dtype), 64, token_budget=4096
)
ENCODER_IDENTITY = ProfileIdentity(ModelPart.ENCODER, "0" * 64, frozenset({Stage.ENCODE}), "fake", FAKE_MODEL.dtype)


class LetterDetokenizer:
    """A detokenizer with one letter per token."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def flush(self) -> str:
        return ""

    def show_special_tokens(self) -> None: ...

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


def encoder_settings(slots: int = 64, max_pull_s: float = 1.0, **settings: Any) -> EncoderSettings:
    """``slots``: how many embeddings of ITEM_TOKENS tokens the arena holds."""
    return EncoderSettings(
        model=Path("unused"),
        arena_bytes=HEADER_NBYTES + slots * SLOT_NBYTES,
        transfers=TransferOptions(max_pull_s=max_pull_s),
        **settings,
    )


def loaded_encoder(
    engine: FakeEncoderEngine, thread: InlineOffload | None = None, files: EmbeddingFiles | None = None
) -> LoadedEncoder[FakePrepared]:
    return LoadedEncoder(engine, ENCODER_IDENTITY, thread or InlineOffload(1), InlineOffload(2), 2, files)


@asynccontextmanager
async def encoder_instance(
    *,
    network: MemoryNetwork | None = None,
    engine: FakeEncoderEngine | None = None,
    instance_id: str = "encoder",
    epoch: int = 1,
    settle: bool = True,
    files: EmbeddingFiles | None = None,
    prepare_cores: int | None = None,
    **settings: Any,
) -> AsyncIterator[EncoderInstance]:
    """Checks at the end that nothing leaked. ``settings``: as ``encoder_settings``."""
    counts, world = FilesCount(), virtual_world(instance_id, epoch)
    engine = engine or FakeEncoderEngine(tokens_of=lambda info: 2 * info.width)
    loaded = replace(loaded_encoder(engine, files=files), prepare_cores=prepare_cores)
    plane = DamagingDataPlane(network or MemoryNetwork(), _nobody)
    async with encoders.build(encoder_settings(**settings), world, plane, loaded, record=counts) as built:
        instance = EncoderInstance(built.service, engine, built.store, world.scope, files=counts)
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
    """Of keys and values that it transfers."""
    lasting_tasks: int = LASTING_TASKS

    async def settled(self) -> None:
        """Waits until no request is left and nothing is pinned, and checks the invariants."""
        for _ in range(200):
            held = self.receiver.cache.pinned_bytes or (self.store is not None and self.store.memory.leases)
            if not held and not self.engine.has_work and len(self.scope) == self.lasting_tasks:
                break
            await asyncio.sleep(0.05)
        for load in self.service.load().stages.values():
            assert replace(load, free_tokens=None, served=None) == StageLoad(0, 0)
            assert load.free_tokens in (None, self.engine.kv_tokens)
        assert self.receiver.cache.pinned_bytes == 0
        assert len(self.scope) == self.lasting_tasks
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
    damage: Callable[[Ticket], bool] = lambda _: False,
    record: Record = NO_RECORD,
    **settings: Any,
) -> AsyncIterator[TextInstance]:
    """``slots``: how many embeddings of ITEM_TOKENS tokens the cache holds. ``kv_bytes``: size of the arena for keys and values
    that it transfers; 0 for none.

    Checks at the end that nothing leaked.
    """
    made = _instance(
        network,
        holders,
        instance_id=instance_id,
        engine=engine or FakeTextEngine(vocabulary=VOCABULARY, max_running=max_running),
        slots=slots,
        damage=damage,
        record=record,
        kv_arena_bytes=HEADER_NBYTES + kv_bytes if kv_bytes else 0,
        **settings,
    )
    async with made as (text, _):
        yield text


@asynccontextmanager
async def _instance(
    network: MemoryNetwork,
    holders: Sequence[Encoder],
    *,
    instance_id: str,
    engine: FakeTextEngine,
    slots: int,
    thread: InlineOffload | None = None,
    damage: Callable[[Ticket], bool] = lambda _: False,
    encoder: EncoderPart | None = None,
    record: Record = NO_RECORD,
    switch_record: SwitchRecord = NO_SWITCH_RECORD,
    **settings: Any,
) -> AsyncIterator[tuple[TextInstance, Instance]]:
    stubs = {address_of((await holder.describe()).instance_id): _stub(holder) for holder in holders}
    world = virtual_world(instance_id)
    built = texts.build(
        TextSettings(model=Path("unused"), image_cache_bytes=HEADER_NBYTES + slots * SLOT_NBYTES, **settings),
        world,
        DamagingDataPlane(network, stubs.__getitem__, damage),
        LoadedText(engine, PART, thread or InlineOffload(1), LetterDetokenizer, Grammars(fake_tokenizer()).start),
        encoder,
        record=record,
        switch_record=switch_record,
    )
    async with built as instance:
        text = TextInstance(instance.text, engine, instance.receiver, world.scope, instance.store, len(world.scope))
        yield text, instance
        await text.settled()


def _nobody(address: str) -> LinkedInstance:
    raise AssertionError(address)


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
        encoder_instance(network=network, **(encoder or {})) as encoder_side,
        text_instance(network, [encoder_side.service], **text) as text_side,
    ):
        yield Instances(encoder_side, text_side)


@dataclass
class HybridInstances(Instances):
    whole: Instance


@asynccontextmanager
async def hybrid_instances(
    *,
    role: Role = Role.EPD,
    budget: ImageBudget | None = None,
    engine: FakeTextEngine | None = None,
    vision: FakeEncoderEngine | None = None,
    at_once: bool = False,
    encoder: dict[str, Any] | None = None,
    **text: Any,
) -> AsyncIterator[HybridInstances]:
    """One instance, which encodes with batches of ``budget`` in the thread of its text engine, or ``at_once`` in its own."""
    thread, network = InlineOffload(1), MemoryNetwork()
    vision = vision or FakeEncoderEngine(tokens_of=lambda info: 2 * info.width)
    loaded = loaded_encoder(vision, None if at_once else thread)
    made = _instance(
        network,
        (),
        instance_id="hybrid",
        engine=engine or FakeTextEngine(vocabulary=VOCABULARY, max_running=64),
        slots=64,
        thread=thread,
        encoder=EncoderPart(encoder_settings(**(encoder or {})), loaded, budget),
        role=role,
        **text,
    )
    async with made as (made_text, whole):
        assert whole.encoder is not None
        built = whole.encoder
        both = EncoderInstance(built.service, vision, built.store, made_text.scope, made_text.lasting_tasks)
        yield HybridInstances(both, made_text, whole)
        await both.settled()


def under_virtual_time(scenario: Callable[[], Coroutine[Any, Any, None]], *, seed: int | None = None) -> None:
    """Runs a scenario of up to an hour of virtual time."""
    run(scenario(), seed=seed)
