"""The router service: admits requests, runs them, and streams their answers (``ports.Router``)."""

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count

from triptych.domain.chat import ChatRequest, MediaPart, Tokenized
from triptych.domain.embedding import LEASE_ID_NBYTES, LeaseId
from triptych.domain.generation import ChatEvent
from triptych.domain.instance import InstanceLoad, ModelInfo
from triptych.domain.item_plan import ItemPlan
from triptych.domain.lora import LoadedLora, LoadLora
from triptych.domain.recent import EndedChat, RecentChats
from triptych.domain.resolving import ResolvedItem, ResolveRequest
from triptych.domain.slo import Isolated, Slo
from triptych.domain.stage import ModelPart
from triptych.domain.tenant import NOBODY, Tenant
from triptych.domain.timeline import Readiness, Timeline
from triptych.domain.windows import ClassWindow
from triptych.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    TriptychError,
    Unavailable,
)
from triptych.machine.router.cluster_events import KeysTold
from triptych.machine.router.embedding_directory import KnownSlot
from triptych.machine.router.request import RequestMachine
from triptych.policy import admission
from triptych.policy.policies import Policies
from triptych.policy.pool_facts import Profiles, isolated
from triptych.policy.sharding import can_split
from triptych.ports import InstanceClient, Membership, Offload
from triptych.runtime import logs
from triptych.runtime.profiles import KnownProfiles
from triptych.runtime.world import World

from .attainment import Attainment
from .chat_task import ChatTask
from .cluster import Cluster
from .held_share import HeldShare
from .history import History
from .late import LateRefusals
from .leases import KeyLeases
from .loras import Loras
from .prepare import Prepare
from .record import Record
from .request_task import RequestTask
from .resolve_task import ResolveTask
from .running_requests import RunningRequests
from .settings import RouterSettings


class RouterService:
    """``ports.Router`` over the instances in ``membership``; ``connect`` makes a client for an address.

    The world's scope owns the background tasks: watches of instances, running requests, releases of leases.
    """

    def __init__(
        self,
        settings: RouterSettings,
        world: World,
        membership: Membership,
        connect: Callable[[str], InstanceClient],
        *,
        prepare: Prepare,
        offload: Offload,
        record: Record,
        profiles: KnownProfiles,
    ) -> None:
        clock, scope, rng = world.clock, world.scope, world.rng
        self._policies = Policies.named(settings.policies)
        self._rng = rng
        self._record = record
        self._profiles = profiles
        self._settings = settings
        self._prepare = prepare
        self._offload = offload
        self._clock = clock
        self._scope = scope
        self._cluster = Cluster(
            membership,
            connect,
            settings=settings,
            policies=self._policies,
            clock=clock,
            scope=scope,
            rng=rng,
            costs=self._profiles.costs,
        )
        self.attainment = Attainment(
            slo=Slo.parse(settings.slo),
            limits=settings.windows,
            epoch=rng.getrandbits(63),
            clock=clock,
            isolated=self._isolated if profiles else None,
            fairness=self._policies.tenants,
        )
        """Load and SLO attainment of this router."""
        self._late = LateRefusals(self._policies.deadlines, self.attainment, clock)
        self._requests = RunningRequests(settings.capacity, self._policies.admission, clock)
        self._numbers = count(1)
        self._history = History(settings.history_requests)
        self._held_share = HeldShare(
            lambda: self._cluster.machine.instances.arena_bytes,
            settings.resolved_share,
            retry_after_s=settings.capacity.retry_after_s,
        )
        self._keys = KeyLeases(
            self._cluster,
            self._new_lease,
            self._held_share,
            timeout_s=settings.control_timeout_s,
        )
        self._loras = Loras(self._cluster)
        self._draining = False
        self._listeners: list[Callable[[], None]] = []

    def start(self) -> None:
        """Start following the membership and watching the instances."""
        self._cluster.start()

    async def drain(self) -> None:
        """Refuse new requests, and return once the running ones have ended, and what they held is given back."""
        self._draining = True
        for listener in self._listeners:
            listener()
        await self._requests.ended()
        await self._cluster.released()

    def load(self) -> InstanceLoad:
        """Without stages, as a router serves none; it says whether it drains."""
        return InstanceLoad({}, self._draining)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when it begins to drain."""
        self._listeners.append(listener)

    def close(self) -> None:
        self._cluster.close()

    def _isolated(self, counts: ClassWindow) -> Isolated | None:
        costs = {
            part: self._profiles.costs(identity) for part, identity in self._cluster.machine.instances.parts.items()
        }
        profiles = Profiles(costs.get(ModelPart.ENCODER), costs.get(ModelPart.DECODER))
        return isolated(profiles, counts, encoders=len(self._cluster.encoders.name))

    @property
    def running(self) -> int:
        """Requests that are not over."""
        return len(self._requests)

    @property
    def media_bytes(self) -> int:
        """Bytes of media held for unfinished requests."""
        return self._requests.media_bytes

    @property
    def cluster(self) -> Cluster:
        return self._cluster

    # --- ports.Router ------------------------------------------------------------------------------------------------

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        """Stream the answer. Closing the generator cancels the request at every stage.

        Raises before the first event: InvalidRequest or a subclass, ModelNotFound, Overloaded, Unavailable; at any
        time: InstanceLost, TransferFailed, DeadlineExceeded, EngineFailure, InternalError.
        """
        logs.request_id.set(request.request_id)
        text_lost = self._cluster.machine.text_lost and not await self._cluster.ask_for_text()
        try:
            task = self._admit(request, text_lost=text_lost)
        except TriptychError as error:
            self._refused(error, is_chat=True)
            raise
        try:
            while events := await task.buffer.get():
                yield events
        finally:
            task.cancel()

    async def tokenize(self, request: ChatRequest, *, return_token_strs: bool = False) -> Tokenized:
        media_bytes = self._check(request)
        model, _, _ = self._model(request.model)
        with self._requests.tokenizing(media_bytes):
            token_ids = (await self._offload.run(self._prepare, request, model)).token_ids
            token_strs = await self._offload.run(self._prepare.spell, token_ids) if return_token_strs else ()
            return Tokenized(token_ids, token_strs)

    async def resolve(self, request: ResolveRequest) -> AsyncGenerator[tuple[ResolvedItem, ...]]:
        """Yield where the items are, and hold them until the generator is closed or the request's time is up.

        Keys are resolved while the router drains as well: what has been told of them still runs elsewhere.
        """
        logs.request_id.set(request.request_id)
        resolve = self._resolve_keys if request.keys else self._resolve_media
        async with aclosing(resolve(request)) as held:
            async for items in held:
                yield items

    async def _resolve_media(self, request: ResolveRequest) -> AsyncGenerator[tuple[ResolvedItem, ...]]:
        with self._recording_refusals():
            task = self._admit_resolve(request)
        try:
            items = await task.resolved()
            self._cluster.feed(KeysTold(_slots(task.plans, items)))
            yield items
            await task.ended()
        finally:
            task.cancel()

    async def _resolve_keys(self, request: ResolveRequest) -> AsyncGenerator[tuple[ResolvedItem, ...]]:
        with self._recording_refusals():
            lease_s = min(self._check_keys(request), self._settings.attempts.max_lease_s)
        code = "cancelled"
        try:
            with self._requests.reading():
                async with aclosing(self._keys.resolve(request.keys, lease_s)) as held:
                    async for items in held:
                        code = ""
                        yield items
        except TriptychError as error:
            code = error.code
            raise
        finally:
            self._record.keys_resolved(len(request.keys), code)

    @contextmanager
    def _recording_refusals(self) -> Generator[None]:
        try:
            yield
        except TriptychError as error:
            self._refused(error, is_chat=False)
            raise

    async def models(self) -> tuple[ModelInfo, ...]:
        """The model that the instances serve, and its adapters by name; empty until one has been seen."""
        instances = self._cluster.machine.instances
        if instances.model is None:
            return ()
        loras = [instances.loras[name] for name in sorted(instances.loras)]
        return (instances.model, *map(instances.model.with_lora, loras))

    async def load_lora(self, order: LoadLora) -> LoadedLora:
        return await self._loras.load(order)

    async def unload_lora(self, name: str) -> None:
        await self._loras.unload(name)

    async def timeline(self, request_id: str) -> Timeline:
        """The timeline of a running or recently finished request. Raises NotFound."""
        task = self._requests.find(request_id)
        timeline = self._history.get(request_id) if task is None else task.timeline()
        if timeline is None:
            raise NotFound("the request is unknown, or its timeline was dropped", param="request_id")
        return timeline

    def recent_chats(self, position: int | None) -> RecentChats:
        """The chats that have ended since a position in their order, or none yet without one."""
        running_since_s = (task.started_s for task in self._requests if isinstance(task, ChatTask))
        return self._history.since(position, running_since_s, self._clock())

    async def readiness(self) -> Readiness:
        """While draining, the router itself counts as missing."""
        readiness = self._cluster.machine.instances.readiness()
        if not self._draining:
            return readiness
        return replace(readiness, ready=False, missing=(*readiness.missing, "router"))

    async def missing(self) -> tuple[str, ...]:
        """Why the router is not ready; empty if it is."""
        return (await self.readiness()).missing

    # --- private -----------------------------------------------------------------------------------------------------

    def _admit(self, request: ChatRequest, *, text_lost: bool) -> ChatTask:
        """Check what can be checked at once, and start the request."""
        self._check_id(request.request_id)
        admission.check_sampling(request.sampling, self._settings.request_size)
        admission.check_priority(request.priority)
        admission.check_tool_choice(request.tool_choice, request.tools, request.sampling)
        media_bytes = self._check(request)
        timeout_s = self._timeout_s(request.timeout_s)
        model, lora, encoded_lora = self._model(request.model)
        if request.continued:
            admission.check_continued(request.sampling, request.continued, model.context_length)
        if text_lost:
            raise Unavailable("no text instance is available", retry_after_s=self._settings.capacity.retry_after_s)
        if not request.continued:  # its caller has some of it already
            # Before anything is computed for it; once its class is known it is judged by the time of that class.
            wait_s, service_s = self.attainment.least_s(
                request.priority, media=media_bytes > 0, tenant=request.tenant or NOBODY
            )
            if wait_s:
                self._late.check(lambda: request, left_s=timeout_s, wait_s=wait_s, service_s=service_s, prepared=False)
        machine = self._new_machine(
            request,
            timeout_s=timeout_s,
            choices=len(request.continued) or request.sampling.n,
            continued_tokens=request.begun_tokens if request.continued else None,
            lora=lora,
        )
        task = ChatTask(
            request,
            machine,
            self._cluster,
            self._clock,
            model=model,
            media_bytes=media_bytes,
            attainment=self.attainment,
            prepare=self._prepare,
            sharding=self._in_shards,
            late=self._late,
            offload=self._offload,
            rng=self._rng,
            new_lease=self._new_lease,
            finds_prefixes=self._policies.prefixes is not None,
            lora=lora,
            encoded_lora=encoded_lora,
        )
        self._run(task)
        return task

    def _admit_resolve(self, request: ResolveRequest) -> ResolveTask:
        self._check_id(request.request_id)
        admission.check_priority(request.priority)
        if not request.media:
            raise InvalidRequest("the request has neither media nor keys", param="media")
        self._check_draining()
        media_bytes = self._check_media(request.media, "media")
        timeout_s = self._timeout_s(request.timeout_s)
        model, _, encoded_lora = self._model(request.model)
        task = ResolveTask(
            request,
            self._new_machine(request, timeout_s=timeout_s),
            self._cluster,
            self._clock,
            model=model,
            media_bytes=media_bytes,
            prepare=self._prepare,
            offload=self._offload,
            share=self._held_share,
            encoded_lora=encoded_lora,
        )
        self._run(task)
        return task

    def _check_keys(self, request: ResolveRequest) -> float:
        """Raise if the request cannot be admitted; else return its time limit."""
        if request.media:
            raise InvalidRequest("a request has media or keys, not both", param="keys")
        admission.check_items(len(request.keys), self._settings.request_size, "keys")
        self._check_capacity(0)
        self._model(request.model)
        return self._timeout_s(request.timeout_s)

    def _timeout_s(self, timeout_s: float) -> float:
        if timeout_s == 0:
            raise DeadlineExceeded("the request's time limit passed before it arrived")
        return admission.check_timeout(timeout_s, self._settings.max_timeout_s)

    def _new_machine(
        self,
        request: ChatRequest | ResolveRequest,
        *,
        timeout_s: float,
        choices: int = 1,
        continued_tokens: int | None = None,
        lora: str = "",
    ) -> RequestMachine:
        now_s, number = self._clock(), next(self._numbers)
        return RequestMachine(
            number,
            request.request_id,
            request.model,
            now_s=now_s,
            deadline_s=now_s + timeout_s,
            limits=self._settings.attempts,
            new_lease=self._new_lease,
            choices=choices,
            priority=request.priority,
            ordering=self._policies.ordering,
            share=partial(self.attainment.share, number),
            dispatch=self._policies.dispatch,
            resolves=isinstance(request, ResolveRequest),
            continued_tokens=continued_tokens,
            lora=lora,
        )

    def _run(self, task: RequestTask) -> None:
        """Start an admitted request."""
        request_id = task.request.request_id
        try:
            self._scope.spawn(task.drive(self._over), name=f"request {request_id}")
        except RuntimeError:
            raise Unavailable(
                "the router is shutting down", retry_after_s=self._settings.capacity.retry_after_s
            ) from None
        self._requests.add(task)

    def _in_shards(self, items: Sequence[ItemPlan]) -> tuple[ItemPlan, ...]:
        limits = self._settings.shards
        if not can_split(items, limits):
            return tuple(items)
        return self._policies.sharding(items, self._cluster.encoders, limits)

    def _new_lease(self) -> LeaseId:
        return self._rng.getrandbits(8 * LEASE_ID_NBYTES).to_bytes(LEASE_ID_NBYTES, "little")

    def _over(self, task: RequestTask) -> None:
        timeline = task.timeline()
        if self._requests.remove(task):
            self._history.add(timeline)
        if isinstance(task, ChatTask) and task.refusal is not None:
            self._refused(task.refusal, is_chat=True)
            return
        if isinstance(task, ChatTask):
            if task.shape is None:
                self._history.count_unprepared()
            else:
                self._history.add_chat(EndedChat(task.started_s, task.tenant.name, task.shape, timeline))
            self.attainment.ended(task.number, timeline)
            # Metrics are those of the base: operators may name any number of adapters.
            counted = (
                timeline if timeline.model == task.model.model_id else replace(timeline, model=task.model.model_id)
            )
            self._record.ended(counted, task.finish_reason)
        else:
            self._record.resolved(timeline)

    def _refused(self, error: TriptychError, *, is_chat: bool) -> None:
        self._record.refused(error)
        if is_chat:
            self.attainment.refused(error)
            self._history.count_refused()

    def _check(self, request: ChatRequest) -> int:
        """Raise if the request cannot be admitted; else return the bytes of its media."""
        self._check_draining()
        if request.prompt is not None and request.messages:
            raise InvalidRequest("a request has messages or a prompt, not both", param="prompt")
        if request.prompt_tokens and request.prompt != "":
            raise InvalidRequest("a prompt is text or tokens, not both", param="prompt")
        return self._check_media(request.media, "messages", request.tenant or NOBODY)

    def _check_draining(self) -> None:
        if self._draining:
            raise Unavailable("the router is shutting down", retry_after_s=self._settings.capacity.retry_after_s)

    def _check_media(self, media: Sequence[MediaPart], param: str, tenant: Tenant = NOBODY) -> int:
        """Raise if there is too much of it; else return its bytes."""
        admission.check_items(len(media), self._settings.request_size, param)
        media_bytes = sum(len(part.data) for part in media)
        self._check_capacity(media_bytes, tenant)
        return media_bytes

    def _check_capacity(self, media_bytes: int, tenant: Tenant = NOBODY) -> None:
        self._requests.check_room(media_bytes, tenant.name, shares=self.attainment.see(tenant))

    def _check_id(self, request_id: str) -> None:
        limit = self._settings.max_request_id_chars
        if not 1 <= len(request_id) <= limit or not (request_id.isascii() and request_id.isprintable()):
            raise InvalidRequest(f"a request id has 1 to {limit} printable ASCII characters", param="request_id")
        # A cancelled request is over for its caller: a client that lost its connection may retry at once.
        if (task := self._requests.find(request_id)) is not None and not task.machine.phase.has_ended:
            raise InvalidRequest(f"request {request_id!r} is running already", param="request_id")

    def _model(self, name: str) -> tuple[ModelInfo, str, str]:
        """The model that serves requests for this name; the digest of the adapter that the name stands for, empty if it does not; and that
        digest once more if the adapter changes embeddings.
        """
        model = self._cluster.machine.instances.model
        if model is None:
            raise Unavailable("no instance is connected yet", retry_after_s=self._settings.capacity.retry_after_s)
        if name == model.model_id:
            return model, "", ""
        if (lora := self._cluster.machine.instances.loras.get(name)) is None:
            raise ModelNotFound(f"model {name!r} is not served here; {model.model_id!r} is", param="model")
        return model, lora.digest, lora.digest if lora.encodes else ""


def _slots(plans: Sequence[ItemPlan], items: Sequence[ResolvedItem]) -> dict[bytes, KnownSlot]:
    """Where the embeddings of these items are, by the keys that their caller is told."""
    return {
        item.ticket.key: KnownSlot(item.ticket.address, item.ticket.generation, plan.content, plan.nbytes)
        for plan, item in zip(plans, items, strict=True)
    }
