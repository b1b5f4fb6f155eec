"""Loads and unloads LoRA adapters at all text instances of a router."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from triptych.domain.lora import LoadedLora, LoadLora
from triptych.domain.stage import Stage
from triptych.errors import InvalidRequest, ModelNotFound, TriptychError, Unavailable
from triptych.machine.router.instance import Instance
from triptych.ports import InstanceClient

from .cluster import Cluster

logger = logging.getLogger(__name__)

T = TypeVar("T")

_REPORTED_S = 5.0
"""How long an order waits for the load reports that confirm it, seconds."""


class Loras:
    """Carries out one order after the other."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._ordering = asyncio.Lock()

    async def load(self, order: LoadLora) -> LoadedLora:
        """At all text instances that lack it: at none if one of them cannot. Returns when requests for it are taken.

        Raises InvalidRequest where all have an adapter of this name, or one has other files under the directory, and what an instance
        raises.
        """
        async with self._ordering:
            model = self._cluster.machine.instances.model
            texts = self._texts()
            if model is None or not texts:
                raise Unavailable("no text instance is connected")
            if order.parent not in ("", model.model_id):
                raise ModelNotFound(f"model {order.parent!r} is not served here; {model.model_id!r} is", param="parent")
            lacking = [instance for instance in texts if _named(instance, order.name) is None]
            if not lacking:
                raise InvalidRequest(f"a LoRA adapter {order.name!r} is loaded already: unload it first", param="name")
            results = await self._at(lacking, lambda client: client.load_lora(order))
            found = [_named(instance, order.name) for instance in texts]
            loras = {lora for lora in (*results.values(), *found) if isinstance(lora, LoadedLora)}
            error = next((result for result in results.values() if isinstance(result, TriptychError)), None)
            if error is None and len(loras) > 1:
                error = InvalidRequest(
                    f"the text instances have different files of LoRA adapter {order.name!r}", param="directory"
                )
            if error is not None:
                done = [instance for instance in lacking if isinstance(results[instance.name], LoadedLora)]
                await self._at(done, lambda client: client.unload_lora(order.name))
                raise error
            (lora,) = loras
            await self._confirmed(lambda: all(_named(instance, order.name) == lora for instance in self._texts()))
            return lora

    async def unload(self, name: str) -> None:
        """At all text instances. Raises ModelNotFound if none has it, and what the first raises that cannot."""
        async with self._ordering:
            having = [instance for instance in self._texts() if _named(instance, name) is not None]
            if not having:
                raise ModelNotFound(f"no LoRA adapter {name!r} is loaded", param="name")
            results = await self._at(having, lambda client: client.unload_lora(name))
            await self._confirmed(lambda: name not in self._cluster.machine.instances.loras)
            for result in results.values():
                if isinstance(result, TriptychError) and not isinstance(result, ModelNotFound):
                    raise result

    def _texts(self) -> list[Instance]:
        """The usable instances that prefill or decode."""
        instances = self._cluster.machine.instances.by_name.values()
        text = (Stage.PREFILL, Stage.DECODE)
        return [
            instance for instance in instances if instance.usable and any(instance.serves((stage,)) for stage in text)
        ]

    async def _at(
        self, instances: Sequence[Instance], call: Callable[[InstanceClient], Awaitable[T]]
    ) -> dict[str, T | TriptychError]:
        """The results of a call at these instances, or its errors, by name."""

        async def one(name: str) -> T | TriptychError:
            try:
                with self._cluster.call(name) as client:
                    return await call(client)
            except TriptychError as error:
                logger.warning("%s: %s", name, error.message)
                return error

        names = [instance.name for instance in instances]
        return dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))

    async def _confirmed(self, condition: Callable[[], bool]) -> None:
        """Wait until load reports say so; one that is late is not waited for."""
        if not await self._cluster.wait_until(condition, _REPORTED_S):
            logger.warning("load reports do not confirm an order on LoRA adapters")


def _named(instance: Instance, name: str) -> LoadedLora | None:
    return next((lora for lora in instance.loras if lora.name == name), None)
