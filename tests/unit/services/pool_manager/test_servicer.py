"""What the pool manager's service is told of a request."""

from typing import Any

import pytest

from services.pool_manager.servicer import PoolManagerServicer
from triptych.v1.pool_manager_pb2 import DrainRequest


class Manager:
    def __init__(self) -> None:
        self.drained: list[tuple[str, bool]] = []

    async def drain_instance(self, instance_id: str, *, force: bool) -> None:
        self.drained.append((instance_id, force))


@pytest.mark.parametrize(
    ("request_", "force"),
    [
        (DrainRequest(instance_id="e1", force=False), False),
        (DrainRequest(instance_id="e1", force=True), True),
        (DrainRequest(instance_id="e1"), True),
    ],
)
async def test_a_drain_without_the_field_force_is_of_a_caller_that_has_checked(
    request_: DrainRequest, *, force: bool
) -> None:
    """The command of the release before does, and also drains the last instance if it is told to."""
    manager: Any = Manager()
    context: Any = None
    await PoolManagerServicer(manager).Drain(request_, context)
    assert manager.drained == [("e1", force)]
