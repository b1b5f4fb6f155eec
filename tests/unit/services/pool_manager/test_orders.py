"""Orders to a scaler: the newest size first, then removals, until they are accepted."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from triptych.domain.scaling import PoolName, ScaledPool
from triptych.domain.stage import Role
from triptych.domain.store import Fence
from triptych.errors import Deposed, NotFound, Unavailable
from triptych.machine.pool_manager.pool_events import OrderFailed, OrderTaken, RemoveInstance, ScaleTo
from triptych.runtime.tasks import TaskScope
from triptych.services.pool_manager.orders import Orders
from triptych.virtual import virtual_time

POOL = PoolName("m", Role.E)


class Scaler:
    """Answers each call with the next error, if there is one, after ``takes_s``."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int | str, int]] = []
        self.errors: list[Exception] = []
        self.takes_s = 0.0

    async def scale(self, pool: PoolName, size: int, token: int) -> None:
        assert pool == POOL
        await self._answer("scale", size, token)

    async def remove(self, pool: PoolName, instance: str, token: int) -> None:
        assert pool == POOL
        await self._answer("remove", instance, token)

    async def set_degree(self, pool: PoolName, degree: int, token: int) -> None:
        raise AssertionError((pool, degree, token))

    async def _answer(self, kind: str, what: int | str, token: int) -> None:
        self.calls.append((kind, what, token))
        await asyncio.sleep(self.takes_s)
        if self.errors:
            raise self.errors.pop(0)

    async def pools(self) -> tuple[ScaledPool, ...]:
        return ()

    async def close(self) -> None: ...


class Site:
    def __init__(self) -> None:
        self.scaler = Scaler()
        self.fence: Fence | None = Fence("leader", 7)
        self.answers: list[OrderFailed | OrderTaken] = []
        self.working: set[str] = set()
        clock = asyncio.get_running_loop().time
        self.orders = Orders(
            POOL,
            self.scaler,
            fence=lambda: self.fence,
            answer=self.answers.append,
            works=lambda name: name in self.working,
            timeout_s=10.0,
            clock=clock,
        )

    def scale(self, size: int, number: int = 1) -> None:
        self.orders.scale(ScaleTo(size, number, "it is so"))

    def remove(self, name: str) -> None:
        self.orders.remove(RemoveInstance(name, "it has drained"))


def play(scenario: Callable[[Site], Coroutine[Any, Any, None]]) -> None:
    async def test() -> None:
        site = Site()
        async with TaskScope("orders") as scope:
            scope.spawn(site.orders.run(), name="orders")
            await scenario(site)
            site.orders.close()
            await asyncio.sleep(0.1)
            assert len(scope) == 0

    virtual_time.run(test())


def test_a_size_goes_before_removals_so_that_what_is_removed_is_not_replaced() -> None:
    async def scenario(site: Site) -> None:
        site.remove("a")
        site.scale(2)
        await asyncio.sleep(1)
        assert site.scaler.calls == [("scale", 2, 7), ("remove", "a", 7)]
        assert site.answers == [OrderTaken(1)]

    play(scenario)


def test_nothing_is_sent_without_a_fence_and_what_waits_is_forgotten() -> None:
    async def scenario(site: Site) -> None:
        site.scaler.errors = [Unavailable("away")]
        site.scale(2)
        site.remove("a")
        await asyncio.sleep(0.1)
        site.fence = None
        await asyncio.sleep(60)
        site.scale(3)
        await asyncio.sleep(1)
        site.fence = Fence("leader", 9)
        await asyncio.sleep(60)
        assert site.scaler.calls == [("scale", 2, 7)]
        site.scale(4)
        await asyncio.sleep(1)
        assert site.scaler.calls[1:] == [("scale", 4, 9)]

    play(scenario)


def test_a_call_that_fails_is_repeated_with_the_newest_size_and_token() -> None:
    async def scenario(site: Site) -> None:
        site.scaler.errors = [Unavailable("away"), ValueError("a defect"), Unavailable("away")]
        site.scale(2)
        await asyncio.sleep(0.1)
        site.scale(3, number=2)
        site.fence = Fence("leader", 8)
        await asyncio.sleep(60)
        assert site.scaler.calls == [("scale", 2, 7), *[("scale", 3, 8)] * 3]
        assert [type(answer) for answer in site.answers] == [OrderFailed] * 3 + [OrderTaken]
        assert site.orders.sent == {("scale", "failed"): 3, ("scale", "accepted"): 1}
        assert "defect" in str(site.answers[1])

    play(scenario)


def test_a_pool_that_the_scaler_does_not_know_is_asked_for_with_growing_pauses() -> None:
    async def scenario(site: Site) -> None:
        site.scaler.errors = [NotFound("there is no such pool") for _ in range(100)]
        site.scale(2)
        await asyncio.sleep(60)
        assert 2 < len(site.scaler.calls) < 12
        assert {type(answer) for answer in site.answers} == {OrderFailed}

    play(scenario)


def test_an_instance_that_works_again_is_not_stopped_any_more() -> None:
    async def scenario(site: Site) -> None:
        site.scaler.errors = [Unavailable("away")]
        site.remove("a")
        site.remove("b")
        await asyncio.sleep(0.1)
        site.working.add("a")
        await asyncio.sleep(60)
        assert [what for _, what, _ in site.scaler.calls] == ["a", "b"]

    play(scenario)


def test_a_scaler_that_does_not_answer_counts_as_failed_and_a_newer_size_goes_at_once() -> None:
    async def scenario(site: Site) -> None:
        site.scaler.takes_s = 3600.0
        site.scale(2)
        await asyncio.sleep(5)
        site.scale(3, number=2)
        site.scaler.takes_s = 0.0
        await asyncio.sleep(6)
        assert site.scaler.calls == [("scale", 2, 7), ("scale", 3, 7)]
        assert site.answers == [OrderFailed(1, "it did not answer within 10 s"), OrderTaken(2)]

    play(scenario)


def test_an_order_that_the_scaler_refuses_for_its_token_is_not_repeated() -> None:
    async def scenario(site: Site) -> None:
        site.scaler.errors = [Deposed("a later leader has 9")]
        site.scale(2)
        await asyncio.sleep(60)
        assert site.scaler.calls == [("scale", 2, 7)]
        assert site.answers == [OrderFailed(1, "a later leader has 9")]

    play(scenario)


def test_a_removal_is_sent_once_in_a_while_and_one_that_fails_does_not_hold_up_others() -> None:
    async def scenario(site: Site) -> None:
        site.scaler.errors = [Unavailable("away"), NotFound("gone")]
        for _ in range(25):
            site.remove("a")
            site.remove("b")
            await asyncio.sleep(1)
        names = [what for _, what, _ in site.scaler.calls]
        assert names[:3] == ["a", "b", "a"]
        assert len(names) == 1 + 2 * 3

    play(scenario)
