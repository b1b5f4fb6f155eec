"""The router: admits requests, runs the cluster's machine, and makes the calls of requests, as the services' router does."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Protocol

from triptych.domain.chat import ChatRequest
from triptych.domain.embedding import LEASE_ID_NBYTES, LeaseId
from triptych.domain.instance import InstanceInfo, InstanceLoad, ModelInfo
from triptych.domain.item_plan import ItemPlan, content_of
from triptych.domain.media import Modality, digest_of
from triptych.domain.membership import Member
from triptych.domain.profile import ProfileIdentity
from triptych.domain.sampling import SEED_BITS
from triptych.domain.slo import Isolated, Slo
from triptych.domain.stage import ModelPart
from triptych.domain.tenant import NOBODY
from triptych.domain.timeline import Timeline
from triptych.domain.windows import ClassWindow
from triptych.errors import TriptychError, Unavailable
from triptych.families.base import Family
from triptych.machine.router.cluster import ClusterMachine
from triptych.machine.router.cluster_events import (
    ClusterEffect,
    ClusterEvent,
    ClusterTick,
    InstanceSeen,
    LoadReported,
    MemberJoined,
    WakeAt,
)
from triptych.machine.router.instances import ENCODE
from triptych.machine.router.request import RequestMachine
from triptych.machine.router.request_events import AttemptKind, Encode, Failed, Generate, Prepared, Signal
from triptych.machine.router.shared_events import (
    CreditReturned,
    FirstToken,
    Granted,
    LeasesReturned,
    LeasesTaken,
    Moved,
    PlaceRefused,
    TextPoolLost,
)
from triptych.policy import admission
from triptych.policy.policies import Policies
from triptych.policy.pool_facts import Profiles, isolated
from triptych.runtime.profiles import KnownProfiles
from triptych.services.router.attainment import Attainment
from triptych.services.router.late import LateRefusals
from triptych.services.router.settings import RouterSettings
from triptych.workload.requests import Planned

from ..agenda import Agenda  # noqa: TID252 - of the simulator
from ..prepare import Prompts, Shape, chat_request, item_bytes  # noqa: TID252
from .encoder import EncodeCall, SimArena
from .request import Caller, SimRequest
from .text import TextCall


class Node(Protocol):
    """An instance as its router calls it."""

    name: str

    def info(self) -> InstanceInfo: ...

    def watch(self, deliver: Callable[[InstanceLoad], None]) -> None:
        """Report the load from now on."""
        ...

    def encode(self, call: EncodeCall) -> None: ...

    def cancel_encode(self, call: EncodeCall) -> None: ...

    def generate(self, call: TextCall) -> None: ...

    def cancel_text(self, call: TextCall) -> None: ...

    @property
    def holding(self) -> SimArena:
        """What it holds for others."""
        ...


@dataclass(slots=True)
class _Unreleased:
    """Leases to be released at one instance, with their credits."""

    lease_ids: list[LeaseId]
    credits: list[int]


class SimRouter:
    """One router over instances that are all there from the beginning."""

    def __init__(
        self,
        settings: RouterSettings,
        model: ModelInfo,
        family: Family,
        nodes: Mapping[str, Node],
        profiles: KnownProfiles,
        agenda: Agenda,
        rng: Random,
        *,
        control_s: float,
    ) -> None:
        """``nodes``: by their addresses, in the order in which the router learns of them."""
        self.agenda = agenda
        self.control_s = control_s
        self._settings = settings
        self._model = model
        self._nodes = nodes
        self._rng = rng
        self._policies = Policies.named(settings.policies)
        self._prompts = Prompts(family, model, settings.shards)
        self._profiles = profiles
        self.machine = ClusterMachine(
            settings.cluster,
            self._policies,
            rng,
            arena_retry_s=settings.attempts.arena_retry_s,
            retry_after_s=settings.capacity.retry_after_s,
            costs=profiles.costs,
            max_keys=settings.resolved_keys,
        )
        self._isolated_of: dict[tuple[int, ...], Isolated | None] = {}
        """By the counts of a request."""
        self._attainment = Attainment(
            slo=Slo.parse(settings.slo),
            limits=settings.windows,
            epoch=rng.getrandbits(63),
            clock=lambda: agenda.now_s,
            isolated=self._isolated if profiles else None,
            fairness=self._policies.tenants,
            keeps_windows=False,  # as no pool manager reads them
        )
        self._late = LateRefusals(self._policies.deadlines, self._attainment, lambda: agenda.now_s)
        self._requests: dict[int, SimRequest] = {}
        self._deadlines: deque[tuple[float, SimRequest, bool]] = deque()
        """Of requests, and whether their callers wait no longer either; the first first, as all have the same time limit."""
        self._media_bytes = 0
        """Of all requests."""
        self._unreleased: dict[str, _Unreleased] = {}
        self._alarm_s: float | None = None
        self._alarms = 0
        self._timelines: dict[int, Timeline] = {}
        """Of requests that are over, by number."""

    def prompt_tokens(self, planned: Planned) -> int:
        """Of the prompt of a request that has been prepared."""
        return self._prompts.tokens(planned)

    def start(self) -> None:
        """Join all instances, and watch them."""
        for name in self._nodes:
            self.feed(MemberJoined(Member(name)))
        for node in self._nodes.values():
            self.agenda.after(2 * self.control_s, self._described, node)

    @property
    def ready_after_s(self) -> float:
        """How long it takes until it has seen every instance."""
        return 2 * self.control_s

    def _described(self, node: Node) -> None:
        self.feed(InstanceSeen(node.name, node.info()))
        self.agenda.after(self.control_s, node.watch, partial(self._reported, node.name))

    def _reported(self, name: str, load: InstanceLoad) -> None:
        if effects := self.machine.handle(LoadReported(name, load), self.agenda.now_s):
            self._apply(effects)

    # --- the cluster -------------------------------------------------------------------------------------------------

    def feed(self, event: ClusterEvent) -> None:
        if effects := self.machine.handle(event, self.agenda.now_s):
            self._apply(effects)

    def _apply(self, effects: Sequence[ClusterEffect]) -> None:
        requests = self._requests
        for effect in effects:
            match effect:
                case Granted(number) | PlaceRefused(number) | Moved(number) if number in requests:
                    requests[number].feed(effect)
                case Granted(_, grants):
                    for grant in grants:
                        self.returned(grant.credit)
                case Moved(_, _, grant):
                    if grant is not None:
                        self.returned(grant.credit)
                case TextPoolLost():
                    for request in list(requests.values()):
                        request.feed(effect)
                case WakeAt(at_s):
                    self._wake(at_s)
                case _:
                    pass  # connections, and lines for a log

    def _wake(self, at_s: float) -> None:
        if self._alarm_s is not None and self._alarm_s <= at_s:
            return
        self._alarm_s = at_s
        self._alarms += 1
        self.agenda.at(max(at_s, self.agenda.now_s), self._tick, self._alarms)

    def _tick(self, alarm: int) -> None:
        if alarm == self._alarms:
            self._alarm_s = None
            self.feed(ClusterTick())

    def returned(self, credit: int) -> None:
        self.feed(CreditReturned(credit))

    def release(self, name: str, lease_ids: tuple[LeaseId, ...], credits_: tuple[int, ...]) -> None:
        """Release leases, then return their credits. There is one call per instance at a time."""
        if not lease_ids:
            for credit in credits_:
                self.returned(credit)
            return
        if not credits_:
            self.feed(LeasesTaken(name, lease_ids))
        if (unreleased := self._unreleased.get(name)) is None:
            self._unreleased[name] = _Unreleased(list(lease_ids), list(credits_))
            self.agenda.soon(self._release_next, name)
        else:
            unreleased.lease_ids += lease_ids
            unreleased.credits += credits_

    def _release_next(self, name: str) -> None:
        unreleased = self._unreleased[name]
        if not unreleased.lease_ids:
            del self._unreleased[name]
            return
        self._unreleased[name] = _Unreleased([], [])
        self.agenda.after(self.control_s, self._release_at, name, unreleased)

    def _release_at(self, name: str, unreleased: _Unreleased) -> None:
        self._nodes[name].holding.release(unreleased.lease_ids)
        self.agenda.after(self.control_s, self._released, name, unreleased)

    def _released(self, name: str, unreleased: _Unreleased) -> None:
        self.feed(LeasesReturned(name, tuple(unreleased.lease_ids), tuple(unreleased.credits)))
        self._release_next(name)

    def arena(self, name: str) -> SimArena:
        return self._nodes[name].holding

    # --- requests ----------------------------------------------------------------------------------------------------

    def admit(
        self,
        number: int,
        planned: Planned,
        caller: Caller,
        *,
        timeout_s: float,
    ) -> SimRequest:
        """A request has come. ``number``: in the plan. Raises TriptychError if it is refused."""
        settings, attainment, now_s = self._settings, self._attainment, self.agenda.now_s
        shape = self._prompts.shape(number, planned)
        media_bytes = sum([item.info.nbytes for item in shape.items])
        try:
            self._check_room(media_bytes, len(shape.items))
            if self.machine.text_lost:
                raise Unavailable("no text instance is available", retry_after_s=settings.capacity.retry_after_s)
            left_s = admission.check_timeout(timeout_s, settings.max_timeout_s)
            wait_s, service_s = attainment.least_s(0, media=bool(shape.items))
            self._check_late(number, planned, left_s=left_s, wait_s=wait_s, service_s=service_s, prepared=False)
        except TriptychError as error:
            attainment.refused(error)
            raise
        deadline_s = now_s + left_s
        request = SimRequest(
            number + 1,
            self,
            caller,
            prompt_tokens=shape.tokens + planned.text_tokens,
            output_tokens=planned.output_tokens,
            media_bytes=media_bytes,
            deadline_s=deadline_s,
        )
        request.machine = RequestMachine(
            request.number,
            f"request-{number}",
            self._model.model_id,
            now_s=now_s,
            deadline_s=deadline_s,
            limits=settings.attempts,
            new_lease=self._new_lease,
            ordering=self._policies.ordering,
            share=partial(attainment.share, request.number),
            dispatch=self._policies.dispatch,
        )
        self._requests[request.number] = request
        self._media_bytes += media_bytes
        if not self._deadlines:
            self.agenda.at(deadline_s, self._pass_deadlines)
        self._deadlines.append((deadline_s, request, left_s == timeout_s))
        self.agenda.soon(self._prepare_request, number, planned, shape, request)
        return request

    def _check_room(self, media_bytes: int, items: int) -> None:
        settings = self._settings
        admission.check_items(items, settings.request_size, "messages")
        self._policies.admission(
            requests=len(self._requests),
            media_bytes=self._media_bytes,
            new_media_bytes=media_bytes,
            bounds=settings.capacity,
            own_requests=len(self._requests) if self._attainment.see(NOBODY) else 0,
        )

    def _check_late(
        self, number: int, planned: Planned, *, left_s: float, wait_s: float, service_s: float, prepared: bool
    ) -> None:
        """Raises Overloaded."""
        if wait_s:
            request = partial(self._chat_request, number, planned, left_s)
            self._late.check(request, left_s=left_s, wait_s=wait_s, service_s=service_s, prepared=prepared)

    def _chat_request(self, number: int, planned: Planned, timeout_s: float) -> ChatRequest:
        return chat_request(number, planned, self._model.model_id, timeout_s=timeout_s)

    def _prepare_request(self, number: int, planned: Planned, shape: Shape, request: SimRequest) -> None:
        if request.has_ended:
            return
        machine, instances = self.machine, self.machine.instances
        prompt_tokens = shape.tokens + planned.text_tokens
        try:
            self._prompts.check_length(
                number, planned, kv_tokens=instances.kv_tokens, kv_block_tokens=instances.kv_block_tokens
            )
            items = self._items(number, shape)
            arrived = self._attainment.arrival(items, prompt_tokens)
            wait_s, service_s = self._attainment.predicted_s(arrived, 0)
            self._check_late(
                number, planned, left_s=self.left_s(request), wait_s=wait_s, service_s=service_s, prepared=True
            )
        except TriptychError as error:
            request.feed(Failed(error))
            return
        self._rng.getrandbits(SEED_BITS)  # the seed of its answer
        _, expected = self._attainment.prepared(
            request.number,
            arrived,
            0.0,
            answer_tokens=machine.expected_output.predict(bool(items), planned.output_tokens),
        )
        if shape.divides:
            pool = instances.pool(ENCODE, self.agenda.now_s)
            items = self._policies.sharding(items, pool, self._settings.shards)
        request.feed(Prepared(items, prompt_tokens, planned.output_tokens, expected))

    def _items(self, number: int, shape: Shape) -> tuple[ItemPlan, ...]:
        """The items of this request, which are told apart by their contents."""
        items = []
        places: Counter[Modality] = Counter()
        for like in shape.items:
            modality = like.info.modality
            digest = digest_of(item_bytes(number, modality, places[modality]))
            places[modality] += 1
            items.append(
                ItemPlan(
                    like.item,
                    like.param,
                    like.media,
                    replace(like.info, digest=digest) if shape.divides else like.info,
                    content_of(digest, None, b""),
                    like.start,
                    like.tokens,
                    like.tensors,
                    like.nbytes,
                    like.units,
                    like.unit_starts,
                )
            )
        return tuple(items)

    def _isolated(self, counts: ClassWindow) -> Isolated | None:
        like = counts.items, counts.media_tokens, counts.media_bytes, counts.pixels, counts.prompt_tokens
        if like not in self._isolated_of:
            parts: Mapping[ModelPart, ProfileIdentity] = self.machine.instances.parts
            costs = {part: self._profiles.costs(identity) for part, identity in parts.items()}
            profiles = Profiles(costs.get(ModelPart.ENCODER), costs.get(ModelPart.DECODER))
            encoders = len(self.machine.instances.pool(ENCODE, self.agenda.now_s).name)
            self._isolated_of[like] = isolated(profiles, counts, encoders=encoders)
        return self._isolated_of[like]

    def _new_lease(self) -> LeaseId:
        return self._rng.getrandbits(8 * LEASE_ID_NBYTES).to_bytes(LEASE_ID_NBYTES, "little")

    def left_s(self, request: SimRequest) -> float:
        return max(0.0, request.deadline_s - self.agenda.now_s)

    def _pass_deadlines(self) -> None:
        deadlines, now_s = self._deadlines, self.agenda.now_s
        while deadlines and (deadlines[0][0] <= now_s or deadlines[0][1].has_ended):
            deadline_s, request, is_callers = deadlines.popleft()
            if deadline_s <= now_s and not request.has_ended:
                if is_callers:
                    request.caller.timed_out()
                request.feed(Signal.DEADLINE_PASSED)
        if deadlines:
            self.agenda.at(deadlines[0][0], self._pass_deadlines)

    def timeline(self, number: int) -> Timeline | None:
        """Of a request of the plan; None if it was refused when it came."""
        running = self._requests.get(number + 1)
        return self._timelines.get(number + 1) if running is None else running.timeline()

    def answering(self, request: SimRequest) -> None:
        """Note that its first token has come from the instance that it is at now."""
        self._attainment.listeners[FirstToken](request, None)  # type: ignore[arg-type]  # it has what is asked for

    def over(self, request: SimRequest) -> None:
        """Nothing of a request runs any more."""
        if self._requests.pop(request.number, None) is None:
            return
        self._media_bytes -= request.media_bytes
        while len(self._deadlines) > 1 and self._deadlines[0][1].has_ended:
            self._deadlines.popleft()
        timeline = self._timelines[request.number] = request.timeline()
        self._attainment.ended(request.number, timeline)

    # --- calls -------------------------------------------------------------------------------------------------------

    def send_encode(self, request: SimRequest, effect: Encode, call: EncodeCall) -> None:
        del request
        if not call.is_over:
            self.agenda.after(self.control_s, self._nodes[effect.name].encode, call)

    def text_call(self, request: SimRequest, effect: Generate) -> TextCall:
        call = TextCall(effect, request.prompt_tokens, request.output_tokens, request.tokens, request.answer(effect))
        if effect.kind is not AttemptKind.EARLY_PREFILL:
            self._attainment.listeners[Generate](request, effect)  # type: ignore[arg-type]  # it has what is asked for
        return call

    def send_text(self, request: SimRequest, effect: Generate, call: TextCall) -> None:
        if not call.is_over:
            call.timeout_s = self.left_s(request)
            call.position = effect.queue_position.relative(self.agenda.now_s)
            self.agenda.after(self.control_s, self._nodes[effect.name].generate, call)

    def cancel(self, call: EncodeCall | TextCall) -> None:
        """A call is given up."""
        if isinstance(call, TextCall):
            self._nodes[call.name].cancel_text(call)
        else:
            self._nodes[call.name].cancel_encode(call)
