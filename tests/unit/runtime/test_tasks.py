import asyncio
import logging

import pytest

from triptych.runtime.tasks import TaskScope


async def test_tasks_end_with_their_scope() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with TaskScope("test") as scope:
        scope.spawn(work(), name="work")
        await asyncio.sleep(0)
    assert ended.is_set()
    assert len(scope) == 0


async def test_a_failure_is_logged_and_ends_no_other_task(caplog: pytest.LogCaptureFixture) -> None:
    go = asyncio.Event()
    done = asyncio.Event()

    async def fail() -> None:
        go.set()
        raise ValueError("broken")

    async def work() -> None:
        await go.wait()
        done.set()

    with caplog.at_level(logging.ERROR):
        async with TaskScope("test") as scope:
            scope.spawn(work(), name="work")
            scope.spawn(fail(), name="fail")
            await done.wait()
            await scope.drain(1.0)
    assert "task test/fail failed" in caplog.text
    assert "broken" in caplog.text


async def test_drain_waits_no_longer_than_its_timeout() -> None:
    async with TaskScope("test") as scope:
        scope.spawn(_for_ever(), name="stuck")
        await scope.drain(0.01)
        assert len(scope) == 1


async def test_a_full_or_closed_scope_refuses() -> None:
    async with TaskScope("test", limit=1) as scope:
        scope.spawn(_for_ever(), name="first")
        with pytest.raises(RuntimeError, match="full"):
            scope.spawn(_for_ever(), name="second")
    with pytest.raises(RuntimeError, match="closed"):
        scope.spawn(_for_ever(), name="late")


async def test_the_end_of_a_vital_task_is_reported() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    async def end() -> None:
        pass

    for work, reason in ((fail, " (ValueError: broken)"), (end, "")):
        async with TaskScope("test") as scope, asyncio.timeout(60):
            scope.spawn(_for_ever(), name="other", vital=True)
            scope.spawn(work(), name="heart", vital=True)
            assert await scope.failed() == f"test/heart{reason}"


async def test_a_vital_task_that_may_end_is_reported_only_if_it_fails() -> None:
    async def end() -> None:
        pass

    async def fail() -> None:
        raise ValueError("broken")

    async with TaskScope("test") as scope, asyncio.timeout(60):
        scope.spawn(end(), name="first", vital=True, may_end=True)
        await scope.drain(1)
        scope.spawn(fail(), name="second", vital=True, may_end=True)
        assert await scope.failed() == "test/second (ValueError: broken)"


async def test_what_is_no_task_can_fail_too() -> None:
    async with TaskScope("test") as scope:
        scope.fail("a socket")
        scope.fail("another")
        async with asyncio.timeout(60):
            assert await scope.failed() == "a socket"


async def test_closing_a_scope_does_not_report_its_vital_tasks_as_failed() -> None:
    scope = TaskScope("test")
    scope.spawn(_for_ever(), name="heart", vital=True)
    await scope.close()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await scope.failed()


async def _for_ever() -> None:
    await asyncio.Event().wait()
