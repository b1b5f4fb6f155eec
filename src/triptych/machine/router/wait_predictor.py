"""Predicts how long a request would wait, from what waits at each stage of this router and how fast that is served.

A rate is measured while requests queue, as only then it is the stage's and not that of the arrivals. Work is counted in
tokens (at the encoders of media, or in the time that a profile predicts; at the text instances of prompts and answers), so that it
adds up over requests of any size. Tenants share each queue by their weights (``machine.router.tenant_shares``).
Fed directly, like ``AttainmentRecorder``; what is said of a request that is unknown or over has no effect.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych.domain.stage import Stage
from triptych.domain.tenant import NOBODY, Tenant
from triptych.machine.router.tenant_shares import Place, TenantShares
from triptych.policy.fairness import UNSHARED, Fairness, Share, by_weight, share_wait_s

ANSWER_WEIGHT = 2
"""A token of an answer is this much work of a text instance, in tokens of a prompt (VTC, OSDI '24, section 4.1)."""

_QUEUE = 4
"""Requests that wait together, from which on they are a queue."""
_LEAST_S = 1.0
_LEAST_SERVED = 4
"""A rate is measured over at least this time and this many requests ..."""
_ENOUGH_SERVED = 64
"""... and over no more than the last of these, if they are not served within that time: so it follows the mix of requests and the
number of instances."""
_REMEMBERED_S = 60.0
"""For how long the rate of a queue that has ended counts."""
_WEIGHT = 0.1
"""Of the latest request in the mean time of an answer."""
_KNOWN_S = 600.0
"""For how long a tenant is known of which no request comes."""
_MAX_TENANTS = 1024
SHOWN_TENANTS = 50
"""Tenants with a label of their own in metrics."""
OTHER_TENANTS = "(others)"
"""No tenant of a gateway has this name."""


class _Queue:
    """The queue of one stage."""

    def __init__(self, fairness: Fairness) -> None:
        self.waiting = 0
        self.work: Counter[int] = Counter()
        """By priority."""
        self.shares = TenantShares(fairness)
        self._since_s: float | None = None
        """Since when what is served has been measured; None while there is no queue."""
        self._served: deque[tuple[float, int]] = deque()
        """When the last requests were served, of this queue or since it ended, and their work."""
        self._served_work = 0
        """All the work that was served."""
        self._known: tuple[float, float, float] | None = None
        """When the rate was measured last, the work per second, and the requests."""

    def enter(self, tenant: Tenant, priority: int, work: int, now_s: float, *, alone: bool) -> Place:
        self.waiting += 1
        self.work[priority] += work
        if self._since_s is None and self.waiting >= _QUEUE:
            self._since_s = now_s
            self._forget_served()
        return self.shares.enter(tenant, priority, work, self._per_s(now_s), now_s, alone=alone)

    def leave(self, place: Place, now_s: float, *, served: bool) -> None:
        priority, work = place.priority, place.work
        self.waiting -= 1
        self.work[priority] -= work
        if not self.work[priority]:
            del self.work[priority]
        self.shares.leave(place, served=served)
        if served:
            self._served.append((now_s, work))
            self._served_work += work
        if self._since_s is None:
            self._raise(now_s)
            return
        if served:
            self._measure(self._since_s, now_s)
        elif (took_s := now_s - self._since_s) >= _LEAST_S and len(self._served) < _LEAST_SERVED:
            # Most end unserved, by their deadlines: the rate is at most this.
            self._known = now_s, (self._served_work + work) / took_s, (len(self._served) + 1) / took_s
        if self.waiting < _QUEUE // 2:
            self._since_s = None
            self._forget_served()

    def _forget_served(self) -> None:
        self._served.clear()
        self._served_work = 0

    def _raise(self, now_s: float) -> None:
        """Without a queue, the rate is at least that of what is served: so one that was measured during an outage does not stay."""
        while len(self._served) > _LEAST_SERVED and now_s - self._served[0][0] >= _LEAST_S:
            first_s, work = self._served.popleft()
            self._served_work -= work
            took_s = now_s - first_s
            if self._known is not None and self._served_work / took_s > self._known[1]:
                self._known = now_s, self._served_work / took_s, len(self._served) / took_s

    def _measure(self, since_s: float, now_s: float) -> None:
        while len(self._served) > _ENOUGH_SERVED and now_s - self._served[0][0] >= _LEAST_S:
            since_s, work = self._served.popleft()
            self._served_work -= work
        self._since_s, took_s = since_s, now_s - since_s
        if len(self._served) >= _LEAST_SERVED and took_s >= _LEAST_S:
            self._known = now_s, self._served_work / took_s, len(self._served) / took_s

    def _per_s(self, now_s: float) -> float | None:
        """The work that is served per second; None if it is not known."""
        if self._known is None:
            return None
        measured_s, per_s, _ = self._known
        if self._since_s is None and now_s - measured_s > _REMEMBERED_S:
            self._known = None
            return None
        return per_s if per_s > 0 else None

    def wait_s(self, tenant: Tenant, priority: int, now_s: float, *, alone: bool) -> float:
        """How long what goes before a request of this tenant and priority will take; 0 if the rate is not known."""
        if (per_s := self._per_s(now_s)) is None:
            return 0.0
        ahead = sum(work for other, work in self.work.items() if other <= priority)
        if alone:
            return ahead / per_s
        more_urgent = ahead - self.work.get(priority, 0)
        own, own_urgent = self.shares.waiting_work(tenant.name, priority)
        return share_wait_s(
            ahead_s=ahead / per_s,
            own_s=(own + own_urgent) / per_s,
            more_urgent_s=(more_urgent - own_urgent) / per_s,
            share=self.shares.part(tenant),
        )

    def takes_s(self, tenant: Tenant, now_s: float, *, alone: bool) -> float:
        """How long a request of the mean work takes, at the tenant's share; 0 if the rate is not known."""
        if self._per_s(now_s) is None or self._known is None:
            return 0.0
        return 1 / self._known[2] / (1.0 if alone else self.shares.part(tenant))


@dataclass(slots=True)
class _Running:
    class_name: str
    tenant: Tenant
    priority: int
    work: dict[Stage, int]
    stage: Stage | None = None
    places: dict[Stage, Place] = field(default_factory=dict)


class WaitPredictor:
    """Owner of what waits for its first token, by stage, and of the shares of tenants in that."""

    def __init__(self, fairness: Fairness | None = by_weight) -> None:
        """Without ``fairness`` tenants are not told apart."""
        self._tells_tenants = fairness is not None
        self._queues = {stage: _Queue(fairness or by_weight) for stage in (Stage.ENCODE, Stage.PREFILL)}
        self._running: dict[int, _Running] = {}
        self._tenants: OrderedDict[str, float] = OrderedDict()
        """When a request of each has come last. The longest ago is first."""
        self.served: Counter[tuple[str, Stage]] = Counter()
        """Work that a stage has served since the start, by tenant; of those beyond ``SHOWN_TENANTS`` together."""
        self._shown: set[str] = set()
        self._answer_s: dict[str, float] = {}
        """By request class, the mean time from the first token to the last."""

    # --- steps of a request ------------------------------------------------------------------------------------------

    def prepared(
        self,
        number: int,
        class_name: str,
        *,
        priority: int,
        media_work: int,
        prompt_tokens: int,
        now_s: float,
        answer_tokens: int = 0,
        tenant: Tenant = NOBODY,
    ) -> None:
        """A request waits for encoders, or without media for a text instance.

        ``media_work``: of its encoding, in any unit that adds up. ``answer_tokens``: as expected.
        """
        work = {Stage.ENCODE: media_work, Stage.PREFILL: max(1, prompt_tokens + ANSWER_WEIGHT * answer_tokens)}
        tenant = self._told_apart(tenant)
        alone = not self.see(tenant, now_s)
        request = self._running[number] = _Running(class_name, tenant, priority, work)
        self._enter(request, Stage.ENCODE if media_work else Stage.PREFILL, now_s, alone=alone)

    def encoded(self, number: int, now_s: float) -> None:
        """All its items are encoded, and it wants a place at a text instance."""
        request = self._running.get(number)
        if request is not None and request.stage is Stage.ENCODE:
            self._leave(request, Stage.ENCODE, now_s, served=True)
            self._enter(request, Stage.PREFILL, now_s, alone=self._alone(request.tenant, now_s))

    def answering(self, number: int, now_s: float) -> None:
        """Note that its first token has arrived."""
        if (request := self._running.get(number)) is not None and request.stage is not None:
            self._leave(request, request.stage, now_s, served=True)

    def ended(
        self, number: int, answer_s: float | None, now_s: float, *, served: Mapping[Stage, int] | None = None
    ) -> None:
        """``answer_s`` is the time from its first token to its last; None if it was not answered.

        ``served`` is the work that it took in the end, of the stages where that is known.
        """
        request = self._running.pop(number, None)
        if request is None:
            return
        if request.stage is not None:
            self._leave(request, request.stage, now_s, served=answer_s is not None)
        for stage, work in (served or {}).items():
            if (place := request.places.get(stage)) is not None:
                self._queues[stage].shares.correct(place, work)
        if answer_s is not None:
            mean_s = self._answer_s.get(request.class_name, answer_s)
            self._answer_s[request.class_name] = mean_s + _WEIGHT * (answer_s - mean_s)

    def _enter(self, request: _Running, stage: Stage, now_s: float, *, alone: bool) -> None:
        request.stage = stage
        request.places[stage] = self._queues[stage].enter(
            request.tenant, request.priority, request.work[stage], now_s, alone=alone
        )

    def _leave(self, request: _Running, stage: Stage, now_s: float, *, served: bool) -> None:
        self._queues[stage].leave(request.places[stage], now_s, served=served)
        if served:
            self.served[self._label(request.tenant.name), stage] += request.work[stage]
        else:
            del request.places[stage]
        request.stage = None

    # --- tenants -----------------------------------------------------------------------------------------------------

    def share(self, number: int, stage: Stage) -> Share:
        """Of a request at a stage that it has come to."""
        request = self._running.get(number)
        place = None if request is None else request.places.get(stage)
        return UNSHARED if place is None else place.share

    def _label(self, name: str) -> str:
        if name not in self._shown:
            if len(self._shown) >= SHOWN_TENANTS:
                return OTHER_TENANTS
            self._shown.add(name)
        return name

    def _told_apart(self, tenant: Tenant) -> Tenant:
        return tenant if self._tells_tenants else NOBODY

    def _alone(self, tenant: Tenant, now_s: float) -> bool:
        """Whether there is no other tenant."""
        while self._tenants and now_s - next(iter(self._tenants.values())) > _KNOWN_S:
            self._tenants.popitem(last=False)
        return len(self._tenants) == (tenant.name in self._tenants)

    def see(self, tenant: Tenant, now_s: float) -> bool:
        """A request of this tenant has come, whatever becomes of it. Returns whether there are others."""
        tenant = self._told_apart(tenant)
        self._tenants[tenant.name] = now_s
        self._tenants.move_to_end(tenant.name)
        if len(self._tenants) > _MAX_TENANTS:
            self._tenants.popitem(last=False)
        return not self._alone(tenant, now_s)

    # --- predictions -------------------------------------------------------------------------------------------------

    def wait_s(self, priority: int, now_s: float, *, media: bool, tenant: Tenant = NOBODY) -> float:
        """How long a new request would wait at its stages, of which that of the encoders is for ``media`` only.

        0 while nothing is known.
        """
        wait_s = 0.0
        for stage in (Stage.ENCODE, Stage.PREFILL) if media else (Stage.PREFILL,):
            queue = self._queues[stage]
            if queue.work:
                tenant = self._told_apart(tenant)
                wait_s += queue.wait_s(tenant, priority, now_s, alone=self._alone(tenant, now_s))
        return wait_s

    def takes_s(self, now_s: float, *, media: bool, tenant: Tenant = NOBODY) -> float:
        """How long the slowest of its stages takes for a request, at the tenant's share; 0 while nothing is known."""
        tenant = self._told_apart(tenant)
        alone = self._alone(tenant, now_s)
        stages = (Stage.ENCODE, Stage.PREFILL) if media else (Stage.PREFILL,)
        return max(self._queues[stage].takes_s(tenant, now_s, alone=alone) for stage in stages)

    def answer_s(self, class_name: str) -> float:
        """How long an answer to a request of this class takes from its first token to its last; 0 if unknown."""
        return self._answer_s.get(class_name, 0.0)

    @property
    def least_answer_s(self) -> float:
        """The shortest of these times over all classes; 0 if none is known."""
        return min(self._answer_s.values(), default=0.0)

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        for stage, queue in self._queues.items():
            here = [request for request in self._running.values() if request.stage is stage]
            work: Counter[int] = Counter()
            for request in here:
                work[request.priority] += request.work[stage]
            assert queue.waiting == len(here), f"{stage.value}: requests do not add up"
            assert queue.work == work, f"{stage.value}: work does not add up"
            queue.shares.validate()
