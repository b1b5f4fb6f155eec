"""Finding who holds what a ticket promises."""

import asyncio

import pytest

from services.text.holders import HolderDirectory
from tests.unit.services.panels import encoder_panel, under_virtual_time
from triptych.domain.instance import InstanceInfo
from triptych.errors import TransferFailed
from triptych.ports import Encoder
from triptych.runtime.tasks import TaskScope
from triptych.testing.links import Link, LinkedEncoder


class Counting(LinkedEncoder):
    """Counts how often it is asked who it is."""

    asked = 0

    async def describe(self) -> InstanceInfo:
        self.asked += 1
        return await super().describe()


def test_an_encoder_is_asked_once_however_many_look_for_it() -> None:
    async def scenario() -> None:
        async with encoder_panel() as panel, TaskScope("test") as scope:
            encoder = Counting(Link[Encoder]("encoder", panel.service))
            directory = HolderDirectory([encoder], scope=scope, describe_timeout_s=1.0)
            found = await asyncio.gather(*(directory.find("encoder", 1) for _ in range(20)))
            assert {holder.info.instance_id for holder in found} == {"encoder"}
            await directory.find("encoder", 1)
            assert encoder.asked == 1

    under_virtual_time(scenario)


def test_an_epoch_that_is_not_known_makes_the_encoders_say_again_who_they_are() -> None:
    async def scenario() -> None:
        async with (
            encoder_panel(instance_id="old") as old,
            encoder_panel(instance_id="new") as new,
            TaskScope("test") as scope,
        ):
            link = Link[Encoder]("encoder", old.service)
            directory = HolderDirectory([LinkedEncoder(link)], scope=scope, describe_timeout_s=1.0)
            await directory.find("old", 1)
            link.restart(new.service)
            assert (await directory.find("new", 1)).info.instance_id == "new"
            with pytest.raises(TransferFailed, match="'old'"):
                await directory.find("old", 1)

    under_virtual_time(scenario)


def test_an_instance_that_moved_to_another_place_is_found_there() -> None:
    async def scenario() -> None:
        async with (
            encoder_panel(instance_id="moving") as before,
            encoder_panel(instance_id="other") as other,
            encoder_panel(instance_id="moving", epoch=2) as after,
            TaskScope("test") as scope,
        ):
            first, second = Link[Encoder]("first", before.service), Link[Encoder]("second", other.service)
            directory = HolderDirectory(
                [LinkedEncoder(first), LinkedEncoder(second)], scope=scope, describe_timeout_s=1.0
            )
            await directory.find("moving", 1)
            first.kill()
            second.restart(after.service)
            assert (await directory.find("moving", 2)).info.epoch == 2

    under_virtual_time(scenario)


@pytest.mark.parametrize("encoders", [0, 1])
def test_nobody_is_found_among_encoders_that_are_not_there(encoders: int) -> None:
    async def scenario() -> None:
        async with encoder_panel() as panel, TaskScope("test") as scope:
            link = Link[Encoder]("encoder", panel.service)
            link.kill()
            directory = HolderDirectory([LinkedEncoder(link)] * encoders, scope=scope, describe_timeout_s=1.0)
            with pytest.raises(TransferFailed, match="not reachable"):
                await directory.find("encoder", 1)

    under_virtual_time(scenario)
