"""The whole system in one process: the real services, machines and policies over fake engines and unreliable links."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.router_client import LocalRouter
from tests.simulation.held import HeldLeases, WatchedInstance
from tests.simulation.scaling import (
    DRAIN_S,
    OrderBook,
    ScalerLink,
    SharedStore,
    SimProcesses,
    process_scaler,
    profile_of_decoder,
    profile_of_encoder,
)
from triptych import ports
from triptych.domain.chat import ChatRequest
from triptych.domain.decision import Bounds
from triptych.domain.embedding import Ticket
from triptych.domain.generation import ChatEvent
from triptych.domain.instance import ModelInfo, ServedPart
from triptych.domain.membership import Member, MemberKind, MembershipSnapshot, MemberState
from triptych.domain.pool import Registration
from triptych.domain.profile import Profile
from triptych.domain.scaling import PoolName
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.errors import TriptychError
from triptych.families.base import Family
from triptych.machine.arena.published import PublishedContents
from triptych.machine.membership_view import ViewLimits
from triptych.machine.process_pools import RestartRules
from triptych.machine.stage_states import StageStates
from triptych.media.sniff import MediaLimits
from triptych.policy.iteration import ImageBudget
from triptych.rpc.routers import Routers
from triptych.runtime.managed_membership import ManagedMembership
from triptych.runtime.manager_access import ManagerAccess
from triptych.runtime.profiles import KnownProfiles
from triptych.runtime.registrar import Registrar, SetStages
from triptych.runtime.tasks import TaskScope
from triptych.scaling.processes import ProcessScaler
from triptych.services.encoder.embedding_files import EmbeddingFiles
from triptych.services.encoder.file_tier import FileTier
from triptych.services.encoder.service import EncoderService
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.pool_manager.service import PoolManagerService
from triptych.services.pool_manager.settings import PoolManagerSettings
from triptych.services.router.prepare import ModelPrepare
from triptych.services.router.service import RouterService
from triptych.services.router.settings import RouterSettings
from triptych.services.text.device_scheduler import DeviceScheduler
from triptych.services.text.encoder_part import OwnEncoder
from triptych.services.text.hybrid import HybridInstance
from triptych.services.text.kv_store import KvStore
from triptych.services.text.service import TextService
from triptych.services.text.settings import TextSettings
from triptych.services.text.switching import Switching
from triptych.testing.fakes import FAKE_MODEL, FakeEncoderEngine, FakePrepared, FakeTextEngine
from triptych.testing.links import DamagingTransport, Fault, Link, LinkedInstance, LinkedPoolManager
from triptych.testing.model import WORDS, FakeFamily, fake_prompt_builder, fake_tokenizer
from triptych.testing.offload import InlineOffload
from triptych.testing.store import StoreLink
from triptych.tokens.detokenize import IncrementalDetokenizer
from triptych.tokens.grammar import Grammars
from triptych.transport.arena import HEADER_NBYTES, HostArena
from triptych.transport.arena_store import ArenaStore
from triptych.transport.memory import MemoryNetwork, MemoryTransport
from triptych.transport.peer_pool import PeerPool
from triptych.transport.receiver import TensorReceiver
from triptych.transport.releases import Releases
from triptych.transport.transport_set import TransportSet

MIB = 1 << 20


@dataclass(frozen=True)
class Engines:
    """What instances run, where the fake engines are not enough. Of the model ``FAKE_MODEL.model_id``."""

    encoder: Callable[[str], Any]
    """A new ``ports.EncoderEngine`` of the instance with this name."""
    text: Callable[[str], Any]
    """A new ``ports.TextEngine``, likewise."""
    family: Family
    encoder_profile: Profile
    decoder_profile: Profile
    """What they cost."""
    prepare_workers: int = 2
    """Of each encoder."""


@dataclass
class World:
    """The parameters of a run besides its requests. Everything random in it is derived from ``seed``."""

    seed: int = 0
    encoders: int = 2
    texts: int = 1
    prefills: int = 0
    """Instances that only prefill."""
    decodes: int = 0
    """Instances that only decode."""
    hybrids: int = 0
    """Text instances that encode as well, beside the others."""
    hybrid_role: Role = Role.EPD
    switching: int = 0
    """Instances that can switch to any role, and begin with PD."""
    switching_from: tuple[Role, ...] = ()
    """More of these, by the roles that they begin with."""
    routers: int = 0
    """Routers that can fail, beside the one that is always there. Clients use them through ``SimCluster.clients``."""
    managers: int = 0
    """Pool managers, with which instances register and which the router follows; without one the test names members."""
    image_budget: ImageBudget | None = None
    """Of each of them."""
    encoder_arena_bytes: int = MIB
    text_arena_bytes: int = MIB
    kv_arena_bytes: int = MIB
    """Of text instances that do not encode, for keys and values that they hand over; 0 for none."""
    kv_tokens: int = FakeTextEngine.kv_tokens
    """KV memory of each text instance."""
    chunk_tokens: int = FakeTextEngine.chunk_tokens
    """Most tokens of a prompt that a text engine computes at once."""
    max_running: int = 64
    """Requests that a text engine computes together."""
    latency_s: tuple[float, float] = (0.0002, 0.002)
    fault: Callable[[str, str], Fault] = lambda link, method: Fault.NONE
    """Of each call, by the names of the link and the method."""
    before_pull: Callable[[str, Ticket], Any] | None = None
    damage: Callable[[Ticket], bool] = lambda ticket: False
    scaled: bool = False
    """The managers scale the encoders and text instances."""
    bounds: Bounds = Bounds(1, 64)  # noqa: RUF009 - immutable
    """Of the size of each pool."""
    boot_s: tuple[float, float] = (2.0, 6.0)
    """Time from the start of an instance until it is ready."""
    encode_token_s: float = 0.0002
    text_step_s: float = 0.005
    text_prefill_token_s: float = FakeTextEngine.prefill_token_s
    """Speed of the engines."""
    slower: Mapping[str, float] = field(default_factory=dict)
    """By instance, how many times as long its engines take as the others'."""
    pull_byte_s: float = 0.0
    """Time of a pull between two instances, without its messages."""
    profiled: bool = False
    """Routers and managers have the profiles of all engines."""
    engines: Engines | None = None
    """None: the fake ones, with answers that can be checked."""
    router: dict[str, Any] = field(default_factory=dict)
    """Settings that differ from their defaults; the same for the other three."""
    encoder: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)
    manager: dict[str, Any] = field(default_factory=dict)


class _Node:
    """One instance: a process that can be killed and started again."""

    def __init__(self, name: str, cluster: "SimCluster") -> None:
        self.name = name
        self.epoch = 0
        self.is_up = False
        self.drained = False
        self._cluster = cluster
        self._scope: TaskScope | None = None
        self._registrar: Registrar | None = None
        self.clock_ahead_s = 0.0
        """How far its clock is ahead of the others'."""
        self.instance: Any = None
        """The servicer of this incarnation."""
        self.set_stages: SetStages | None = None
        """How it obeys an order to switch, if it can."""
        self.links: list[Link[Any]] = []
        """Ways that end when this instance does: from others to it, and from it to others."""

    def clock(self) -> float:
        """Of this process."""
        return self._cluster.clock() + self.clock_ahead_s

    def register(self) -> None:
        """Register with the pool managers of the cluster, if it has any."""
        if self._scope is None or not self._cluster.managers:
            return
        instance, address = self.instance, f"{self.name}:1"

        async def introduce() -> Registration:
            return Registration.of_instance(await instance.describe(), address=address)

        access = ManagerAccess(tuple(self._cluster.managers))
        way = partial(self._cluster.way_to_manager, self.name)
        self._registrar = Registrar(
            instance, introduce, self.drain, way, access, self._scope, set_stages=self.set_stages
        )
        self._registrar.start()

    async def drain(self) -> None:
        """As on SIGTERM, or ordered by a pool manager."""
        await self.instance.drain()
        self.drained = True

    def _boot(self) -> TaskScope:
        self.epoch += 1
        self.is_up, self.drained = True, False
        self._scope = TaskScope(f"{self.name}.{self.epoch}")
        return self._scope

    def reached_by(self, link: Link[Any]) -> None:
        """Add a way to it."""
        self.links.append(link)

    def hang(self) -> None:
        """Nothing answers any more, as after SIGSTOP, but what runs inside goes on."""
        for link in (*self.links, *self._ways_to_managers()):
            link.stall()

    def go_on(self) -> None:
        for link in (*self.links, *self._ways_to_managers()):
            link.resume()

    def _ways_to_managers(self) -> list[Link[Any]]:
        managers = self._cluster.managers.values()
        return [manager.links[self.name] for manager in managers if self.name in manager.links]

    async def stop(self, drain_s: float) -> None:
        """As on SIGTERM: finish what runs, for at most ``drain_s``, say farewell, and end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self.drain()
        if self._registrar is not None:
            await self._registrar.leave()
        await self.kill()

    async def kill(self) -> None:
        """Kills it at once: unsent messages and unreleased leases are lost."""
        for link in self.links:
            link.kill()
        await self.end()

    async def end(self) -> None:
        self.is_up = False
        if self._scope is not None:
            await self._scope.close()


class EncoderNode(_Node):
    """An encoder process."""

    service: EncoderService[FakePrepared]
    store: ArenaStore
    engine: FakeEncoderEngine
    transport: MemoryTransport

    def __init__(self, name: str, cluster: "SimCluster") -> None:
        super().__init__(name, cluster)
        self.start()

    def start(self) -> None:
        """Starts another incarnation with empty memory."""
        self.open(self._boot(), self.epoch, InlineOffload())
        self.service.start()
        self.instance = self.service
        for link in self.links:
            link.restart(self.instance)
        self.register()

    def open(self, scope: TaskScope, epoch: int, compute: InlineOffload, states: StageStates | None = None) -> None:
        """Everything except starting the service."""
        cluster, world = self._cluster, self._cluster.world
        settings = EncoderSettings(model=Path(), **world.encoder)
        arena = HostArena(world.encoder_arena_bytes + HEADER_NBYTES, instance_id=self.name, epoch=epoch)
        self.engine = cluster.engines.encoder(self.name)
        workers = cluster.engines.prepare_workers
        copy = InlineOffload()
        self.store = ArenaStore(
            arena, settings.leases, max_pull_s=settings.transfers.max_pull_s, clock=self.clock, copy=copy
        )
        self.transport = MemoryTransport(cluster.network, arena, host="sim", check=self.store.may_read)
        files = None
        if settings.embedding_files is not None:
            files = FileTier(
                EmbeddingFiles(settings.embedding_files, settings.embedding_files_bytes),
                self.store,
                scope=scope,
                reads=InlineOffload(2),
                writes=InlineOffload(),
                clock=self.clock,
            )
        self.service = EncoderService(
            self.engine,
            self.store,
            settings,
            offers=lambda: (self.transport.offer(),),
            scope=scope,
            prepare=InlineOffload(workers),
            max_preparing=workers,
            compute=compute,
            copy=copy,
            clock=self.clock,
            part=ServedPart(
                cluster.profile_of(self.name, ModelPart.ENCODER).identity,
                settings.batches.max_batch_items,
                prepare_cores=workers,
            ),
            files=files,
            states=states,
        )

    async def end(self) -> None:
        self._cluster.network.leave(self.transport)
        await super().end()


class TextNode(_Node):
    """A text process with its own links to the encoders named by tickets."""

    service: TextService
    receiver: TensorReceiver
    engine: FakeTextEngine
    store: ArenaStore | None
    """Of what it hands over, if it does not encode."""

    def __init__(self, name: str, cluster: "SimCluster", role: Role = Role.PD, switchable: Role | None = None) -> None:
        super().__init__(name, cluster)
        self.role = role
        self.switchable = switchable
        self._inbound: list[Link[Any]] = []
        self.thread = InlineOffload()
        self.start()

    def start(self) -> None:
        """Starts another incarnation with empty memory."""
        self.open(self._boot(), self.epoch)
        self.instance = self.service
        for link in self._inbound:
            link.restart(self.instance)
        self.register()

    def open(
        self,
        scope: TaskScope,
        epoch: int,
        encoder: EncoderNode | None = None,
        states: StageStates | None = None,
    ) -> None:
        """All of it, started. ``encoder`` is in the same process; its batches run in the engine's thread."""
        cluster, world = self._cluster, self._cluster.world
        settings = TextSettings(model=Path(), role=self.role, switchable=self.switchable, **world.text)
        self.engine = cluster.engines.text(self.name)
        kind = self.engine.kv.kind
        is_holder = encoder is None and kind is not None and world.kv_arena_bytes > 0
        self.store = self._own_store(settings, epoch) if is_holder else None
        holds = encoder is not None or self.store is not None
        part = "pulled" if holds else ""
        arena = HostArena(world.text_arena_bytes + HEADER_NBYTES, instance_id=self.name, epoch=epoch, part=part)
        memory = MemoryTransport(cluster.network, arena, host="sim", check=lambda *_: False)
        transports = TransportSet(
            [DamagingTransport(memory, world.damage)], connect_timeout_s=settings.connect_timeout_s
        )
        offering = None
        if self.store is not None:
            offering = MemoryTransport(cluster.network, self.store.arena, host="sim", check=self.store.may_read)
        self._offering = offering
        self.links = [*self._inbound]
        self._outbound = dict[str, Link[Any]]()
        peers = PeerPool(
            self._stub,
            transports.connect,
            limit=64,
            clock=self.clock,
            own=None if encoder is None else (self.name, epoch, OwnEncoder(encoder.service, encoder.transport)),
        )
        self.receiver = TensorReceiver(
            arena=arena,
            transport=transports,
            peers=peers,
            releases=Releases(peers, scope=scope, timeout_s=settings.release_timeout_s),
            limits=settings.tensor_cache,
            pulls=settings.pulls,
            max_pull_s=settings.transfers.max_pull_s,
            scope=scope,
            offload=InlineOffload(settings.check_threads),
            clock=self.clock,
        )
        kv_store = self.store if encoder is None else encoder.store
        kv = None
        if kv_store is not None and kind is not None:
            rng = cluster.rng(f"segments of {self.name}.{epoch}")
            published = None
            if settings.kv_prefixes:
                published = PublishedContents(64) if encoder is None else encoder.service.published
            kv = KvStore(kv_store, kind, shared=encoder is not None, rng=rng, clock=self.clock, published=published)
        tokenizer = fake_tokenizer()
        scheduler = None
        if encoder is not None:
            vision_encoder = encoder.service.batcher
            scheduler = DeviceScheduler(
                self.engine,
                vision_encoder,
                world.image_budget,
                settings.encode_patience_s,
                self.clock,
                encode_first=settings.encode_first,
            )
        self.service = TextService(
            self.engine,
            self.receiver,
            settings,
            offers=transports.offers if offering is None else lambda: (offering.offer(),),
            new_detokenizer=lambda: IncrementalDetokenizer(tokenizer),
            new_grammar=Grammars(tokenizer).start,
            scope=scope,
            offload=InlineOffload(settings.check_threads),
            engine_thread=self.thread,
            rng=cluster.rng(self.name),
            clock=self.clock,
            scheduler=scheduler,
            part=ServedPart(
                cluster.profile_of(self.name, ModelPart.DECODER).identity, world.max_running, token_budget=4096
            ),
            kv=kv,
            states=states,
        )
        self.service.start()

    def _stub(self, address: str) -> LinkedInstance:
        if address not in self._outbound:
            name = self._cluster.name_at(address)
            encoder = next((node for node in self._cluster.encoders if node.name == name), None)
            node = encoder or self._cluster.processes[name]
            self._outbound[address] = self._cluster.link(f"{self.name}->{address}", node)
            self.links.append(self._outbound[address])
        return LinkedInstance(self._outbound[address])

    def _own_store(self, settings: TextSettings, epoch: int) -> ArenaStore:
        """For keys and values that it hands over."""
        arena = HostArena(self._cluster.world.kv_arena_bytes + HEADER_NBYTES, instance_id=self.name, epoch=epoch)
        max_pull_s = settings.transfers.max_pull_s
        return ArenaStore(arena, settings.leases, max_pull_s=max_pull_s, clock=self.clock, copy=InlineOffload())

    def reached_by(self, link: Link[Any]) -> None:
        self._inbound.append(link)
        self.links.append(link)

    async def end(self) -> None:
        if self._offering is not None:
            self._cluster.network.leave(self._offering)
        await super().end()


class _MountedEncoder(EncoderNode):
    """The encoder of a hybrid instance, which opens and closes it."""

    def start(self) -> None:
        """Does nothing: the hybrid instance starts it."""


class HybridNode(TextNode):
    """A text process that also encodes: one scope, one thread, one loop; killed as a whole."""

    switching: Switching
    """If it can switch."""

    def __init__(self, name: str, cluster: "SimCluster", role: Role, switchable: Role | None = None) -> None:
        self.encoder = _MountedEncoder(name, cluster)
        super().__init__(name, cluster, role, switchable)

    def start(self) -> None:
        """Starts another incarnation with empty memory."""
        self.thread = InlineOffload()
        scope = self._boot()
        states = None if self.switchable is None else StageStates(self.role, self.switchable)
        self.encoder.epoch, self.encoder.is_up = self.epoch, True
        self.encoder.open(scope, self.epoch, self.thread, states)
        self.encoder.service.start(runs_batches=False)
        self.encoder.instance = self.encoder.service
        for link in self.encoder.links:
            link.restart(self.encoder.instance)
        self.open(scope, self.epoch, self.encoder, states)
        if states is not None:
            self.switching = Switching(states, (self.service, self.encoder.service), clock=self.clock)
            self.set_stages = self.switching.set_stages
        settings = TextSettings(model=Path(), **self._cluster.world.text)
        self.instance = HybridInstance(self.service, self.encoder.service, settings)
        for link in self._inbound:
            link.restart(self.instance)
        self.register()

    def hang(self) -> None:
        super().hang()
        self.encoder.hang()

    def go_on(self) -> None:
        super().go_on()
        self.encoder.go_on()

    async def kill(self) -> None:
        for link in self.encoder.links:
            link.kill()
        await super().kill()

    async def end(self) -> None:
        await super().end()
        await self.encoder.end()


def _fake_engines(world: World) -> Engines:
    def encoder(name: str) -> FakeEncoderEngine:
        slower = world.slower.get(name, 1.0)
        return FakeEncoderEngine(
            tokens_of=FakeFamily().tokens,
            prepare_s=slower * FakeEncoderEngine.prepare_s,
            batch_s=slower * FakeEncoderEngine.batch_s,
            token_s=slower * world.encode_token_s,
        )

    def text(name: str) -> FakeTextEngine:
        slower = world.slower.get(name, 1.0)
        return FakeTextEngine(
            WORDS,
            max_running=world.max_running,
            kv_tokens=world.kv_tokens,
            chunk_tokens=world.chunk_tokens,
            step_s=slower * world.text_step_s,
            prefill_token_s=slower * world.text_prefill_token_s,
        )

    return Engines(
        encoder,
        text,
        FakeFamily(),
        encoder_profile=profile_of_encoder(
            FakeEncoderEngine.batch_s, world.encode_token_s, pull_byte_s=world.pull_byte_s
        ),
        decoder_profile=profile_of_decoder(world.text_step_s, world.text_prefill_token_s),
    )


@dataclass(frozen=True)
class Scaled:
    """What the pool managers of a cluster share, if they scale it."""

    store: SharedStore
    processes: SimProcesses
    scaler: ProcessScaler
    book: OrderBook


class ManagerNode:
    """A pool manager's process. Every caller has its own way to it, so that each can be cut off."""

    def __init__(self, name: str, cluster: "SimCluster", scaled: Scaled | None) -> None:
        self.name = name
        self._cluster = cluster
        self.links: dict[str, Link[Any]] = {}
        """By caller."""
        self.is_up = False
        self._incarnation = 0
        self._scaled = scaled
        self._settings = PoolManagerSettings(allow_network=True, **cluster.world.manager)
        if scaled is not None:
            self.store = StoreLink(scaled.store)
            self.scaler = ScalerLink(
                name, scaled.scaler, scaled.book, rng=cluster.rng(f"orders of {name}"), scope=cluster.scope
            )
        self.start()

    def start(self) -> None:
        """Another incarnation, which knows nobody."""
        self._incarnation += 1
        self.is_up = True
        self._scope = TaskScope(f"{self.name}.{self._incarnation}")
        own: dict[str, Any] = {}
        if self._scaled is not None or self._cluster.world.profiled:
            own["profiles"] = KnownProfiles((self._cluster.encoder_profile, self._cluster.decoder_profile))
        if self._scaled is not None:
            own |= {"store": self.store, "scaler": self.scaler, "owner": f"{self.name}.{self._incarnation}"}
        self.service = PoolManagerService(
            self._settings, incarnation=self._incarnation, clock=self._cluster.clock, scope=self._scope, **own
        )
        self.service.start()
        for link in self.links.values():
            link.restart(self.service)

    def start_again(self) -> None:
        """Unless it is up."""
        if not self.is_up:
            self.start()

    async def kill(self) -> None:
        """At once: its lease is not given back."""
        self.is_up = False
        for link in self.links.values():
            link.kill()
        if self._scaled is not None:
            self.store.cut = True
        await self._scope.close()
        if self._scaled is not None:
            self.store.cut = False

    @property
    def leads(self) -> bool:
        return self.service.control.leading.leads

    def hang(self) -> None:
        """Nothing answers any more."""
        for link in self.links.values():
            link.stall()

    def pause(self) -> None:
        """As by SIGSTOP in the middle of an order: that arrives when it goes on."""
        self.hang()
        self.store.cut = True
        self.scaler.hold()

    def go_on(self) -> None:
        for link in self.links.values():
            link.resume()
        if self._scaled is not None:
            self.store.cut = False
            self.scaler.let_go()

    def way(self, caller: str) -> LinkedPoolManager:
        if caller not in self.links:
            self.links[caller] = Link(f"{caller}->{self.name}", self.service)
        return LinkedPoolManager(self.links[caller])


BROKEN_SHARE = 0.1
"""Of the calls to a ``RouterNode`` that is alive: those whose connection breaks after the first events."""


class RouterNode(LocalRouter):
    """A router's process with its connections, and its callers' connection to it (``RouterClient``)."""

    def __init__(self, name: str, cluster: "SimCluster") -> None:
        self.name = name
        self._cluster = cluster
        self._rng = cluster.rng(f"connections to {name}")
        self.continues = True
        self.clock_ahead_s = 0.0
        """How far its clock is ahead of the others'."""
        self._was_broken = False
        self._epoch = 0
        self._outbound: list[Link[Any]] = []
        self._start()
        self._link = Link(f"gateway->{name}", self.service, fault=self._fault)

    def _fault(self, method: str) -> Fault:
        """Never two calls in a row: a request that loses too many routers is given up (``router_attempts.MOST_BREAKS``)."""
        self._cluster.decisions.append((self._cluster.clock(), self._link.name, method))
        if method == "Chat":
            self._was_broken = not self._was_broken and self._rng.random() < BROKEN_SHARE
        return Fault.REPLY_LOST if method == "Chat" and self._was_broken else Fault.NONE

    def _start(self) -> None:
        self.is_up, self.drained, self._scope, self._outbound = True, False, TaskScope(self.name), []
        self._epoch += 1
        self.holds = HeldLeases()
        self.service = self._cluster.make_router(
            self._cluster.source, self._connect, name=f"{self.name}.{self._epoch}", scope=self._scope, clock=self.clock
        )
        self.service.start()

    def clock(self) -> float:
        """Of this process."""
        return self._cluster.clock() + self.clock_ahead_s

    def _connect(self, address: str) -> LinkedInstance:
        node = self._cluster.processes[address]
        self._outbound.append(self._cluster.link(f"{self.name}->{address}", node))
        return self._cluster.watched(self._outbound[-1], node, self.holds, self)

    @property
    def links(self) -> list[Link[Any]]:
        """From its callers to it, and from it to instances."""
        return [self._link, *self._outbound]

    def start(self) -> None:
        """Starts another incarnation, which knows nothing."""
        self._start()
        self._link.restart(self.service)

    def hang(self) -> None:
        """Nothing answers any more, as after SIGSTOP, but what runs inside goes on."""
        for link in self.links:
            link.stall()

    def go_on(self) -> None:
        for link in self.links:
            link.resume()

    async def drain(self) -> None:
        """As on SIGTERM."""
        self.drained = True
        await self.service.drain()

    async def kill(self) -> None:
        """At once: its leases and calls are left to the instances."""
        self.is_up = False
        for link in self.links:
            link.kill()
        self.service.close()
        await self._scope.close()

    # --- RouterClient ------------------------------------------------------------------------------------------------

    @property
    def refused(self) -> bool:
        return not self.is_up

    @property
    def connected(self) -> bool:
        return self.is_up

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        async with aclosing(self._link.stream("Chat", lambda one: _told(one, request), request.timeout_s)) as answer:
            async for events in answer:
                yield events

    async def models(self) -> tuple[ModelInfo, ...]:
        return await self._link.call("Models", lambda one: one.models())


async def _told(service: RouterService, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
    try:
        async with aclosing(service.chat(request)) as answer:
            async for events in answer:
                yield events
    except TriptychError as error:
        error.sent_by_peer = True
        raise


class SimMembership:
    """``ports.Membership`` that a scenario changes during the run."""

    fault = ""

    def __init__(self, names: Iterable[str], has_left: Callable[[str], None] = lambda _: None) -> None:
        self.members = {name: Member(name) for name in names}
        self._has_left = has_left
        self.version = 1
        self._changed = asyncio.Event()

    def set(self, name: str, state: MemberState | None) -> None:
        """None: the source does not list it any more."""
        self.members.pop(name, None)
        if state is not None:
            self.members[name] = Member(name, state)
        if state is MemberState.LEFT:
            self._has_left(name)
        self.version += 1
        self._changed.set()

    async def snapshots(self) -> AsyncGenerator[MembershipSnapshot]:
        while True:
            version = self.version
            yield MembershipSnapshot(version, tuple(self.members.values()))
            while version == self.version:  # several may wait
                self._changed.clear()
                await self._changed.wait()


class SimCluster:
    """Encoders, text instances and a router. ``decisions`` logs every call on every link, with its time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock: ports.Clock = asyncio.get_running_loop().time
        self.decisions: list[tuple[float, str, str]] = []
        self.network = MemoryNetwork(world.before_pull or self._before_pull)
        self._latency = self.rng("latency")
        self.scope = TaskScope("router")
        """Of the router, and of what is outside of all processes."""
        self.engines = world.engines or _fake_engines(world)
        self.encoder_profile = self.engines.encoder_profile
        self.decoder_profile = self.engines.decoder_profile
        self.profiles = KnownProfiles(self.profile_of(name, part) for part in ModelPart for name in ("", *world.slower))
        self.scaled = self._make_scaled() if world.scaled else None
        self.managers: dict[str, ManagerNode] = {}
        """By address."""
        for number in range(world.managers):
            self.managers[f"m{number}:1"] = ManagerNode(f"m{number}", self, self.scaled)
        self.encoders = [EncoderNode(f"e{number}", self) for number in range(world.encoders)]
        text_role = Role.of(world.hybrid_role.stages - {Stage.ENCODE})
        self.hybrids = [HybridNode(f"h{number}", self, text_role) for number in range(world.hybrids)]
        first_roles = (Role.PD,) * world.switching + world.switching_from
        self.switching = [HybridNode(f"s{number}", self, role, Role.EPD) for number, role in enumerate(first_roles)]
        self.encoders += [node.encoder for node in (*self.hybrids, *self.switching)]
        self.texts: list[TextNode] = [TextNode(f"t{number}", self) for number in range(world.texts)]
        self.texts += [TextNode(f"p{number}", self, Role.P) for number in range(world.prefills)]
        self.texts += [TextNode(f"d{number}", self, Role.D) for number in range(world.decodes)]
        self.texts += [*self.hybrids, *self.switching]
        self.names: dict[str, str] = {}
        """By address, where a test gives them other addresses."""
        self.processes: dict[str, EncoderNode | TextNode] = {}
        """All instances by name."""
        everyone: list[EncoderNode | TextNode] = [*self.encoders, *self.texts]
        self.processes.update((node.name, node) for node in everyone if not isinstance(node, _MountedEncoder))
        if self.scaled is not None:
            for role, nodes in ((Role.E, self.encoders), (Role.PD, self.texts)):
                names = tuple(node.name for node in nodes)
                self.scaled.scaler.adopt(str(PoolName(FAKE_MODEL.model_id, role)), names)
            self.scope.spawn(self.scaled.scaler.run(), name="scaler", vital=True)
        self.holds = HeldLeases()
        """What the router that is always there has to release."""
        self.membership = SimMembership(self.processes, self.lose)
        source: ports.Membership = self.membership
        if self.managers:
            source = ManagedMembership(
                partial(self.way_to_manager, "router"),
                ManagerAccess(tuple(self.managers)),
                ViewLimits(),
                clock=self.clock,
                name="router",
                kinds=(MemberKind.INSTANCE,),
            )
        self.source = source
        self.router = self.make_router(source, self.connect)
        self.routers = [RouterNode(f"router-{number}", self) for number in range(world.routers)]
        """Those that can fail."""
        if self.managers:
            self._register_router()

    def _register_router(self) -> None:
        slo = RouterSettings(**self.world.router).slo

        async def introduce() -> Registration:
            return Registration(MemberKind.ROUTER, "router", 1, "router:1", FAKE_MODEL.model_id, slo=slo)

        access, way = ManagerAccess(tuple(self.managers)), partial(self.way_to_manager, "router")
        Registrar(
            self.router, introduce, self.router.drain, way, access, self.scope, windows=self.router.attainment
        ).start()

    async def _before_pull(self, reader: str, ticket: Ticket) -> None:
        if ticket.holder != reader and self.world.pull_byte_s:
            await asyncio.sleep(self.world.pull_byte_s * ticket.slot_nbytes)

    def profile_of(self, name: str, part: ModelPart) -> Profile:
        """The profile of an instance's encoder or decoder."""
        slower = self.world.slower.get(name, 1.0)
        if part is ModelPart.ENCODER:
            made = self.encoder_profile
            if slower != 1.0:
                made = profile_of_encoder(slower * FakeEncoderEngine.batch_s, slower * self.world.encode_token_s)
        else:
            made = self.decoder_profile
            if slower != 1.0:
                made = profile_of_decoder(slower * self.world.text_step_s, slower * self.world.text_prefill_token_s)
        return made if slower == 1.0 else replace(made, identity=replace(made.identity, hardware=f"sim-{slower:g}"))

    def boot(self, role: Role, name: str) -> None:
        """Start an instance, or another incarnation of one that has ended."""
        if (known := self.processes.get(name)) is not None:
            known.start()
        elif role is Role.E:
            self.processes[name] = encoder = EncoderNode(name, self)
            self.encoders.append(encoder)
        elif role is Role.EPD:
            self.processes[name] = hybrid = HybridNode(name, self, Role.PD)
            self.hybrids.append(hybrid)
            self.encoders.append(hybrid.encoder)
            self.texts.append(hybrid)
        else:
            self.processes[name] = text = TextNode(name, self, role)
            self.texts.append(text)

    def _make_scaled(self) -> Scaled:
        world, boot_s = self.world, self.rng("boot")
        processes = SimProcesses(
            self.boot,
            self._process,
            boot_s=lambda: boot_s.uniform(*world.boot_s),
            scope=self.scope,
        )
        pools = {PoolName(FAKE_MODEL.model_id, role): name for role, name in ((Role.E, "e{}"), (Role.PD, "t{}"))}
        rules = RestartRules(max_processes=world.bounds.most, grace_s=2 * DRAIN_S)
        scaler = process_scaler(processes, pools, clock=self.clock, rules=rules)
        return Scaled(
            SharedStore(clock=self.clock),
            processes,
            scaler,
            OrderBook(world.bounds, clock=self.clock, works=self._works),
        )

    def _process(self, name: str) -> EncoderNode | TextNode | None:
        return self.processes.get(name)

    def _works(self, name: str) -> bool:
        node = self.processes.get(name)
        return node is not None and node.is_up and not node.drained

    def connect(self, name: str) -> LinkedInstance:
        """The router's link to an instance."""
        node = self.processes[self.name_at(name)]
        return self.watched(self.link(f"router->{node.name}", node), node, self.holds)

    def watched(
        self, link: Link[Any], node: EncoderNode | TextNode, holds: HeldLeases, router: "RouterNode | None" = None
    ) -> WatchedInstance:
        """The way of a router, by default the one that is always there, to an instance."""
        membership = self.membership

        def epoch() -> int | None:
            member = membership.members.get(node.name)
            has_left = member is not None and member.state is MemberState.LEFT
            return None if has_left or not node.is_up or not (router is None or router.is_up) else node.epoch

        return WatchedInstance(link, node.name, holds, epoch)

    def lose(self, name: str) -> None:
        """Routers forget this instance at once."""
        for holds in (self.holds, *(router.holds for router in self.routers)):
            holds.lose(name)

    def name_at(self, address: str) -> str:
        """The instance with this address: its name, or its name and a port for those that register."""
        return self.names.get(address) or address.removesuffix(":1")

    def way_to_manager(self, caller: str, address: str) -> LinkedPoolManager:
        return self.managers[address].way(caller)

    def rng(self, name: str) -> Random:
        """A separate random source for each part, so that draws of one do not shift another's."""
        return Random(f"{self.world.seed}/{name}")

    def link(self, name: str, node: EncoderNode | TextNode) -> Link[Any]:
        """A link to an instance, whether it is up or not."""

        def fault(method: str) -> Fault:
            self.decisions.append((self.clock(), name, method))
            return self.world.fault(name, method)

        link: Link[Any] = Link(
            name, node.instance, latency_s=lambda: self._latency.uniform(*self.world.latency_s), fault=fault
        )
        node.reached_by(link)
        if not node.is_up:
            link.kill()
        return link

    def make_router(
        self,
        membership: ports.Membership,
        connect: Callable[[str], ports.InstanceClient],
        *,
        name: str = "router",
        scope: TaskScope | None = None,
        clock: ports.Clock | None = None,
    ) -> RouterService:
        """The cluster's router, or another with a name of its own, with the given links to its instances. With a ``scope``
        of its own it can be killed, and it may have a ``clock`` of its own.
        """
        return RouterService(
            membership,
            connect,
            settings=RouterSettings(**self.world.router),
            prepare=ModelPrepare(fake_prompt_builder(self.engines.family), MediaLimits(), Grammars(fake_tokenizer())),
            offload=InlineOffload(2),
            clock=clock or self.clock,
            scope=scope or self.scope,
            rng=self.rng(name),
            profiles=self.profiles if self.world.profiled else None,
        )

    async def start(self) -> None:
        """Returns when the routers have seen every instance."""
        self.router.start()
        for router in (self.router, *(node.service for node in self.routers)):
            async with asyncio.timeout(10):
                while len((await router.readiness()).instances) < len(self.processes):  # noqa: ASYNC110  # virtual time
                    await asyncio.sleep(0.01)

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[Routers]:
        """The routers that can fail, as a gateway or the SDK uses them."""

        def reach(name: str) -> RouterNode:
            return next(node for node in self.routers if node.name == name)

        routers = Routers(reach, self.rng("seeds"))
        routers.use(node.name for node in self.routers)
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(routers.keep_asking())
            await routers.asked()
            yield routers
            asking.cancel()

    async def check_nothing_is_held(self) -> None:
        """Raises AssertionError if something is left of finished requests.

        Leases whose release was lost expire after their duration and the longest pull; this waits for them.
        """
        for settle_s in (1.0, 100.0):
            await asyncio.sleep(settle_s)
            if not self.held():
                break
        self.validate()
        assert not self.held(), self.held()

    def held(self) -> dict[str, int]:
        """The nonzero counts of what the live routers and instances still hold."""
        held: dict[str, int] = {}
        for name, router in self._live_routers().items():
            held[f"{name} requests"] = router.running
            held[f"{name} credits"] = router.cluster.machine.outstanding
            held[f"{name} leases"] = router.cluster.machine.leases
            held[f"{name} media bytes"] = router.media_bytes
        for node in filter(lambda node: node.is_up, self.encoders):
            load = node.service.load().at(Stage.ENCODE)
            held[f"{node.name} leases"] = node.store.memory.leases
            held[f"{node.name} leased bytes"] = load.leased_bytes
            held[f"{node.name} pending"] = load.pending + load.pending_tokens
        for text in filter(lambda node: node.is_up, self.texts):
            state = text.service.load()
            if text.store is not None:
                held[f"{text.name} leases"] = text.store.memory.leases
                held[f"{text.name} leased bytes"] = text.store.memory.leased_bytes
            held[f"{text.name} requests"] = sum(one.pending for one in state.stages.values())
            held[f"{text.name} pinned bytes"] = text.receiver.cache.pinned_bytes
            held[f"{text.name} sequences"] = int(text.engine.has_work)
            held[f"{text.name} KV tokens"] = text.engine.kv_tokens - text.engine.kv_free_tokens
            held[f"{text.name} tokens"] = (
                sum(one.pending_tokens for one in state.stages.values()) + text.engine.pending_tokens
            )
        return {name: number for name, number in held.items() if number}

    def _live_routers(self) -> dict[str, RouterService]:
        return {"router": self.router} | {node.name: node.service for node in self.routers if node.is_up}

    def validate(self) -> None:
        """Checks the invariants of all machines."""
        for router in self._live_routers().values():
            router.cluster.validate()
        for holds in (self.holds, *(router.holds for router in self.routers)):
            assert not holds.forgotten, holds.forgotten
        for node in self.encoders:
            node.service.validate()
        for text in self.texts:
            text.service.validate()
        for one in self.switching:
            one.switching.validate()
        for manager in self.managers.values():
            manager.service.validate()

    async def close(self) -> None:
        for manager in self.managers.values():
            await manager.kill()
        for node in self.routers:
            await node.kill()
        self.router.close()
        await self.scope.close()
        for instance in (*self.texts, *self.encoders):
            await instance.end()


@asynccontextmanager
async def running(world: World) -> AsyncIterator[SimCluster]:
    """A cluster that is ready, closed at the end. The invariants of all its machines are checked every second."""
    cluster = SimCluster(world)

    async def watch() -> None:
        while True:
            await asyncio.sleep(1)
            cluster.validate()

    try:
        await cluster.start()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch(), name="watch-invariants")
            yield cluster
            watching.cancel()
    finally:
        await cluster.close()
