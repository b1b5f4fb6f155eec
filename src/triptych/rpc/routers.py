"""Several routers as one (``ports.Router``): each serves one model, and a model may have several."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from triptych.domain.chat import ChatRequest, Tokenized
from triptych.domain.generation import ChatEvent
from triptych.domain.instance import ModelInfo
from triptych.domain.lora import LoadedLora, LoadLora
from triptych.domain.membership import MemberState
from triptych.domain.resolving import ResolvedItem, ResolveRequest
from triptych.domain.timeline import Readiness, Timeline
from triptych.errors import (
    InstanceLost,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    TriptychError,
    Unavailable,
)
from triptych.machine.answer_so_far import AnswerSoFar
from triptych.machine.router_attempts import Next, RouterAttempts
from triptych.ports import Membership, Rng, Router
from triptych.wire.status import LOST, NOT_SERVED

logger = logging.getLogger(__name__)

T = TypeVar("T")

ASK_S = 1.0
"""Interval at which routers that do not answer are asked for their models, and longest wait for an answer, seconds."""
_MODELS_NAMED = 8
"""Most models named in the error for a model that is not served."""
_INTRODUCTION_S = 2.0
"""Time that a refused request waits for a router that has not named its models, seconds: it is asked in this time."""
ROUTER_LOST = "the connection to the router was lost"
"""Text on a broken connection, without more that is known of it."""
NO_ROUTER = "what answers is no router, but another service"


class RouterClient(Router, Protocol):
    """A router at an address."""

    @property
    def refused(self) -> bool:
        """Whether the last connection attempt failed, so that a call fails without being sent."""
        ...

    @property
    def connected(self) -> bool: ...

    @property
    def continues(self) -> bool:
        """Whether the router goes on with answers that another router began."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Router:
    address: str
    client: RouterClient
    models: tuple[ModelInfo, ...] = ()
    """Models that the router named last."""
    answers: bool = False
    leaving: bool = False
    running: int = 0
    """Calls of this process."""
    order: int = 0
    """Rises with each call, so that equal ones take turns."""


@dataclass(slots=True, eq=False)
class _Job:
    """Job for a router."""

    request_id: str
    model: str
    timeout_s: float
    answer: AnswerSoFar | None = None
    asks_all: bool = False
    """A router that does not know what is asked for says nothing about the others."""
    begun: bool = False
    """Whether some of the answer has come."""

    @property
    def goes_on(self) -> bool:
        """Whether only routers can be asked that go on with the answer of another one."""
        return self.answer is not None and self.answer.begun


class Routers:
    """Owner of the routers to which requests are sent: each to one of its model that answers, with the fewest calls of this process.

    A request that a router refuses as unavailable, or that could not be sent, goes to the next one. That may be one that was
    added just now: it is waited for. A request whose router is lost goes to another one too, or to the same when it is back. A
    chat goes on there after the tokens that were passed on (docs/adr/0036).
    """

    def __init__(self, connect: Callable[[str], RouterClient], rng: Rng | None = None) -> None:
        """``rng`` draws the seeds of requests without one."""
        self._connect = connect
        self._rng = rng or random.SystemRandom()
        self.continuations = 0
        """Answers that went on at another router."""
        self._routers: dict[str, _Router] = {}
        self._follows = False
        self._turns = 0
        self._listed = asyncio.Event()
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
        self._follows = True
        async with aclosing(membership.snapshots()) as snapshots:
            async for snapshot in snapshots:
                leaving = [member.address for member in snapshot.members if member.state is not MemberState.ACTIVE]
                self.use((member.address for member in snapshot.members), leaving)
                self._listed.set()

    async def listed(self) -> None:
        """Return when the source that is followed has named its routers, if any."""
        await self._listed.wait()

    @property
    def reached(self) -> bool:
        """Whether any router is there."""
        if self._only is not None:
            return self._only.client.connected
        return any(router.answers for router in self._routers.values())

    @property
    def unreached(self) -> bool:
        """Whether no router is there, as far as known."""
        return self._only.client.refused if self._only is not None else not self.reached

    @property
    def _only(self) -> _Router | None:
        """The router, if there is one and there will be no other: then it is asked whatever it is not known for."""
        alone = len(self._routers) == 1 and not self._follows
        return next(iter(self._routers.values())) if alone else None

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
        """Return when one router has named its models, or none will for now. An only one need not have."""
        if self._only is None:
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
        """Raises what a router raises, ModelNotFound, or Unavailable while no router could be asked."""
        answer = AnswerSoFar(request, request.sampling.seeded(self._rng))
        job = _Job(request.request_id, request.model, request.timeout_s, answer)
        async with aclosing(self._at_any(job, lambda client, left_s: client.chat(answer.rest(left_s)))) as batches:
            async for events in batches:
                yield answer.take(events)

    async def tokenize(self, request: ChatRequest, *, return_token_strs: bool = False) -> Tokenized:
        async def send(client: RouterClient, left_s: float) -> AsyncGenerator[Tokenized]:
            asked = replace(request, timeout_s=left_s)
            yield await client.tokenize(asked, return_token_strs=return_token_strs)

        async with aclosing(self._at_any(_Job(request.request_id, request.model, request.timeout_s), send)) as answers:
            return await anext(answers)

    async def resolve(self, request: ResolveRequest) -> AsyncGenerator[tuple[ResolvedItem, ...]]:
        """A router knows the keys that it has returned itself, so one after the other is asked for keys."""

        def send(client: RouterClient, left_s: float) -> AsyncGenerator[tuple[ResolvedItem, ...]]:
            return client.resolve(replace(request, timeout_s=left_s))

        job = _Job(request.request_id, request.model, request.timeout_s, asks_all=bool(request.keys))
        async with aclosing(self._at_any(job, send)) as held:
            async for items in held:
                yield items

    async def models(self) -> tuple[ModelInfo, ...]:
        """Models of all routers, each once, in alphabetical order; those that LoRA adapters stand for at the end."""
        if self._only is not None:
            return await _answered(self._only.client.models())
        models = {model.model_id: model for router in self._routers.values() for model in router.models}
        return tuple(sorted(models.values(), key=lambda model: (bool(model.parent), model.model_id)))

    async def load_lora(self, order: LoadLora) -> LoadedLora:
        """By one router of the base model. Raises InvalidRequest where there are several models, and none is named."""
        bases = sorted(
            {model.model_id for router in self._routers.values() for model in router.models if not model.parent}
        )
        if not order.parent and len(bases) > 1:
            raise InvalidRequest(
                f"several models are served: name the parent, one of {', '.join(bases)}", param="parent"
            )
        job = _Job("", order.parent or "".join(bases), ASK_S)
        lora = await _answered(self._chosen(job, set()).client.load_lora(order))
        await self.ask()
        return lora

    async def unload_lora(self, name: str) -> None:
        await _answered(self._chosen(_Job("", name, ASK_S), set()).client.unload_lora(name))
        await self.ask()

    async def timeline(self, request_id: str) -> Timeline:
        """Asks one router after the other, as any may have had the request."""
        lost: TriptychError | None = None
        for router in sorted(self._routers.values(), key=lambda router: not router.answers):
            try:
                return await _answered(router.client.timeline(request_id))
            except NotFound:
                continue
            except Unavailable as error:
                lost = error
        raise lost or NotFound("the request is unknown, or its timeline was dropped", param="request_id")

    async def readiness(self) -> Readiness:
        """Ready when every model has a router that is; ``missing`` names what the others lack, by model."""
        if self._only is not None:
            return await _answered(self._only.client.readiness())
        routers = [router for router in self._routers.values() if router.answers]
        if not routers:
            return Readiness(ready=False, missing=("router",))
        all_readiness: list[Readiness] = []
        for router in routers:
            try:
                all_readiness.append(await router.client.readiness())
            except TriptychError:
                all_readiness.append(Readiness(ready=False, missing=("router",)))
            if all_readiness[-1].ready and not router.models:  # ready only since it was asked for them
                await self._ask(router)
        ready: set[str] = set()
        lacks: dict[str, tuple[str, ...]] = {}
        for router, readiness in zip(routers, all_readiness, strict=True):
            for name in [model.model_id for model in router.models if not model.parent] or [""]:
                if readiness.ready:
                    ready.add(name)
                lacks.setdefault(name, readiness.missing)
        missing = dict.fromkeys(
            f"{stage} of {name}" if name else stage
            for name, stages in sorted(lacks.items())
            if name not in ready and (name or not ready)
            for stage in stages
        )
        instances = dict.fromkeys(line for readiness in all_readiness for line in readiness.instances)
        return Readiness(ready=not missing, missing=tuple(missing), instances=tuple(instances))

    # --- private -----------------------------------------------------------------------------------------------------

    async def _at_any(self, job: "_Job", send: Callable[[RouterClient, float], AsyncGenerator[T]]) -> AsyncGenerator[T]:
        """Answers of a router; and those of others to what is missing, if it is lost."""
        loop = asyncio.get_running_loop()
        attempts = RouterAttempts(loop.time() + job.timeout_s)
        while True:
            router = self._chosen(job, attempts.tried)
            was_connected = router.client.connected
            router.running += 1
            try:
                async with aclosing(send(router.client, attempts.left_s(loop.time()))) as answer:
                    async for reply in answer:
                        if attempts.error is not None and job.begun:
                            self.continuations += 1
                        if not attempts.has_output:
                            attempts.progressed()
                            job.begun = True
                        yield reply
                if job.answer is None or job.answer.is_complete:
                    return
                lost: TriptychError = InstanceLost("the answer's stream ended early")
            except TriptychError as error:
                if job.answer is not None and job.answer.is_complete:
                    return
                lost = _of_router(error)
            finally:
                router.running -= 1
            await self._after(lost, router, job, attempts, refused=router.client.refused and not was_connected)

    async def _after(
        self, error: TriptychError, router: _Router, job: "_Job", attempts: RouterAttempts, *, refused: bool
    ) -> None:
        """Return when the request may be sent again. Raises the error that ends it."""
        loop = asyncio.get_running_loop()
        if isinstance(error, NotFound) and job.asks_all and not job.begun:
            attempts.tried.add(router.address)
            follows = Next.OTHER if self._candidates(job, attempts.tried) else Next.FAIL
        else:
            may_repeat = self._may_repeat(job)
            follows = attempts.failed(router.address, error, loop.time(), refused=refused, may_repeat=may_repeat)
        if isinstance(error, InstanceLost) and not error.sent_by_peer:
            router.answers = False
        if follows is Next.OTHER and isinstance(error, Unavailable) and not await self._has_other(job, attempts.tried):
            follows = attempts.all_tried(error, loop.time())
        if follows is Next.ANY:
            logger.info("request %s: router %s: %s", job.request_id, router.address, error.message)
            return await self._wait_for_any(job, attempts)
        if follows is Next.FAIL:
            raise _told(error, job, attempts)
        logger.info("request %s: router %s refused it: %s", job.request_id, router.address, error.message)
        return None

    async def _wait_for_any(self, job: "_Job", attempts: RouterAttempts) -> None:
        """Return when there is a router to try. Raises why the last one was lost if there is none for too long."""
        loop = asyncio.get_running_loop()
        while not self._candidates(job, attempts.tried):
            pause_s = attempts.pause_s(loop.time())
            if pause_s is None:
                if attempts.error is None:
                    raise AssertionError("a request looks for a router without having lost one")
                raise _told(attempts.error, job, attempts)
            await asyncio.sleep(pause_s)

    async def _has_other(self, job: "_Job", tried: set[str]) -> bool:
        """Whether there is another router. While there is none, waits for those that have not named their models yet."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_INTRODUCTION_S):
                while not self._candidates(job, tried) and not self._all_named:
                    self._named.clear()
                    await self._named.wait()
        return bool(self._candidates(job, tried))

    def _chosen(self, job: "_Job", tried: set[str]) -> _Router:
        """Raises ModelNotFound, or Unavailable while no router could be asked."""
        candidates = self._candidates(job, tried)
        if not candidates:
            if served := sorted({model.model_id for router in self._routers.values() for model in router.models}):
                names = ", ".join(map(repr, served[:_MODELS_NAMED]))
                more = len(served) - _MODELS_NAMED
                names += f" and {more} more" if more > 0 else ""
                raise ModelNotFound(f"the model {job.model!r} is not served; served: {names}", param="model")
            raise Unavailable("no router is connected yet", retry_after_s=ASK_S)
        router = candidates[0]
        if len(candidates) > 1:
            router = min(candidates, key=lambda known: (not known.answers, known.leaving, known.running, known.order))
        self._turns += 1
        router.order = self._turns
        return router

    def _candidates(self, job: "_Job", tried: AbstractSet[str] = frozenset()) -> list[_Router]:
        return [
            router
            for address, router in self._routers.items()
            if address not in tried
            and (router is self._only or any(model.model_id == job.model for model in router.models))
            and (router.client.continues or not job.goes_on)
        ]

    @property
    def _all_named(self) -> bool:
        return self._only is not None or all(router.models for router in self._routers.values())

    def _may_repeat(self, job: "_Job") -> bool:
        """Whether what is missing of an answer can be had from a router; it may be the one that was lost."""
        if not job.begun:
            return True
        return job.answer is not None and job.answer.may_go_on and bool(self._candidates(job))

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


async def _answered(query: Awaitable[T]) -> T:
    """Answer of a router that is asked once. Raises Unavailable if it does not answer."""
    try:
        return await query
    except TriptychError as error:
        known_error = _of_router(error)
        raise (_no_answer() if known_error.message == ROUTER_LOST else known_error) from None


def _of_router(error: TriptychError) -> TriptychError:
    """An error of a call that says nothing of whom it called, as one that tells of a router."""
    match error:
        case InstanceLost(message=text, sent_by_peer=False) if text == LOST:
            return InstanceLost(ROUTER_LOST)
        case InternalError(message=text, sent_by_peer=False) if text == NOT_SERVED:
            return Unavailable(NO_ROUTER)
    return error


def _told(error: TriptychError, job: _Job, attempts: RouterAttempts) -> TriptychError:
    """The error that ends a request: one that no router has had was not lost with any."""
    was_sent = job.begun or attempts.was_sent
    return error if was_sent or error.message != ROUTER_LOST else _no_answer()


def _no_answer() -> Unavailable:
    return Unavailable("no router answers", retry_after_s=ASK_S)
