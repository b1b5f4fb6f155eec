"""The whole system in one process: the real services, machines and policies over fake engines and unreliable links."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.router_client import LocalRouter
from tests.simulation.held import HeldLeases, WatchedInstance
from tests.simulation.scaling import (
    FaultyProcesses,
    OrderBook,
    ScalerLink,
    SharedStore,
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
from triptych.families.base import Family
from triptych.machine.process_pools import RestartRules
from triptych.policy.iteration import ImageBudget
from triptych.rpc.routers import Routers
from triptych.runtime.manager_access import ManagerAccess
from triptych.runtime.profiles import KnownProfiles
from triptych.runtime.registrar import Registrar, SetStages
from triptych.runtime.tasks import TaskScope
from triptych.runtime.world import World as ProcessWorld
from triptych.scaling.processes import ProcessScaler
from triptych.services.encoder import build as encoders
from triptych.services.encoder.build import BuiltEncoder
from triptych.services.encoder.embedding_files import EmbeddingFiles
from triptych.services.encoder.service import EncoderService, LoadedEncoder
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.pool_manager import build as managers
from triptych.services.pool_manager.settings import PoolManagerSettings
from triptych.services.router import build as routers
from triptych.services.router.build import managed_membership
from triptych.services.router.prepare import ModelPrepare
from triptych.services.router.service import RouterService
from triptych.services.router.settings import RouterSettings
from triptych.services.text import build as texts
from triptych.services.text.build import Instance
from triptych.services.text.encoder_part import EncoderPart
from triptych.services.text.service import LoadedText, TextService
from triptych.services.text.settings import TextSettings
from triptych.services.text.switching import Switching
from triptych.sim.processes import DRAIN_S
from triptych.testing.damage import DamagingDataPlane
from triptych.testing.fakes import FAKE_MODEL, FakeEncoderEngine, FakePrepared, FakeTextEngine
from triptych.testing.model import WORDS, FakeFamily, fake_prompt_builder, fake_tokenizer
from triptych.testing.store import StoreLink
from triptych.tokens.detokenize import IncrementalDetokenizer
from triptych.tokens.grammar import Grammars
from triptych.transport.arena import HEADER_NBYTES
from triptych.transport.arena_store import ArenaStore
from triptych.transport.data_plane import DataPlane
from triptych.transport.memory import MemoryNetwork
from triptych.transport.receiver import TensorReceiver
from triptych.virtual.links import Fault, Link, LinkedInstance, LinkedPoolManager
from triptych.virtual.offload import InlineOffload
from triptych.virtual.world import virtual_world

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
    """Of text instances that do not encode, for keys and values that they transfer; 0 for none."""
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

    instance: Any
    """The servicer of this incarnation."""
    set_stages: SetStages | None = None
    """How it obeys an order to switch, if it can."""

    def __init__(self, name: str, cluster: "SimCluster") -> None:
        self.name = name
        self.epoch = 0
        self.is_up = False
        self.drained = False
        self.clock_ahead_s = 0.0
        """How far its clock is ahead of the others'."""
        self._cluster = cluster
        self._life = AsyncExitStack()
        """What ends with this incarnation."""
        self._registrar: Registrar | None = None
        self._inbound: list[Link[Any]] = []
        self._outbound: dict[str, Link[Any]] = {}

    def clock(self) -> float:
        """Of this process."""
        return self._cluster.clock() + self.clock_ahead_s

    async def start(self) -> None:
        """Start another incarnation, with empty memory."""
        self.epoch += 1
        self.is_up, self.drained = True, False
        self._outbound = {}
        cluster = self._cluster
        process = virtual_world(self.name, self.epoch, rng=cluster.rng(f"{self.name}.{self.epoch}"), clock=self.clock)
        await self._build(process, DamagingDataPlane(cluster.network, self._holder, cluster.world.damage))
        for link in self._inbound:
            link.restart(self.instance)
        if cluster.managers:
            self._register(process.scope)

    async def _build(self, process: ProcessWorld, data_plane: DataPlane) -> None:
        """Build the services, until ``_life`` ends."""
        raise NotImplementedError

    def _holder(self, address: str) -> LinkedInstance:
        if address not in self._outbound:
            name = self._cluster.name_at(address)
            self._outbound[address] = self._cluster.link(f"{self.name}->{address}", self._cluster.processes[name])
        return LinkedInstance(self._outbound[address])

    def _register(self, scope: TaskScope) -> None:
        instance, address = self.instance, f"{self.name}:1"

        async def introduce() -> Registration:
            return Registration.of_instance(await instance.describe(), address=address)

        way = partial(self._cluster.way_to_manager, self.name)
        access = self._cluster.access
        self._registrar = Registrar(
            instance,
            introduce,
            self.drain,
            way,
            access,
            scope,
            set_stages=self.set_stages,
            set_limits=instance.live_limits.set,
        )
        self._registrar.start()

    async def drain(self) -> None:
        """As on SIGTERM, or ordered by a pool manager."""
        await self.instance.drain()
        self.drained = True

    @property
    def links(self) -> list[Link[Any]]:
        """Ways that end when this instance does: from others to it, and from it to others."""
        return [*self._inbound, *self._outbound.values()]

    def reached_by(self, link: Link[Any]) -> None:
        """Add a way to it."""
        self._inbound.append(link)

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
        await self._life.aclose()


class EncoderNode(_Node):
    """An encoder process."""

    engine: FakeEncoderEngine
    built: BuiltEncoder

    async def _build(self, process: ProcessWorld, data_plane: DataPlane) -> None:
        self.engine = self._cluster.engines.encoder(self.name)
        part = self._cluster.encoder_part(self.name, self.engine, InlineOffload())
        building = encoders.build(part.settings, process, data_plane, part.loaded)
        self.built = await self._life.enter_async_context(building)
        self.instance = self.service

    @property
    def service(self) -> EncoderService[FakePrepared]:
        return self.built.service

    @property
    def store(self) -> ArenaStore:
        return self.built.store


class TextNode(_Node):
    """A process of any other role, with its own links to the holders named by tickets."""

    engine: FakeTextEngine
    built: Instance

    def __init__(self, name: str, cluster: "SimCluster", role: Role = Role.PD, switchable: Role | None = None) -> None:
        super().__init__(name, cluster)
        self.role = role
        self.switchable = switchable
        self.encoder = MountedEncoder(self)
        """Of a role with E."""

    async def _build(self, process: ProcessWorld, data_plane: DataPlane) -> None:
        cluster, world = self._cluster, self._cluster.world
        settings = TextSettings(
            model=Path(),
            role=self.role,
            switchable=self.switchable,
            image_cache_bytes=HEADER_NBYTES + world.text_arena_bytes,
            kv_arena_bytes=HEADER_NBYTES + world.kv_arena_bytes if world.kv_arena_bytes else 0,
            **world.text,
        )
        self.engine, thread, tokenizer = cluster.engines.text(self.name), InlineOffload(), fake_tokenizer()
        loaded = LoadedText(
            self.engine,
            ServedPart(cluster.profile_of(self.name, ModelPart.DECODER).identity, world.max_running, token_budget=4096),
            thread,
            partial(IncrementalDetokenizer, tokenizer),
            Grammars(tokenizer).start,
        )
        encoder = None
        if settings.widest.serves(Stage.ENCODE):
            self.encoder.engine = cluster.engines.encoder(self.name)
            encoder = cluster.encoder_part(self.name, self.encoder.engine, thread)
        building = texts.build(settings, process, data_plane, loaded, encoder)
        self.built = await self._life.enter_async_context(building)
        self.instance = self.built.service
        self.set_stages = None if self.built.switching is None else self.switching.set_stages

    @property
    def service(self) -> TextService:
        return self.built.text

    @property
    def receiver(self) -> TensorReceiver:
        return self.built.receiver

    @property
    def store(self) -> ArenaStore | None:
        """Of what it transfers, if it does not encode."""
        return self.built.store

    @property
    def switching(self) -> Switching:
        assert self.built.switching is not None
        return self.built.switching


class MountedEncoder:
    """The encoder of a process of other stages too."""

    engine: FakeEncoderEngine

    def __init__(self, node: TextNode) -> None:
        self.node = node
        self.name = node.name

    @property
    def is_up(self) -> bool:
        return self.node.is_up

    @property
    def _built(self) -> BuiltEncoder:
        assert self.node.built.encoder is not None
        return self.node.built.encoder

    @property
    def service(self) -> EncoderService[FakePrepared]:
        return self._built.service

    @property
    def store(self) -> ArenaStore:
        return self._built.store


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
    processes: FaultyProcesses
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
        cluster, scaled, clock = self._cluster, self._scaled, self._cluster.clock
        process = virtual_world(f"{self.name}.{self._incarnation}", self._incarnation)
        self._scope = process.scope
        profiles = KnownProfiles((cluster.encoder_profile, cluster.decoder_profile))
        self.service = managers.build(
            self._settings,
            process,
            hour=lambda: clock() / 3600,
            store=None if scaled is None else self.store,
            scaler=None if scaled is None else self.scaler,
            profiles=profiles if scaled is not None or cluster.world.profiled else None,
        )
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

    async def start(self) -> None:
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
        async with aclosing(
            self._link.stream("Chat", lambda router: router.chat(request), request.timeout_s)
        ) as answer:
            async for events in answer:
                yield events

    async def models(self) -> tuple[ModelInfo, ...]:
        return await self._link.call("Models", lambda router: router.models())


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
        self.degrees: dict[str, int] = {}
        """Tensor-parallel degrees of instances that a scaler has started."""
        self.profiles = KnownProfiles(self.profile_of(name, part) for part in ModelPart for name in ("", *world.slower))
        self.scaled = self._make_scaled() if world.scaled else None
        self.managers: dict[str, ManagerNode] = {}
        """By address."""
        for number in range(world.managers):
            self.managers[f"m{number}:1"] = ManagerNode(f"m{number}", self, self.scaled)
        self.access = ManagerAccess(tuple(self.managers)) if self.managers else ManagerAccess()
        self.hybrids = [TextNode(f"h{number}", self, world.hybrid_role) for number in range(world.hybrids)]
        first_roles = (Role.PD,) * world.switching + world.switching_from
        self.switching = [TextNode(f"s{number}", self, role, Role.EPD) for number, role in enumerate(first_roles)]
        self.encoders = [EncoderNode(f"e{number}", self) for number in range(world.encoders)]
        """Nodes of role E."""
        self.texts: list[TextNode] = [TextNode(f"t{number}", self) for number in range(world.texts)]
        self.texts += [TextNode(f"p{number}", self, Role.P) for number in range(world.prefills)]
        self.texts += [TextNode(f"d{number}", self, Role.D) for number in range(world.decodes)]
        self.texts += [*self.hybrids, *self.switching]
        self.names: dict[str, str] = {}
        """By address, where a test gives them other addresses."""
        self.processes: dict[str, EncoderNode | TextNode] = {}
        """All instances by name."""
        everyone: list[EncoderNode | TextNode] = [*self.encoders, *self.texts]
        self.processes.update((node.name, node) for node in everyone)
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
            settings, process = self.router_settings, virtual_world("router", clock=self.clock)
            way = partial(self.way_to_manager, "router")
            source = managed_membership(settings, process, FAKE_MODEL.model_id, way)
        self.source = source
        self.router: RouterService
        """The one that is always there, once the cluster has started."""
        self.routers: list[RouterNode] = []
        """Routers that can fail."""

    @property
    def encoding(self) -> list[EncoderNode | MountedEncoder]:
        """Everything that encodes, in a process of its own or of other stages too."""
        return [*self.encoders, *(node.encoder for node in (*self.hybrids, *self.switching))]

    @property
    def router_settings(self) -> RouterSettings:
        return RouterSettings(managers=self.access, **self.world.router)

    def encoder_part(self, name: str, engine: ports.EncoderEngine[Any], compute: InlineOffload) -> EncoderPart:
        """The encoder of a process, loaded."""
        world, workers = self.world, self.engines.prepare_workers
        settings = EncoderSettings(model=Path(), arena_bytes=HEADER_NBYTES + world.encoder_arena_bytes, **world.encoder)
        files = None
        if settings.embedding_files is not None:
            files = EmbeddingFiles(settings.embedding_files, settings.embedding_files_bytes)
        identity = self.profile_of(name, ModelPart.ENCODER).identity
        loaded = LoadedEncoder(engine, identity, compute, InlineOffload(workers), workers, files)
        return EncoderPart(settings, loaded, world.image_budget)

    def _register_router(self) -> None:
        slo = self.router_settings.slo

        async def introduce() -> Registration:
            return Registration(MemberKind.ROUTER, "router", 1, "router:1", FAKE_MODEL.model_id, slo=slo)

        way = partial(self.way_to_manager, "router")
        Registrar(
            self.router, introduce, self.router.drain, way, self.access, self.scope, windows=self.router.attainment
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
        if (degree := self.degrees.get(name, 1)) > 1:
            return replace(made, identity=replace(made.identity, tensor_parallel=degree))
        return made if slower == 1.0 else replace(made, identity=replace(made.identity, hardware=f"sim-{slower:g}"))

    async def boot(self, role: Role, name: str) -> None:
        """Start an instance, or another incarnation of one that has ended."""
        node = self.processes.get(name)
        if node is None and role is Role.E:
            node = EncoderNode(name, self)
            self.encoders.append(node)
        elif node is None:
            node = TextNode(name, self, role)
            self.texts.append(node)
            if role.serves(Stage.ENCODE):
                self.hybrids.append(node)
        self.processes[name] = node
        if self.scaled is not None and name not in self.degrees:
            pool = PoolName(FAKE_MODEL.model_id, role)
            self.degrees[name] = self.scaled.scaler.degree(str(pool)) or 1
        await node.start()

    def _make_scaled(self) -> Scaled:
        world, boot_s = self.world, self.rng("boot")
        processes = FaultyProcesses(
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
        return routers.build(
            self.router_settings,
            virtual_world(
                name,
                rng=self.rng(name),
                scope=self.scope if scope is None else scope,
                clock=clock or self.clock,
            ),
            membership=membership,
            connect=connect,
            prepare=ModelPrepare(
                fake_prompt_builder(self.engines.family), self.router_settings.media, Grammars(fake_tokenizer())
            ),
            profiles=self.profiles if self.world.profiled else None,
        )

    async def start_instances(self) -> None:
        for node in self.processes.values():
            await node.start()

    async def start(self, router: RouterService | None = None) -> None:
        """Returns when the routers have seen every instance. ``router``: in place of the one that is always there."""
        self.router = router or self.make_router(self.source, self.connect)
        self.routers += [RouterNode(f"router-{number}", self) for number in range(self.world.routers)]
        if self.managers:
            self._register_router()
        for service in (self.router, *(node.service for node in self.routers)):
            async with asyncio.timeout(10):
                while len((await service.readiness()).instances) < len(self.processes):  # noqa: ASYNC110  # virtual time
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
        for node in filter(lambda node: node.is_up, self.encoding):
            load = node.service.load().at(Stage.ENCODE)
            held[f"{node.name} leases"] = node.store.memory.leases
            held[f"{node.name} leased bytes"] = load.leased_bytes
            held[f"{node.name} pending"] = load.pending + load.pending_tokens
        for text in filter(lambda node: node.is_up, self.texts):
            state = text.service.load()
            if text.store is not None:
                held[f"{text.name} leases"] = text.store.memory.leases
                held[f"{text.name} leased bytes"] = text.store.memory.leased_bytes
            held[f"{text.name} requests"] = sum(stage.pending for stage in state.stages.values())
            held[f"{text.name} pinned bytes"] = text.receiver.cache.pinned_bytes
            held[f"{text.name} sequences"] = int(text.engine.has_work)
            held[f"{text.name} KV tokens"] = text.engine.kv_tokens - text.engine.kv_free_tokens
            held[f"{text.name} tokens"] = (
                sum(stage.pending_tokens for stage in state.stages.values()) + text.engine.pending_tokens
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
        for node in self.encoding:
            node.service.validate()
        for text in self.texts:
            text.service.validate()
        for switching in self.switching:
            switching.switching.validate()
        for manager in self.managers.values():
            manager.service.validate()

    async def close(self) -> None:
        for manager in self.managers.values():
            await manager.kill()
        for node in self.routers:
            await node.kill()
        self.router.close()
        await self.scope.close()
        for process in self.processes.values():
            await process.end()


@asynccontextmanager
async def running(world: World) -> AsyncIterator[SimCluster]:
    """A cluster that is ready, closed at the end. The invariants of all its machines are checked every second."""
    cluster = SimCluster(world)

    async def watch() -> None:
        while True:
            await asyncio.sleep(1)
            cluster.validate()

    try:
        await cluster.start_instances()
        await cluster.start()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch(), name="watch-invariants")
            yield cluster
            watching.cancel()
    finally:
        await cluster.close()
