"""Accounts of what each tenant has had and waits for at one stage of a router: the state of ``policy.fairness``.

A tenant's account is the work that it was served over its weight. A tenant that begins to wait begins with the least account of
those that wait, if its own is less. Once nobody waits, all accounts are forgotten; before, the least of those that do not wait, if they are many. Costs: O(log n) of the tenants, per request.
"""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from triptych.domain.queue_position import AGEING_S
from triptych.domain.record import record
from triptych.domain.tenant import Tenant
from triptych.policy.fairness import UNSHARED, Fairness, Share

_UNKNOWN_S = 0.1
"""What a request is taken to need of the stage until its rate is known."""
MAX_IDLE = 1024
"""Accounts kept of tenants that do not wait, as callers may name any number."""


@dataclass(slots=True)
class _Account:
    weight: float
    served: float = -inf
    """Work over weight, in which what is not finished counts as was expected."""
    work: dict[int, int] = field(default_factory=dict)
    """Work that waits, by priority."""
    all_work: int = 0
    waiting: int = 0


@record
class Place:
    """A request in the queue of a stage."""

    tenant: str
    priority: int
    work: int
    share: Share
    planned_s: float
    """When its tenant's share has room for it, as far as was known when it came."""
    alone: bool


class TenantShares:
    """Part of ``machine.router.wait_predictor.WaitPredictor``, which alone changes it."""

    def __init__(self, fairness: Fairness) -> None:
        self._fairness = fairness
        self._accounts: dict[str, _Account] = {}
        """Of the tenants that wait, or have been served since nobody waited."""
        self._waiting: set[str] = set()
        self._weight = 0.0
        """Of those that wait."""
        self._least: list[tuple[float, str]] = []
        """A heap of the accounts of those that wait, with outdated ones among them."""
        self._planned_s = inf
        """When what was served last was planned, of that which is not within its share."""
        self._alone_name = ""
        self._alone = 0
        """Waiting requests that came while there was one tenant, whose order is not by shares."""

    @property
    def accounts(self) -> int:
        """Tenants that are remembered."""
        return len(self._accounts)

    def enter(
        self, tenant: Tenant, priority: int, work: int, per_s: float | None, now_s: float, *, alone: bool
    ) -> Place:
        """A request comes. ``per_s`` is the work that the stage serves per second, if known.

        ``alone``: there is no other tenant, so that it counts as having come when it does.
        """
        account = self._join(tenant)
        share, planned_s = UNSHARED, now_s
        if alone:
            self._alone_name = tenant.name
        else:
            own = account.served + account.all_work / account.weight - self._reached()
            per_s = work / _UNKNOWN_S if per_s is None else per_s
            ahead_s = own * self._weight / per_s if per_s > 0 else 0.0
            late_s = max(0.0, now_s - self._planned_s)
            planned_s = now_s + ahead_s - late_s
            if self._alone and tenant.name != self._alone_name:
                late_s += AGEING_S  # what came alone does not count as beyond the share, however much it is
            share = self._fairness(ahead_s=ahead_s)
            share = share._replace(behind_s=share.behind_s - late_s)
        self._alone += alone
        account.waiting += 1
        account.all_work += work
        account.work[priority] = account.work.get(priority, 0) + work
        return Place(tenant.name, priority, work, share, planned_s, alone)

    def leave(self, place: Place, *, served: bool) -> None:
        account = self._accounts[place.tenant]
        self._alone -= place.alone
        account.waiting -= 1
        account.all_work -= place.work
        account.work[place.priority] -= place.work
        if not account.work[place.priority]:
            del account.work[place.priority]
        if served:
            if not place.share.within:
                self._planned_s = place.planned_s
            self._charge(place.tenant, account, place.work)
        if not account.waiting:
            self._waiting.discard(place.tenant)
            self._weight -= account.weight
            if len(self._accounts) - len(self._waiting) > MAX_IDLE:
                self._forget_least_idle()
        if not self._waiting:  # nobody has had too much, or is owed anything
            self._accounts.clear()
            self._least.clear()
            self._weight, self._planned_s = 0.0, inf

    def correct(self, place: Place, work: int) -> None:
        """Correct an account once it is known what a served request took."""
        if (account := self._accounts.get(place.tenant)) is not None:
            self._charge(place.tenant, account, work - place.work)

    def waiting_work(self, tenant: str, priority: int) -> tuple[int, int]:
        """The work of this tenant that waits with this priority, and with one that goes before."""
        if (account := self._accounts.get(tenant)) is None:
            return 0, 0
        before = sum(work for other, work in account.work.items() if other < priority)
        return account.work.get(priority, 0), before

    def part(self, tenant: Tenant) -> float:
        """The tenant's part of the weights of all that wait, if it waits too."""
        own = self._accounts[tenant.name].weight if tenant.name in self._waiting else 0.0
        return tenant.weight / (tenant.weight + max(0.0, self._weight - own))

    def _join(self, tenant: Tenant) -> _Account:
        """The account of a tenant that is about to wait."""
        if (account := self._accounts.get(tenant.name)) is None:
            account = self._accounts[tenant.name] = _Account(tenant.weight)
        if account.waiting:
            self._weight += tenant.weight - account.weight
        else:
            account.served = max(account.served, self._reached())
            self._weight += tenant.weight
            self._waiting.add(tenant.name)
            heappush(self._least, (account.served, tenant.name))
        account.weight = tenant.weight
        return account

    def _charge(self, name: str, account: _Account, work: int) -> None:
        account.served += work / account.weight
        if name in self._waiting:
            heappush(self._least, (account.served, name))
        if len(self._least) > 4 * len(self._waiting) + 64:
            self._least = [(self._accounts[tenant].served, tenant) for tenant in self._waiting]
            heapify(self._least)

    def _forget_least_idle(self) -> None:
        """Forget the least accounts of those that do not wait: most are not above that with which they would begin again."""
        idle = [(account.served, name) for name, account in self._accounts.items() if not account.waiting]
        for _, name in sorted(idle)[: len(idle) // 2]:
            del self._accounts[name]

    def _reached(self) -> float:
        """The least account of those that wait; 0 if nobody does."""
        while self._least:
            served, name = self._least[0]
            if name in self._waiting and self._accounts[name].served == served:
                return served
            heappop(self._least)
        return 0.0

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        waiting = {name for name, account in self._accounts.items() if account.waiting}
        assert waiting == self._waiting, "those that wait are known"
        assert len(self._accounts) - len(waiting) <= MAX_IDLE, "too many idle accounts"
        weight = sum(self._accounts[name].weight for name in waiting)
        assert abs(weight - self._weight) < 1e-6 * (1 + weight), "weights do not add up"
        for account in self._accounts.values():
            assert sum(account.work.values()) == account.all_work, "work does not add up"
        least = min((self._accounts[name].served for name in waiting), default=0.0)
        assert self._reached() == least, "the least account is not found"
