"""Several routers as one (``ports.Router``): each serves one model, and a model may have several."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from triptych.domain.chat import ChatRequest, Tokenized
from triptych.domain.generation import ChatEvent
from triptych.domain.instance import ModelInfo
from triptych.domain.membership import MemberState
from triptych.domain.resolving import ResolvedItem, ResolveRequest
from triptych.domain.timeline import Readiness, Timeline
from triptych.errors import InstanceLost, ModelNotFound, NotFound, TriptychError, Unavailable
from triptych.ports import Membership, Router

logger = logging.getLogger(__name__)

ASK_S = 1.0
"""How often routers that do not answer are asked for their models, and how long an answer may take."""
_INTRODUCTION_S = 2.0
"""How long a refused request waits for a router that has not named its models: it is asked in this time."""


class RouterClient(Router, Protocol):
    """A router at an address."""

    @property
    def refused(self) -> bool:
        """Whether the last connection attempt failed, so that a call fails without being sent."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Router:
    address: str
    client: RouterClient
    models: tuple[ModelInfo, ...] = ()
    """Those that it named last."""
    answers: bool = False
    leaving: bool = False
    running: int = 0
    """Calls of this process."""
    order: int = 0
    """Rises with each call, so that equal ones take turns."""


class Routers:
    """Sends each request to a router of its model: one that answers, with the fewest calls of this process.

    A request that a router refuses as unavailable, or that could not be sent, goes to the next one, which may be one that
    was added just now: it is waited for. One that was sent and lost is not repeated, as it may have been computed.
    """

    def __init__(self, connect: Callable[[str], RouterClient]) -> None:
        self._connect = connect
        self._routers: dict[str, _Router] = {}
        self._turns = 0
        self._asked = asyncio.Event()
        self._added = asyncio.Event()
        self._named = asyncio.Event()

    # --- which routers there are -------------------------------------------------------------------------------------

    def use(self, addresses: Iterable[str], leaving: Iterable[str] = ()) -> None:
        """Call these routers from now on; those in ``leaving`` only while no other serves the model."""
        wanted, going = set(addresses), set(leaving)
        for address in sorted(wanted - self._routers.keys()):
            logger.info("router %s is used", address)
            self._routers[address] = _Router(address, self._connect(address))
            self._added.set()
        for router in self._routers.values():
            router.leaving = router.address in going or router.address not in wanted

    async def follow(self, membership: Membership) -> None:
        """Use the routers that a source of members names."""
        async with aclosing(membership.snapshots()) as snapshots:
            async for snapshot in snapshots:
                leaving = [one.address for one in snapshot.members if one.state is not MemberState.ACTIVE]
                self.use((one.address for one in snapshot.members), leaving)

    @property
    def answering(self) -> bool:
        """Whether any router has answered the last call."""
        return any(router.answers for router in self._routers.values())

    async def keep_asking(self, every_s: float = ASK_S) -> None:
        """Ask all routers for their models, again and again; those that have named none, or do not answer, each second, and
        new ones at once. Forget those that are gone and have no calls.
        """
        left_s = 0.0
        while True:
            self._added.clear()
            await self.ask(all_of_them=left_s <= 0)
            left_s = left_s if left_s > 0 else every_s
            try:
                async with asyncio.timeout(ASK_S):
                    await self._added.wait()
            except TimeoutError:
                left_s -= ASK_S

    async def asked(self) -> None:
        """Return when one router has named its models, or none will for now."""
        await self._asked.wait()

    async def ask(self, *, all_of_them: bool = True) -> None:
        """Ask routers for their models once: all, or those that do not answer or have named none."""
        async with asyncio.TaskGroup() as group:
            for router in self._routers.values():
                if all_of_them or not router.answers or not router.models:
                    group.create_task(self._ask(router))
        self._asked.set()
        for router in list(self._routers.values()):
            if router.leaving and not router.answers and not router.running:
                logger.info("router %s is no longer used", router.address)
                del self._routers[router.address]
                await router.client.close()

    async def close(self) -> None:
        for router in self._routers.values():
            await router.client.close()

    # --- ports.Router ------------------------------------------------------------------------------------------------

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        tried: set[str] = set()
        while True:
            router, begun = self._chosen(request.model, tried), False
            router.running += 1
            try:
                async with aclosing(router.client.chat(request)) as answer:
                    async for events in answer:
                        begun = True
                        yield events
            except Unavailable as error:
                if begun or not await self._may_try_another(router, error, request.model, tried):
                    raise
                logger.info("request %s: router %s refused it: %s", request.request_id, router.address, error.message)
            else:
                return
            finally:
                router.running -= 1

    async def tokenize(self, request: ChatRequest, *, return_token_strs: bool = False) -> Tokenized:
        tried: set[str] = set()
        while True:
            router = self._chosen(request.model, tried)
            try:
                return await router.client.tokenize(request, return_token_strs=return_token_strs)
            except Unavailable as error:
                if not await self._may_try_another(router, error, request.model, tried):
                    raise

    async def resolve(self, request: ResolveRequest) -> AsyncGenerator[tuple[ResolvedItem, ...]]:
        """A router knows the keys that it has returned itself, so one after the other is asked for keys."""
        tried: set[str] = set()
        while True:
            router, begun = self._chosen(request.model, tried), False
            router.running += 1
            try:
                async with aclosing(router.client.resolve(request)) as answer:
                    async for items in answer:
                        begun = True
                        yield items
            except NotFound:
                if begun or not request.keys or not self._candidates(request.model, tried):
                    raise
            except Unavailable as error:
                if begun or not await self._may_try_another(router, error, request.model, tried):
                    raise
            else:
                return
            finally:
                router.running -= 1

    async def models(self) -> tuple[ModelInfo, ...]:
        """All models, each once, in alphabetical order."""
        found = {model.model_id: model for router in self._routers.values() for model in router.models}
        return tuple(found[name] for name in sorted(found))

    async def timeline(self, request_id: str) -> Timeline:
        """Asks one router after the other, as any may have had the request."""
        lost: TriptychError | None = None
        for router in sorted(self._routers.values(), key=lambda one: not one.answers):
            try:
                return await router.client.timeline(request_id)
            except NotFound:
                continue
            except Unavailable as error:
                lost = error
        raise lost or NotFound("the request is unknown, or its timeline was dropped", param="request_id")

    async def readiness(self) -> Readiness:
        """Ready when every model has a router that is; ``missing`` names what the others lack, by model."""
        routers = [router for router in self._routers.values() if router.answers]
        if not routers:
            return Readiness(ready=False, missing=("router",))
        found: list[Readiness] = []
        for router in routers:
            try:
                found.append(await router.client.readiness())
            except TriptychError:
                found.append(Readiness(ready=False, missing=("router",)))
            if found[-1].ready and not router.models:  # ready only since it was asked for them
                await self._ask(router)
        ready: set[str] = set()
        lacks: dict[str, tuple[str, ...]] = {}
        for router, one in zip(routers, found, strict=True):
            for name in [model.model_id for model in router.models] or [""]:
                if one.ready:
                    ready.add(name)
                lacks.setdefault(name, one.missing)
        missing = dict.fromkeys(
            f"{stage} of {name}" if name else stage
            for name, stages in sorted(lacks.items())
            if name not in ready and (name or not ready)
            for stage in stages
        )
        instances = dict.fromkeys(line for one in found for line in one.instances)
        return Readiness(ready=not missing, missing=tuple(missing), instances=tuple(instances))

    # --- private -----------------------------------------------------------------------------------------------------

    def _chosen(self, model: str, tried: set[str]) -> _Router:
        """Raises ModelNotFound, or Unavailable while no router could be asked."""
        candidates = self._candidates(model, tried)
        if not candidates:
            if any(router.models for router in self._routers.values()):
                raise ModelNotFound(f"the model {model!r} is not served", param="model")
            raise Unavailable("no router is connected yet", retry_after_s=ASK_S)
        router = min(candidates, key=lambda one: (not one.answers, one.leaving, one.running, one.order))
        tried.add(router.address)
        self._turns += 1
        router.order = self._turns
        return router

    def _candidates(self, model: str, tried: set[str]) -> list[_Router]:
        return [
            router
            for address, router in self._routers.items()
            if address not in tried and any(one.model_id == model for one in router.models)
        ]

    async def _may_try_another(self, router: _Router, error: Unavailable, model: str, tried: set[str]) -> bool:
        """Waits, while there is none, for routers that have not named their models yet."""
        if isinstance(error, InstanceLost):
            if not router.client.refused:
                return False
            router.answers = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_INTRODUCTION_S):
                while not self._candidates(model, tried) and not all(one.models for one in self._routers.values()):
                    self._named.clear()
                    await self._named.wait()
        return bool(self._candidates(model, tried))

    async def _ask(self, router: _Router) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                models = await router.client.models()
        except (TimeoutError, TriptychError):
            if router.answers:
                logger.warning("router %s does not answer", router.address)
            router.answers = False
        else:
            router.answers = True
            router.models = models or router.models
            if router.models:
                self._asked.set()
                self._named.set()
