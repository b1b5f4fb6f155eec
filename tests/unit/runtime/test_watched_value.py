import asyncio
from contextlib import aclosing

from triptych.runtime.watched_value import ReportIntervals, WatchedValue
from triptych.virtual.virtual_time import run


def test_a_watcher_gets_the_value_at_once_then_changes_at_a_bounded_rate_and_heartbeats() -> None:
    async def scenario() -> list[tuple[float, int]]:
        value = 0
        watched = WatchedValue(lambda: value, ReportIntervals(0.1, 1.0))
        seen: list[tuple[float, int]] = []

        async def watch() -> None:
            async with aclosing(watched.watch()) as values:
                async for value in values:
                    seen.append((round(asyncio.get_running_loop().time(), 3), value))
                    if len(seen) == 4:
                        return

        async with asyncio.TaskGroup() as group:
            group.create_task(watch())
            for _ in range(5):
                await asyncio.sleep(0.01)
                value += 1
                watched.notify()
            await asyncio.sleep(0.25)
            value += 1
            watched.notify()
        return seen

    assert run(scenario()) == [(0.0, 0), (0.1, 5), (0.3, 6), (1.4, 6)]


def test_watchers_hear_of_a_change_in_the_order_in_which_they_began() -> None:
    async def scenario() -> list[int]:
        watched = WatchedValue(lambda: 0, ReportIntervals(0.01, 60.0))
        told: list[int] = []

        async def watch(number: int) -> None:
            async with aclosing(watched.watch()) as values:
                async for _ in values:
                    told.append(number)  # noqa: PERF401  # it never ends

        async with asyncio.TaskGroup() as group:
            watching = [group.create_task(watch(number)) for number in range(50)]
            await asyncio.sleep(1.0)
            told.clear()
            watched.notify()
            await asyncio.sleep(1.0)
            for watcher in watching:
                watcher.cancel()
        return told

    assert run(scenario()) == list(range(50))


def test_many_watchers_share_a_rate_of_changes() -> None:
    async def scenario(watchers: int) -> int:
        watched = WatchedValue(lambda: 0, ReportIntervals(0.01, 60.0), most_per_s=100.0)
        sent = 0

        async def watch() -> None:
            nonlocal sent
            async with aclosing(watched.watch()) as values:
                async for _ in values:
                    sent += 1

        async with asyncio.TaskGroup() as group:
            watching = [group.create_task(watch()) for _ in range(watchers)]
            await asyncio.sleep(0.001)
            assert sent == watchers, "the first value comes at once"
            sent = 0
            for _ in range(1000):
                await asyncio.sleep(0.01)
                watched.notify()
            for watcher in watching:
                watcher.cancel()
        return sent

    assert 900 <= run(scenario(50)) <= 1000
    assert 300 <= run(scenario(1)) <= 1000


def test_waiting_ends_when_the_condition_holds() -> None:
    async def scenario() -> float:
        value = 3
        watched = WatchedValue(lambda: value, ReportIntervals(0.001, 60.0))
        async with asyncio.TaskGroup() as group:
            group.create_task(watched.wait_until(lambda watcher: watcher == 0))
            while value:
                await asyncio.sleep(1.0)
                value -= 1
                watched.notify()
        return asyncio.get_running_loop().time()

    assert run(scenario()) == 3.0
