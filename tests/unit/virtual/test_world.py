import asyncio

from triptych.runtime.tasks import TaskScope
from triptych.virtual.virtual_time import run
from triptych.virtual.world import virtual_world


def test_the_tasks_of_a_world_are_in_the_scope_that_was_given_for_them() -> None:
    async def scenario() -> None:
        async with TaskScope("of the test") as scope:
            world = virtual_world("router", scope=scope)
            world.scope.spawn(asyncio.sleep(1), name="sleep")
            assert world.scope is scope
            assert len(scope) == 1

    run(scenario())
