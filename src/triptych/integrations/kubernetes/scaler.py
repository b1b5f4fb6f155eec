"""Scales Deployments (``ports.Scaler``): one Deployment per pool, whose pods are the instances, by name."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych.domain.scaling import PoolName, ProcessPhase, ScaledInstance, ScaledPool
from triptych.errors import Conflict, Deposed, InvalidRequest, NotFound, TriptychError, Unavailable
from triptych.integrations.kubernetes.api import KubernetesApi, Pod, Scale

logger = logging.getLogger(__name__)

TOKEN = "triptych/fencing-token"  # noqa: S105 - the name of an annotation
"""Annotation of the Lease: the highest fencing token of all managers."""

_CHOSEN = "-1000"
_ATTEMPTS = 5


@dataclass(slots=True)
class _Target:
    deployment: str
    wanted: int | None = None
    removals: set[str] = field(default_factory=set)
    fault: str = ""


class KubernetesScaler:
    """``ports.Scaler`` over Deployments, while ``run`` runs.

    A Deployment gets as many replicas as are wanted, or as are ready and not named for removal, if those are more: ready pods
    are deleted only by name. Kubernetes deletes pods that are not ready first, then the one with the lowest deletion
    cost. The named ones get that cost before the number of replicas is lowered. A named pod that must be replaced,
    as no fewer are wanted, is deleted. During a rollout a pod of each template may be ready. So ready pods
    do not count then, and the number of replicas is not lowered until it is over.

    Tokens are compared in an annotation of a Lease object, so that managers refuse each other's outdated orders. Each write
    to a Deployment depends on the version that was read before that comparison.
    """

    def __init__(
        self,
        api: KubernetesApi,
        deployments: Mapping[PoolName, str],
        *,
        lease: str = "triptych-scaling",
        max_size: int = 1024,
        interval_s: float = 5.0,
    ) -> None:
        """Make a scaler. Every ``interval_s``, and after each order, Deployments are compared with what is wanted."""
        self._api = api
        self._targets = {pool: _Target(deployment) for pool, deployment in deployments.items()}
        self._lease = lease
        self._max_size = max_size
        self._interval_s = interval_s
        self._token = 0
        self._news = asyncio.Event()
        self._closed = False

    # --- orders ---

    async def scale(self, pool: PoolName, size: int, token: int) -> None:
        target = self._target(pool)
        if not 0 <= size <= self._max_size:
            raise InvalidRequest(f"the size of pool {pool} is {size}, it must be 0 to {self._max_size}")
        await self._take(token)
        target.wanted = size
        self._news.set()

    async def remove(self, pool: PoolName, instance: str, token: int) -> None:
        target = self._target(pool)
        self._refuse_below(token, self._token)
        _, pods = await self._observe(target)
        if all(pod.name != instance for pod in pods):
            raise NotFound(f"pool {pool} has no pod {instance[:80]!r}")
        await self._take(token)
        target.removals.add(instance)
        self._news.set()

    async def set_degree(self, pool: PoolName, degree: int, token: int) -> None:
        """Raises InvalidRequest: devices and settings of pods are in their Deployment, which it only scales."""
        target = self._target(pool)
        self._refuse_below(token, self._token)
        raise InvalidRequest(
            f"the degree of pool {pool} is in its Deployment: set GPUs and arguments for degree {degree} in {target.deployment} and apply"
            " it, then Kubernetes replaces the pods one by one, and each drains before it ends"
        )

    async def pools(self) -> tuple[ScaledPool, ...]:
        return tuple([await self._state(pool, target) for pool, target in self._targets.items()])

    async def close(self) -> None:
        self._closed = True
        self._news.set()

    # --- carrying them out ---

    async def run(self) -> None:
        """Make the Deployments what is wanted, until closed."""
        while not self._closed:
            self._news.clear()
            for pool, target in self._targets.items():
                if target.wanted is not None or target.removals:
                    await self._attempt(pool, target)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._news.wait()

    async def _attempt(self, pool: PoolName, target: _Target) -> None:
        fault, token = "", self._token
        try:
            await self._reconcile(pool, target)
        except Deposed as error:
            if self._token != token:  # by a later order of this manager, which the next round carries out
                return
            target.wanted = None
            target.removals.clear()
            fault = str(error)
        except TriptychError as error:  # after a Conflict, somebody else's write is seen at the next interval
            fault = str(error)
        if fault and fault != target.fault:
            logger.warning("pool %s: %s", pool, fault)
        target.fault = fault

    async def _reconcile(self, pool: PoolName, target: _Target) -> None:
        named = frozenset(target.removals)  # orders that come while this runs are the next round's
        scale, pods = await self._observe(target)
        await self._take(self._token)
        present = {pod.name: pod for pod in pods if not pod.deleting}
        target.removals -= named - present.keys()
        leaving = sorted(named & present.keys())
        for name in leaving:
            if present[name].deletion_cost != _CHOSEN:
                await self._api.mark(name, _CHOSEN)
        kept = sum(pod.ready and pod.name not in leaving for pod in present.values())
        wanted = scale.replicas if target.wanted is None else target.wanted
        rollout = len({pod.template for pod in present.values()}) > 1
        replicas = max(wanted, scale.replicas if rollout else kept)
        if replicas != scale.replicas:
            await self._api.set_replicas(target.deployment, replicas, scale.version)
            logger.info("pool %s: %s has %d replicas, %d before", pool, target.deployment, replicas, scale.replicas)
        elif len(pods) == scale.replicas == scale.observed:  # nothing is about to be deleted anyway
            for name in leaving:
                with contextlib.suppress(NotFound):
                    await self._api.delete_pod(name, present[name].uid)

    async def _observe(self, target: _Target) -> tuple[Scale, list[Pod]]:
        scale = await self._api.scale(target.deployment)
        if not scale.selector:  # it would name every pod of the namespace
            raise Unavailable(f"Deployment {target.deployment} has not been seen by its controller yet")
        return scale, await self._api.pods(scale.selector)

    async def _state(self, pool: PoolName, target: _Target) -> ScaledPool:
        scale, pods = await self._observe(target)
        instances = [ScaledInstance(pod.name, _phase(pod), pod.reason) for pod in pods]
        planned = scale.replicas if target.wanted is None else target.wanted
        missing = planned - sum(not pod.deleting for pod in pods)
        instances += [
            ScaledInstance(f"{target.deployment}-ordered-{number}", ProcessPhase.ORDERED)
            for number in range(1, missing + 1)
        ]
        failed = [instance for instance in instances if instance.phase is ProcessPhase.FAILED]
        fault = target.fault or (f"{failed[0].name}: {failed[0].reason or 'failed'}" if failed else "")
        return ScaledPool(pool, target.wanted, tuple(instances), fault)

    # --- fencing ---

    async def _take(self, token: int) -> None:
        """Raise Deposed unless ``token`` is the highest one of all managers."""
        for _ in range(_ATTEMPTS):
            self._refuse_below(token, self._token)
            try:
                annotations, version = await self._api.lease(self._lease)
            except NotFound:
                raise Unavailable(f"there is no Lease {self._lease} in Kubernetes: create it first") from None
            recorded = annotations.get(TOKEN, "")
            highest = int(recorded) if recorded.isascii() and recorded.isdecimal() else 0
            self._refuse_below(token, highest)
            if token > highest:
                try:
                    await self._api.annotate_lease(self._lease, {TOKEN: str(token)}, version)
                except Conflict:
                    continue
            self._token = max(self._token, token)
            return
        raise Unavailable(f"Lease {self._lease} changes faster than it can be read")

    @staticmethod
    def _refuse_below(token: int, highest: int) -> None:
        if token < highest:
            raise Deposed(f"the order's token is {token}, a later leader has {highest}")

    def _target(self, pool: PoolName) -> _Target:
        try:
            return self._targets[pool]
        except KeyError:
            raise NotFound(f"there is no pool {pool}") from None


def _phase(pod: Pod) -> ProcessPhase:
    if pod.deleting:
        return ProcessPhase.STOPPING
    if pod.ready:
        return ProcessPhase.RUNNING
    return ProcessPhase.FAILED if pod.failed else ProcessPhase.STARTING
