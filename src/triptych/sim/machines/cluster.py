"""The instances of a deployment and their router, wired up as the services' composition roots do."""

from collections.abc import Callable
from random import Random

from triptych.domain.instance import InstanceInfo, InstanceLoad, ServedPart, StageLoad, TransportOffer
from triptych.domain.scaling import Kind
from triptych.domain.stage import ModelPart, Stage
from triptych.engine.delay import kv_memory
from triptych.machine.arena.arena import ArenaMachine
from triptych.machine.text.counted_batch import CountedBatch
from triptych.machine.text.tensor_cache import TensorCache
from triptych.policy.costs import Costs
from triptych.policy.transport import MEMORY
from triptych.rpc.settings import InstanceSettings
from triptych.runtime.profiles import KnownProfiles
from triptych.services.text.device_scheduler import turns_of
from triptych.transport.arena import HEADER_NBYTES

from ..agenda import Agenda  # noqa: TID252 - of the simulator
from ..engines import Activity  # noqa: TID252
from ..network import TimedLinks  # noqa: TID252
from ..outcome import Busy, InstanceUse  # noqa: TID252
from ..scenario import Deployment, InstanceKind  # noqa: TID252
from .encoder import EncodeCall, SimArena, SimEncoder
from .kv import SimKvStore
from .pulls import SimReceiver
from .reports import Reporter
from .router import SimRouter
from .text import SimText, TextCall

_PORT = ":1"


class SimNode:
    """One instance."""

    is_up = True

    def __init__(self, id_: str, pool: Kind, cluster: "MachineCluster") -> None:
        self.id = id_
        self.name = id_ + _PORT
        """Address of the instance."""
        self.role = pool.role
        self.kind: InstanceKind = cluster.deployment.kinds[pool]
        self.activity = Activity(id_, keeps_spans=cluster.keeps_spans)
        self.encoder: SimEncoder | None = None
        self.text: SimText | None = None
        self._cluster = cluster
        self._pool = pool
        deployment, agenda = cluster.deployment, cluster.agenda
        settings: InstanceSettings = deployment.texts.get(pool, deployment.encoder)
        self._reporter = Reporter(agenda, self.load, settings.load_reports, deployment.control_s)
        self.holding = self._arena(settings)
        if pool.role.serves(Stage.ENCODE):
            self.encoder = self._encoder()
        if pool in deployment.texts:
            self.text = self._text()
        cluster.holders[id_] = self.holding
        agenda.after(settings.sweep_interval_s, self._sweep, settings.sweep_interval_s)
        if self.encoder is not None and self.text is not None:
            every_s = deployment.encoder.sweep_interval_s
            agenda.after(every_s, self._sweep_encoder, every_s)

    def _arena(self, settings: InstanceSettings) -> SimArena:
        deployment = self._cluster.deployment
        encodes = self.role.serves(Stage.ENCODE)
        nbytes = deployment.encoder.arena_bytes if encodes else deployment.texts[self._pool].kv_arena_bytes
        machine = ArenaMachine(
            start=HEADER_NBYTES,
            end=nbytes,
            holder=self.id,
            epoch=1,
            max_pull_s=(deployment.encoder if encodes else settings).transfers.max_pull_s,
            limits=(deployment.encoder if encodes else deployment.texts[self._pool]).leases,
        )
        return SimArena(machine, self.id, self._cluster.agenda, self._reporter.notify)

    def _encoder(self) -> SimEncoder:
        deployment = self._cluster.deployment
        return SimEncoder(
            deployment.encoder,
            Costs(self.kind.profiles[ModelPart.ENCODER]),
            self.holding,
            self._cluster.agenda,
            self.activity,
            cores=self.kind.prepare_cores,
            bytes_per_pixel=deployment.bytes_per_pixel,
            on_change=self._reporter.notify,
        )

    def _text(self) -> SimText:
        cluster, deployment = self._cluster, self._cluster.deployment
        settings = deployment.texts[self._pool]
        costs = Costs(self.kind.profiles[ModelPart.DECODER])
        options = settings.engine_options
        cache = TensorCache(settings.tensor_cache, settings.pulls, start=HEADER_NBYTES, end=settings.image_cache_bytes)
        receiver = SimReceiver(
            self.id,
            cache,
            cluster.links,
            cluster.holders,
            cluster.agenda,
            self.activity,
            control_s=deployment.control_s,
            sweep_interval_s=settings.sweep_interval_s,
        )
        budget = deployment.image_budgets.get(self._pool)
        kv_tokens, kv_kind = kv_memory(deployment.model, costs, options)
        return SimText(
            settings,
            costs,
            CountedBatch(
                kv_tokens=kv_tokens,
                max_sequences=options.max_sequences,
                token_budget=options.most_step_tokens,
                by_arrival=options.engine == "vllm",
            ),
            receiver,
            cluster.agenda,
            self.activity,
            self._reporter,
            control_s=deployment.control_s,
            encoder=self.encoder,
            turns=None if self.encoder is None else turns_of(settings, budget),
            budget=budget,
            store=SimKvStore(self.holding, kv_kind, cluster.agenda, shared=self.encoder is not None),
            copied_bytes_per_s=self.kind.copied_bytes_per_s,
        )

    # --- as its router sees it ---------------------------------------------------------------------------------------

    def info(self) -> InstanceInfo:
        deployment = self._cluster.deployment
        parts: tuple[ServedPart, ...] = ()
        encoder_version, max_items, arena_bytes = "", 0, self.holding.machine.capacity_bytes
        offers = (TransportOffer(MEMORY, self._cluster.topology.host(self.id), b""),)
        if self.encoder is not None:
            profile, batches = self.kind.profiles[ModelPart.ENCODER], deployment.encoder.batches
            cores = self.kind.prepare_cores
            parts += (ServedPart(profile.identity, batches.max_batch_items, prepare_cores=cores),)
            encoder_version, max_items = "delay", batches.max_waiting_items
        if self.text is None:
            return InstanceInfo(
                self.id, 1, self.role, deployment.model, arena_bytes, offers, encoder_version, max_items, parts=parts
            )
        settings, profile = deployment.texts[self._pool], self.kind.profiles[ModelPart.DECODER]
        limits = settings.engine_options
        parts += (ServedPart(profile.identity, limits.max_sequences, token_budget=limits.most_step_tokens),)
        _, kind = kv_memory(deployment.model, Costs(profile), limits)
        return InstanceInfo(
            self.id,
            1,
            self.role,
            deployment.model,
            self.text.receiver.cache.capacity_bytes if self.encoder is None else arena_bytes,
            offers,
            encoder_version,
            max_items,
            kv_tokens=self.text.batch.kv_tokens,
            parts=parts,
            continues=True,
            kv_kind=kind.digest,
            transfers_kv=settings.kv_arena_bytes > 0,
            kv_segment_tokens=kind.segment_tokens,
            kv_position_bytes=kind.position_nbytes,
            kv_block_tokens=1,
        )

    def watch(self, deliver: Callable[[InstanceLoad], None]) -> None:
        self._reporter.start(deliver)

    def load(self) -> InstanceLoad:
        stages: dict[Stage, StageLoad] = {}
        if self.text is not None:
            stages = self.text.stages(self.role, self.holding.machine.leased_bytes)
        if self.encoder is not None:
            stages[Stage.ENCODE] = self.encoder.load()
        return InstanceLoad(stages)

    def encode(self, call: EncodeCall) -> None:
        assert self.encoder is not None  # noqa: S101 - routers know what serves what
        self.encoder.arrive(call)

    def cancel_encode(self, call: EncodeCall) -> None:
        assert self.encoder is not None  # noqa: S101
        self.encoder.cancel(call)

    def generate(self, call: TextCall) -> None:
        assert self.text is not None  # noqa: S101
        self.text.generate(call)

    def cancel_text(self, call: TextCall) -> None:
        assert self.text is not None  # noqa: S101
        self.text.cancel(call)

    # --- as the simulation sees it -----------------------------------------------------------------------------------

    def until(self, now_s: float) -> dict[Busy, float]:
        """Seconds by kind of work until now."""
        busy_s = self.activity.until(now_s)
        if self.text is not None and (running_s := self.text.busy_s(now_s)):
            busy_s["step"] = busy_s.get("step", 0.0) + running_s
        return busy_s

    def used(self, start_s: float, end_s: float) -> InstanceUse:
        """What it did until the end, which is now."""
        if self.text is not None:
            self.text.settle()
        return self.kind.use(self.id, self.role, start_s, end_s, self.until(end_s))

    def _sweep(self, every_s: float) -> None:
        if self.text is not None:
            self.text.receiver.tick()
        if self.encoder is None or self.text is None:
            self.holding.sweep()
        self._cluster.agenda.after(every_s, self._sweep, every_s)

    def _sweep_encoder(self, every_s: float) -> None:
        self.holding.sweep()
        self._cluster.agenda.after(every_s, self._sweep_encoder, every_s)


class MachineCluster:
    """All instances and a router, from time 0 on."""

    def __init__(self, deployment: Deployment, seed: int, *, keeps_spans: bool) -> None:
        self.deployment = deployment
        self.keeps_spans = keeps_spans
        self.agenda = Agenda()
        self.holders: dict[str, SimArena] = {}
        """What instances hold for others, by their names."""
        self.topology = deployment.topology()
        self.links = TimedLinks(self.topology, self.agenda)
        self.nodes = {name: SimNode(name, pool, self) for name, pool in deployment.instances.items()}
        """By name."""
        profiles = KnownProfiles(
            {
                profile.identity.key: profile
                for kind in deployment.kinds.values()
                for profile in kind.profiles.values()
            }.values()
        )
        self.router = SimRouter(
            deployment.router,
            deployment.model,
            deployment.family,
            {node.name: node for node in self.nodes.values()},
            profiles,
            self.agenda,
            Random(f"{seed}/router"),  # noqa: S311 - nobody is to be kept out
            control_s=deployment.control_s,
        )
        self.router.start()
