import asyncio
import random
from collections.abc import AsyncGenerator
from time import perf_counter

import pytest

from triptych.virtual import virtual_time
from triptych.virtual.virtual_time import Deadlock, Livelock, OutOfTime, UnhandledInLoop, VirtualTimeLoop


def now_s() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("debug", [False, True])
def test_an_hour_of_sleep_takes_no_time(debug: bool) -> None:
    async def main() -> float:
        asyncio.get_running_loop().set_debug(debug)
        await asyncio.sleep(3599)
        return now_s()

    before = perf_counter()
    assert virtual_time.run(main()) == 3599
    assert perf_counter() - before < 50


def test_timers_fire_in_order_of_their_time() -> None:
    async def main() -> list[tuple[float, int]]:
        seen: list[tuple[float, int]] = []

        async def wait(delay_s: int) -> None:
            await asyncio.sleep(delay_s)
            seen.append((now_s(), delay_s))

        async with asyncio.TaskGroup() as group:
            for delay_s in (3, 1, 2):
                group.create_task(wait(delay_s))
        return seen

    assert virtual_time.run(main()) == [(1, 1), (2, 2), (3, 3)]


def test_timers_of_one_time_fire_in_the_order_in_which_they_were_set() -> None:
    async def main() -> list[int]:
        seen: list[int] = []
        loop = asyncio.get_running_loop()
        for number in range(50):
            loop.call_at(1.0 if number % 3 else 0.5, seen.append, number)
        await asyncio.sleep(2)
        return seen

    assert virtual_time.run(main()) == sorted(range(50), key=lambda number: (number % 3 > 0, number))


def test_timeouts_and_wait_for_expire_on_time() -> None:
    async def main() -> tuple[float, float]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        first = now_s()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 2.5)
        return first, now_s()

    assert virtual_time.run(main()) == (5, 7.5)


def test_async_generators_are_closed_with_the_loop() -> None:
    closed: list[float] = []

    async def numbers() -> AsyncGenerator[int]:
        try:
            while True:
                await asyncio.sleep(1)
                yield 1
        finally:
            await asyncio.sleep(1)
            closed.append(now_s())

    kept = []

    async def main() -> None:
        generator = numbers()
        kept.append(generator)
        await anext(generator)

    virtual_time.run(main())
    assert closed == [2]


def test_a_failed_task_group_cancels_its_other_tasks() -> None:
    async def fail() -> None:
        await asyncio.sleep(1)
        raise ValueError("on purpose")

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(asyncio.sleep(1000))

    async def main() -> float:
        with pytest.raises(ExceptionGroup):
            await both()
        return now_s()

    assert virtual_time.run(main()) == 1


def test_a_deadlock_is_an_error_that_names_the_waiting_task() -> None:
    async def waits_for_nobody() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="waits_for_nobody"):
        virtual_time.run(waits_for_nobody())


def test_busy_polling_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "SPINS_PER_INSTANT", 1000)

    async def polls() -> None:
        while True:  # noqa: ASYNC110  # what must be found out
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match="time stands still"):
        virtual_time.run(polls())


def test_a_repeating_timer_does_not_hide_a_deadlock() -> None:
    async def sweep() -> None:
        while True:  # noqa: ASYNC110  # a sweeper's way
            await asyncio.sleep(1)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(sweep())

    with pytest.raises(OutOfTime, match="100 s"):
        virtual_time.run(main(), limit_s=100)


def test_an_unretrieved_exception_is_an_error() -> None:
    def fail() -> None:
        raise ValueError("on purpose")

    async def main() -> None:
        asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(1)

    with pytest.raises(UnhandledInLoop, match="on purpose"):
        virtual_time.run(main())


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(lambda: None)

    with pytest.raises(NotImplementedError, match="InlineOffload"):
        virtual_time.run(main())


def race(seed: int | None) -> list[int]:
    async def main() -> list[int]:
        seen: list[int] = []

        async def wait(number: int) -> None:
            await asyncio.sleep(1)
            seen.append(number)

        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(wait(number))
        return seen

    return virtual_time.run(main(), seed=seed)


def test_seeds_decide_races() -> None:
    assert race(None) == race(None)
    assert race(1) == race(1)
    assert len({tuple(race(seed)) for seed in range(5)}) > 1


def test_sets_of_tasks_have_a_reproducible_order() -> None:
    async def main() -> list[str]:
        async def wait() -> None:
            await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            tasks = {group.create_task(wait(), name=f"t{number}") for number in range(100)}
        futures = {asyncio.get_running_loop().create_future() for _ in range(10)}
        return [task.get_name() for task in tasks] + [str(hash(future)) for future in futures]

    ballast = [object() for _ in range(random.Random(0).randrange(1000))]
    first = virtual_time.run(main())
    del ballast
    assert virtual_time.run(main()) == first


def test_the_clock_starts_at_zero_and_only_timers_advance_it() -> None:
    async def main() -> float:
        for _ in range(100):
            await asyncio.sleep(0)
        return now_s()

    assert virtual_time.run(main()) == 0
    loop = VirtualTimeLoop()
    assert loop.time() == 0
    loop.close()
