"""The services of a deployment in virtual time: built by their own composition roots, over links instead of gRPC."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from typing import Any

from triptych import ports
from triptych.domain.embedding import Ticket
from triptych.domain.instance import InstanceLoad, ServedPart
from triptych.domain.kv_segment import KV
from triptych.domain.membership import MemberKind
from triptych.domain.pool import Registration
from triptych.domain.scaling import Kind, PoolName
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.errors import InvalidRequest
from triptych.machine.process_pool_events import ProcessReady, StartProcess, StopProcess
from triptych.machine.process_pools import RestartRules
from triptych.policy.costs import Costs
from triptych.runtime.manager_access import ManagerAccess
from triptych.runtime.profiles import KnownProfiles
from triptych.runtime.registrar import Registrar, SetStages
from triptych.runtime.tasks import TaskScope
from triptych.runtime.world import World
from triptych.scaling.processes import ProcessScaler
from triptych.services.encoder import build as encoders
from triptych.services.encoder.service import LoadedEncoder
from triptych.services.pool_manager import build as managers
from triptych.services.router import build as routers
from triptych.services.router.build import managed_membership
from triptych.services.router.membership import FixedMembership
from triptych.services.text import build as texts
from triptych.services.text.encoder_part import EncoderPart
from triptych.services.text.service import LoadedText
from triptych.transport.data_plane import DataPlane, MemoryDataPlane
from triptych.transport.memory import MemoryNetwork
from triptych.virtual.links import Link, LinkedInstance, LinkedPoolManager
from triptych.virtual.offload import Cores, InlineOffload
from triptych.virtual.world import virtual_world

from .engines import Activity, SimEncoderEngine, SimTextEngine
from .host import Cost, Host, HostCores
from .memory import SparseArena
from .network import SharedLinks, Topology
from .outcome import Busy, Decision, InstanceUse
from .prepare import PlannedPrepare
from .processes import SimProcesses
from .scenario import Deployment, InstanceKind
from .shared_device import SharedDevice

MANAGER = "pool-manager:1"
_PORT = ":1"


class _SparseDataPlane(MemoryDataPlane):
    """Of instances whose arenas have no contents."""

    def arena(
        self, where: str, nbytes: int, *, instance_id: str, epoch: int, device: str, part: str = ""
    ) -> SparseArena:
        """In no memory at all."""
        del where, device
        return SparseArena(nbytes, instance_id=instance_id, epoch=epoch, part=part)


class _NoText:
    """``tokens.answer_text.Detokenizer`` of answers that nobody reads."""

    def feed(self, token_ids: Sequence[int]) -> str:
        del token_ids
        return ""

    def flush(self) -> str:
        return ""

    def show_special_tokens(self) -> None: ...

    def token_bytes(self, token_id: int) -> bytes:
        del token_id
        return b""


class Node:
    """One instance: a process that can be killed and started again."""

    def __init__(self, name: str, pool: Kind, cluster: "SimCluster") -> None:
        self.name = name
        self.pool = pool
        self.role = pool.role
        self.epoch = 0
        self.is_up = False
        self.service: Any = None
        """``ports.Encoder`` or ``ports.Text``, of this incarnation."""
        self.activity = Activity(name, keeps_spans=cluster.keeps_spans)
        self.uses: list[_Use] = []
        """Of each incarnation."""
        self._cluster = cluster
        self._life = AsyncExitStack()
        self._links: list[Link[Any]] = []
        self._outbound: dict[str, Link[Any]] = {}
        self._registrar: Registrar | None = None

    @property
    def kind(self) -> InstanceKind:
        return self._cluster.deployment.kinds[self.pool]

    @property
    def has_devices(self) -> bool:
        """Whether it computes on devices of its own."""
        return self._neighbour == self.name

    @property
    def _neighbour(self) -> str:
        """Whose devices it computes on."""
        return self._cluster.deployment.neighbour(self.name, self.role)

    async def start(self, ordered_s: float | None = None) -> None:
        """Start another incarnation, with empty memory. ``ordered_s``: from then on it has its devices; by default from now on."""
        cluster, kind = self._cluster, self.kind
        self.epoch, self.is_up = self.epoch + 1, True
        cluster.topology.enter(self.name, kind.devices, kind.link, kind.within_host, self._neighbour)
        self.uses.append(_Use(cluster.now_s if ordered_s is None else ordered_s, self.activity.until(cluster.now_s)))
        self._outbound = {}
        world = virtual_world(self.name, self.epoch, rng=cluster.rng(f"{self.name}.{self.epoch}"))
        data_plane = _SparseDataPlane(cluster.network, self._holder, cluster.topology.host(self.name))
        set_stages = await self._build(world, data_plane)
        for link in self._links:
            link.restart(self.service)
        if cluster.deployment.is_managed:
            self._register(world.scope, set_stages)

    async def _build(self, world: World, data_plane: DataPlane) -> SetStages | None:
        deployment, thread = self._cluster.deployment, InlineOffload(cores=self._cluster.cores_of(self._neighbour))
        if self.pool not in deployment.texts:
            part = self._encoder_part(thread)
            built = await self._life.enter_async_context(encoders.build(part.settings, world, data_plane, part.loaded))
            self.service = built.service
            return None
        settings = deployment.texts[self.pool]
        costs = Costs(self.kind.profiles[ModelPart.DECODER])
        engine = SimTextEngine(
            deployment.model,
            deployment.family,
            costs,
            settings.engine_options,
            self.activity,
            copied_bytes_per_s=self.kind.copied_bytes_per_s,
            beside=self._cluster.host.text,
            afterwards=self._cluster.run_afterwards,
        )
        limits = settings.engine_options
        part_served = ServedPart(costs.profile.identity, limits.max_sequences, token_budget=limits.most_step_tokens)
        loaded = LoadedText(engine, part_served, thread, _NoText, _refuse_grammars)
        encoder = self._encoder_part(thread) if settings.widest.serves(Stage.ENCODE) else None
        instance = await self._life.enter_async_context(texts.build(settings, world, data_plane, loaded, encoder))
        self.service = instance.service
        return None if instance.switching is None else self._noting(instance.switching.set_stages)

    def _noting(self, set_stages: SetStages) -> SetStages:
        """Note the orders to switch that are obeyed."""

        def switch(stages: frozenset[Stage], version: int, reason: str) -> None:
            set_stages(stages, version, reason)
            self._cluster.decide(f"{self.name} switches to role {Role.of(stages).value}: {reason}")

        return switch

    def _encoder_part(self, compute: InlineOffload) -> EncoderPart:
        deployment, kind = self._cluster.deployment, self.kind
        costs = Costs(kind.profiles[ModelPart.ENCODER])
        engine = SimEncoderEngine(
            deployment.model,
            deployment.family,
            costs,
            self.activity,
            bytes_per_pixel=deployment.bytes_per_pixel,
            beside=self._cluster.host.encoder,
            afterwards=self._cluster.run_afterwards,
        )
        workers = kind.prepare_cores
        prepare = InlineOffload(workers, self._cluster.cores)
        loaded = LoadedEncoder(engine, costs.profile.identity, compute, prepare, workers)
        return EncoderPart(deployment.encoder, loaded, deployment.image_budgets.get(self.pool))

    def _holder(self, address: str) -> LinkedInstance:
        if address not in self._outbound:
            self._outbound[address] = self._cluster.link(self.name, self._cluster.nodes[address.removesuffix(_PORT)])
        return LinkedInstance(self._outbound[address])

    def _register(self, scope: TaskScope, set_stages: SetStages | None) -> None:
        service, address = self.service, self.name + _PORT

        async def introduce() -> Registration:
            return Registration.of_instance(await service.describe(), address=address)

        cluster = self._cluster
        way = partial(cluster.way_to_manager, self.name)
        self._registrar = Registrar(
            service,
            introduce,
            self.drain,
            way,
            cluster.access,
            scope,
            set_stages=set_stages,
            set_limits=service.live_limits.set,
        )
        self._registrar.start()

    async def drain(self) -> None:
        """As on SIGTERM, or ordered by the pool manager."""
        await self.service.drain()

    def reached_by(self, link: Link[Any]) -> None:
        """Add a way to it, which ends with it."""
        self._links.append(link)
        if not self.is_up:
            link.kill()

    def hang(self) -> None:
        """Nothing answers any more, but what runs inside goes on."""
        for link in (*self._links, *self._outbound.values()):
            link.stall()

    def go_on(self) -> None:
        for link in (*self._links, *self._outbound.values()):
            link.resume()

    async def stop(self, drain_s: float) -> None:
        """As on SIGTERM: finish what runs, for at most ``drain_s``, say farewell, and end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self.drain()
        if self._registrar is not None:
            await self._registrar.leave()
        await self.kill()

    async def kill(self) -> None:
        """End at once: unsent messages and unreleased leases are lost."""
        for link in (*self._links, *self._outbound.values()):
            link.kill()
        await self.end()

    async def end(self) -> None:
        if self.is_up:
            self.is_up = False
            self._cluster.topology.leave(self.name, self.kind.devices)
            now_s = self._cluster.now_s
            self.uses[-1].end_s, self.uses[-1].after = now_s, self.activity.until(now_s)
        await self._life.aclose()

    def load(self) -> InstanceLoad:
        """Of one that is up."""
        load: InstanceLoad = self.service.load()
        return load

    def until(self, now_s: float) -> dict[Busy, float]:
        """Seconds by kind of work until now, of all incarnations."""
        return self.activity.until(now_s)

    def used(self, end_s: float) -> list[InstanceUse]:
        """What its incarnations did until ``end_s``."""
        uses: list[InstanceUse] = []
        for use in self.uses:
            after = self.activity.until(end_s) if use.after is None else use.after
            busy = {work: spent_s - use.before.get(work, 0.0) for work, spent_s in after.items()}
            until_s = end_s if use.end_s is None else use.end_s
            uses.append(self.kind.use(self.name, self.role, use.start_s, until_s, busy))
        return uses


@dataclass(slots=True)
class _Use:
    """One incarnation of an instance: when it had its devices, and how busy it had been until its beginning and end."""

    start_s: float
    before: Mapping[Busy, float]
    end_s: float | None = None
    after: Mapping[Busy, float] | None = None


class SimCluster:
    """Instances, a router, and a pool manager if anything is up to it. ``running`` makes one."""

    def __init__(self, deployment: Deployment, seed: int, *, requests: int, keeps_spans: bool) -> None:
        """``requests``: whose timelines the router keeps."""
        self.deployment = deployment
        self.keeps_spans = keeps_spans
        self._seed = seed
        self._clock = asyncio.get_running_loop().time
        self.scope = TaskScope("cluster")
        self.network = MemoryNetwork(self._before_pull)
        self.prepare = PlannedPrepare(deployment.family)
        self.nodes: dict[str, Node] = {}
        """By name."""
        self.topology = Topology(deployment.hosts)
        self.links = SharedLinks(self.topology.speeds)
        self.host = deployment.host or Host(inf)
        self.cores = None if deployment.host is None else HostCores(deployment.host)
        """What all processes share."""
        self._devices: dict[str, SharedDevice] = {}
        """By instances that share theirs."""
        for name, pool in deployment.instances.items():
            self.nodes[name] = Node(name, pool, self)
        self.access = ManagerAccess((MANAGER,) if deployment.is_managed else ())
        self.decisions: list[Decision] = []
        """What was started, stopped and switched, and why; times are the clock's."""
        self.manager: ports.PoolManager | None = None
        self.scaler: ProcessScaler | None = None
        self._processes: SimProcesses | None = None
        """If the pool manager starts and stops instances."""
        self._router_settings = deployment.router.model_copy(
            update={"managers": self.access, "history_requests": requests}
        )
        self.router: Any = None

    @property
    def now_s(self) -> float:
        return self._clock()

    def rng(self, name: str) -> Random:
        """A random source for each part, so that draws of one do not shift another's."""
        return Random(f"{self._seed}/{name}")  # noqa: S311 - nobody is to be kept out

    def cores_of(self, instance: str) -> Cores | None:
        """On what an instance's engines compute, with others; None if they have something of their own."""
        sharing = self.deployment.encoders_share
        if sharing is None or self.nodes[instance].role is not sharing.role:
            return self.cores
        if instance not in self._devices:
            self._devices[instance] = SharedDevice(sharing.speed)
        return self._devices[instance]

    async def _before_pull(self, reader: str, ticket: Ticket) -> None:
        if self.cores is not None and ticket.tensors[0].name != KV:
            await self.cores.run_in_loop(reader, self.host.text.item)
        if ticket.holder == reader:
            return
        began_s = self.now_s
        await self.links.transfer(self.topology.path(ticket.holder, reader), ticket.slot_nbytes)
        self.nodes[reader].activity.pulled(began_s, self.now_s, ticket.slot_nbytes)

    def link(self, caller: str, node: Node) -> Link[Any]:
        control_s = self.deployment.control_s
        link: Link[Any] = Link(f"{caller}->{node.name}", node.service, latency_s=lambda: control_s)
        node.reached_by(link)
        return link

    def _connect(self, address: str) -> LinkedInstance:
        return LinkedInstance(self.link("router", self.nodes[address.removesuffix(_PORT)]))

    def way_to_manager(self, caller: str, address: str) -> LinkedPoolManager:
        del address
        control_s = self.deployment.control_s
        assert self.manager is not None  # noqa: S101 - is_managed
        return LinkedPoolManager(Link(f"{caller}->{MANAGER}", self.manager, latency_s=lambda: control_s))

    async def start(self) -> None:
        """Return once the router has seen every instance."""
        deployment = self.deployment
        profiles = KnownProfiles(
            {
                profile.identity.key: profile
                for kind in deployment.kinds.values()
                for profile in kind.profiles.values()
            }.values()
        )
        if deployment.is_managed:
            self._start_manager(profiles)
        for node in sorted(self.nodes.values(), key=lambda node: not node.has_devices):
            await node.start()
        world = virtual_world("router", rng=self.rng("router"), scope=self.scope)
        if deployment.is_managed:
            way = partial(self.way_to_manager, "router")
            membership: ports.Membership = managed_membership(
                self._router_settings, world, deployment.model.model_id, way
            )
        else:
            membership = FixedMembership(name + _PORT for name in self.nodes)
        self.router = routers.build(
            self._router_settings,
            world,
            membership=membership,
            connect=self._connect,
            prepare=self.prepare,
            profiles=profiles,
        )
        if deployment.is_managed:
            self._register_router()
        async with asyncio.timeout(60):
            while len((await self.router.readiness()).instances) < len(self.nodes):  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.01)

    def _start_manager(self, profiles: KnownProfiles) -> None:
        deployment, clock = self.deployment, self._clock
        if deployment.scales:
            processes = SimProcesses(self._boot, self.nodes.get, boot_s=self._boot_s, scope=self.scope)
            self._processes = processes
            pools = {PoolName(deployment.model.model_id, *pool): f"{pool.name}-{{}}" for pool in deployment.sizes}
            rules = RestartRules(max_processes=deployment.manager.control.max_instances, grace_s=60.0)
            self.scaler = ProcessScaler(processes, scaled=pools, others={}, rules=rules, clock=clock)
            processes.ended = self.scaler.ended
            self.scaler.on_event = self._scaled
            for pool in pools:
                names = tuple(name for name, node in self.nodes.items() if node.role is pool.role)
                self.scaler.adopt(str(pool), names)
            self.scope.spawn(self.scaler.run(), name="scaler", vital=True)
        world = virtual_world("pool-manager", rng=self.rng("pool manager"), scope=self.scope)
        self.manager = managers.build(
            deployment.manager,
            world,
            hour=lambda: clock() / 3600,
            scaler=self.scaler,
            profiles=profiles,
            replanner=deployment.replanner,
        )

    def _scaled(self, event: object) -> None:
        match event:
            case StartProcess(_, process, reason):
                self.decide(f"start {process}: {reason}")
            case StopProcess(process, reason):
                self.decide(f"stop {process}: {reason}")
            case ProcessReady(process):
                self.decide(f"{process} is ready")

    def come_in(self, items: int) -> asyncio.Future[float]:
        """Spend what a request takes of the host before the router begins; gives when that was over."""
        return self._through([(process, costs.request + costs.item.times(items)) for process, costs in self.host.front])

    def go_out(self, items: int, *, ends: bool) -> asyncio.Future[float]:
        """Spend what a message of an answer takes of the host after the router has it; gives when the client has it. What its end takes is not
        waited for.
        """
        front = [*reversed(self.host.front)]
        passed = self._through([(process, costs.message) for process, costs in front])
        if ends:
            self._through([(process, costs.end + costs.item_end.times(items)) for process, costs in front])
        return passed

    def run_afterwards(self, cost_s: float) -> None:
        """Run what takes time of the host, and for which nothing waits."""
        if self.cores is not None:
            self.cores.run(cost_s)

    def _through(self, work: Sequence[tuple[str, Cost]]) -> asyncio.Future[float]:
        if self.cores is not None:
            return self.cores.run_through(work)
        passed: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        passed.set_result(self.now_s)
        return passed

    def decide(self, text: str) -> None:
        self.decisions.append(Decision(self.now_s, text))

    async def _boot(self, role: Role, name: str, ordered_s: float) -> None:
        if name not in self.nodes:
            self.nodes[name] = Node(name, Kind(role), self)
        await self.nodes[name].start(ordered_s)

    async def kill(self, node: Node) -> None:
        """End an instance at once. Where there is a scaler, it notices."""
        if self._processes is not None:
            await self._processes.lose(node.name, "signal 9")
        else:
            await node.kill()

    def _boot_s(self, role: Role) -> float:
        """The start of a process: of its parts, the one that takes longest."""
        return max(profile.measured.start_s for profile in self.deployment.kinds[Kind(role)].profiles.values())

    def _register_router(self) -> None:
        model_id, slo, router = self.deployment.model.model_id, self._router_settings.slo, self.router

        async def introduce() -> Registration:
            return Registration(MemberKind.ROUTER, "router", 1, f"router{_PORT}", model_id, slo=slo)

        way = partial(self.way_to_manager, "router")
        Registrar(router, introduce, router.drain, way, self.access, self.scope, windows=router.attainment).start()

    async def close(self) -> None:
        if self.router is not None:
            self.router.close()
        for node in self.nodes.values():
            await node.end()
        await self.scope.close()


def _refuse_grammars(_: object) -> Any:
    raise InvalidRequest("answers of a simulation have no format")


@asynccontextmanager
async def running(deployment: Deployment, seed: int, *, requests: int, keeps_spans: bool) -> AsyncGenerator[SimCluster]:
    """A cluster that is ready, closed at the end."""
    cluster = SimCluster(deployment, seed, requests=requests, keeps_spans=keeps_spans)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.close()
