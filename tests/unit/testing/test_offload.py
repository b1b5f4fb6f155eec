import asyncio

import pytest

from triptych.virtual import virtual_time
from triptych.virtual.offload import ConcurrentUse, InlineOffload, OneAtATime, spend


def work(cost_s: float) -> float:
    spend(cost_s)
    return asyncio.get_running_loop().time()


def test_work_takes_its_cost_in_virtual_time() -> None:
    async def main() -> tuple[float, float]:
        started_s = await InlineOffload().run(work, 1.5)
        return started_s, asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == (0, 1.5)


@pytest.mark.parametrize(("workers", "starts_s"), [(1, [0, 1, 2, 3]), (2, [0, 0, 1, 1])])
def test_workers_bound_the_concurrency(workers: int, starts_s: list[float]) -> None:
    async def main() -> list[float]:
        offload = InlineOffload(workers)
        return list(await asyncio.gather(*(offload.run(work, 1.0) for _ in range(4))))

    assert virtual_time.run(main()) == starts_s


def test_failing_work_takes_its_cost_in_virtual_time() -> None:
    def fail() -> None:
        spend(2)
        raise ValueError("on purpose")

    async def main() -> float:
        with pytest.raises(ValueError, match="on purpose"):
            await InlineOffload().run(fail)
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == 2


def test_cancelling_the_caller_does_not_free_its_worker() -> None:
    async def main() -> float:
        offload = InlineOffload()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(offload.run(work, 10.0), 1)
        return await offload.run(work, 1.0)

    assert virtual_time.run(main()) == 10


def test_overlapping_calls_of_guarded_objects_are_detected() -> None:
    guard = OneAtATime("engine")

    def guarded(cost_s: float) -> None:
        guard.enter()
        spend(cost_s)

    async def one_worker() -> None:
        offload = InlineOffload()
        await asyncio.gather(*(offload.run(guarded, 1.0) for _ in range(3)))

    async def two_workers() -> None:
        offload = InlineOffload(2)
        await asyncio.gather(*(offload.run(guarded, 1.0) for _ in range(3)))

    async def on_the_loop_while_it_runs() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(InlineOffload().run(guarded, 1.0))
            await asyncio.sleep(0.5)
            guarded(0)

    virtual_time.run(one_worker())
    guard = OneAtATime("engine")
    with pytest.raises(ConcurrentUse, match="engine"):
        virtual_time.run(two_workers())
    guard = OneAtATime("engine")
    with pytest.raises(ExceptionGroup):
        virtual_time.run(on_the_loop_while_it_runs())


def test_without_an_offload_no_time_is_spent() -> None:
    spend(5)
    OneAtATime("engine").enter()
