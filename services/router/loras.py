"""Loads and unloads LoRA adapters at all instances of a router."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from triptych.domain.lora import LoadedLora, LoadLora
from triptych.errors import InvalidRequest, ModelNotFound, TriptychError, Unavailable
from triptych.machine.router.instance import Instance
from triptych.machine.router.instances import ENCODE
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
        """At all instances that lack it: at none if one of them cannot, but for encoders where it does not change embeddings. Returns when
        requests for it are taken.

        Raises InvalidRequest where all have an adapter of this name, or one has other files under the directory, and what an instance
        raises.
        """
        async with self._ordering:
            model = self._cluster.machine.instances.model
            texts, encoders = self._usable()
            if model is None or not texts:
                raise Unavailable("no text instance is connected")
            if order.parent not in ("", model.model_id):
                raise ModelNotFound(f"model {order.parent!r} is not served here; {model.model_id!r} is", param="parent")
            found = {instance.name: _named(instance, order.name) for instance in (*texts, *encoders)}
            encodes = any(lora is not None and lora.encodes for lora in found.values())
            if all(found[instance.name] for instance in (*texts, *(encoders if encodes else ()))):
                raise InvalidRequest(f"a LoRA adapter {order.name!r} is loaded already: unload it first", param="name")
            lacking = [instance for instance in (*texts, *encoders) if found[instance.name] is None]
            results = await self._at(lacking, lambda client: client.load_lora(order))
            loras = [lora for lora in (*found.values(), *results.values()) if isinstance(lora, LoadedLora)]
            encodes = any(lora.encodes for lora in loras)
            needed = (*texts, *encoders) if encodes else texts
            errors = [results.get(instance.name) for instance in needed]
            error = next((result for result in errors if isinstance(result, TriptychError)), None)
            if error is None and len({lora.digest for lora in loras}) > 1:
                error = InvalidRequest(
                    f"the instances have different files of LoRA adapter {order.name!r}", param="directory"
                )
            if error is not None:
                done = [instance for instance in lacking if isinstance(results[instance.name], LoadedLora)]
                await self._at(done, lambda client: client.unload_lora(order.name))
                raise error
            lora = loras[0]
            await self._confirmed(
                lambda: all(instance.has_lora(lora.digest) for instance in self._needing(encodes=encodes))
            )
            return lora

    async def unload(self, name: str) -> None:
        """At all instances. Raises ModelNotFound if none has it, and what the first raises that cannot."""
        async with self._ordering:
            having = [instance for instance in self._needing(encodes=True) if _named(instance, name) is not None]
            if not having:
                raise ModelNotFound(f"no LoRA adapter {name!r} is loaded", param="name")
            results = await self._at(having, lambda client: client.unload_lora(name))
            await self._confirmed(
                lambda: all(_named(instance, name) is None for instance in self._needing(encodes=True))
            )
            for result in results.values():
                if isinstance(result, TriptychError) and not isinstance(result, ModelNotFound):
                    raise result

    def _needing(self, *, encodes: bool) -> tuple[Instance, ...]:
        """The usable instances that compute with an adapter. ``encodes``: whether it changes embeddings."""
        texts, encoders = self._usable()
        return (*texts, *encoders) if encodes else texts

    def _usable(self) -> tuple[tuple[Instance, ...], tuple[Instance, ...]]:
        """The usable instances that prefill or decode, and the other ones, which encode."""
        usable = [instance for instance in self._cluster.machine.instances.by_name.values() if instance.usable]
        texts = tuple(instance for instance in usable if instance.served.difference(ENCODE))
        return texts, tuple(instance for instance in usable if instance not in texts)

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
