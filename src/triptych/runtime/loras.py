"""Loads and unloads the LoRA adapters of an engine while it serves."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from triptych.domain.lora import LoadedLora, LoadLora, LoraLimits
from triptych.errors import FailedPrecondition, InvalidRequest, StageClosed
from triptych.machine.lora_table import LoraTable
from triptych.ports import LoraAccess, Offload
from triptych.runtime.process import CannotStart
from triptych.runtime.tasks import TaskScope
from triptych.runtime.watched_value import WatchedValue

logger = logging.getLogger(__name__)


class Loras:
    """One adapter is loaded or freed at a time. Requests go on meanwhile."""

    def __init__(
        self,
        access: LoraAccess[Any] | None,
        model_id: str,
        limits: LoraLimits,
        *,
        root: Path | None,
        between: Callable[[Callable[[], None]], Awaitable[None]],
        is_used: Callable[[str], bool],
        reading: Offload,
        scope: TaskScope,
        load: WatchedValue[Any],
    ) -> None:
        """``root``: the directory whose parts may be loaded on order; None for none. ``between`` calls the engine between two steps or
        passes. ``is_used``: whether a request or item with the adapter of a digest runs. ``reading`` reads files. ``load`` is the report.
        """
        self._access = access
        self._model_id = model_id
        self._table = LoraTable(limits, model_id)
        self._between = between
        self._is_used = is_used
        self._root = root
        self._reading = reading
        self._scope = scope
        self._load = load
        self._changing = asyncio.Lock()

    @property
    def loaded(self) -> tuple[LoadedLora, ...]:
        """Those that take requests, by name."""
        return self._table.loaded

    def check(self, digest: str) -> None:
        """Raises StageClosed for a request or item with an adapter that takes none."""
        if digest and not self._table.takes(digest):
            raise StageClosed("the LoRA adapter is not loaded here any more")

    async def order(self, order: LoadLora) -> LoadedLora:
        """Load an adapter from below the root. Raises InvalidRequest, and FailedPrecondition where nothing can be loaded on order."""
        if order.parent not in ("", self._model_id):
            raise InvalidRequest(f"this instance serves {self._model_id!r}, not {order.parent!r}", param="parent")
        if self._root is None:
            raise FailedPrecondition("this instance loads no LoRA adapter on order: it has no lora_root")
        self._table.check_name(order.name)
        return await self.load(order.name, await self._reading.run(_below, self._root, order.directory))

    async def load(self, name: str, directory: Path) -> LoadedLora:
        """Raises InvalidRequest for an adapter that does not fit the model or the limits."""
        if self._access is None:
            raise InvalidRequest("this engine applies no LoRA adapters per request")
        async with self._changing:
            self._table.check_name(name)
            files = await self._reading.run(self._access.read, directory)
            lora = LoadedLora(name, files.digest, files.rank, files.nbytes, files.encodes)
            self._table.check(lora)
            await self._between(partial(self._access.add, files))
            self._table.add(lora)
        logger.info(
            "LoRA adapter %s is loaded: rank %d, %d bytes, digest %s", name, lora.rank, lora.nbytes, lora.digest
        )
        self._load.notify()
        return lora

    async def load_at_start(self, given: Sequence[str]) -> None:
        """Load those of the settings, each ``NAME=DIR``. Raises CannotStart."""
        for entry in given:
            name, _, directory = entry.partition("=")
            try:
                await self.load(name, Path(directory))
            except InvalidRequest as error:
                raise CannotStart(f"lora {name}: {error.message}") from None

    def unload(self, name: str) -> None:
        """Take no more requests for it; its memory is freed when none runs. Raises ModelNotFound."""
        lora = self._table.leave(name)
        logger.info("LoRA adapter %s is unloaded: it takes no more requests", name)
        self._load.notify()
        with suppress(RuntimeError):  # the process is ending
            self._scope.spawn(self._free_when_unused(lora), name=f"unload {name}")

    async def _free_when_unused(self, lora: LoadedLora) -> None:
        """Does nothing if it is loaded again meanwhile."""
        await self._load.wait_until(lambda _: not self._is_used(lora.digest))
        async with self._changing:
            if self._access is None or not self._table.is_leaving(lora.digest) or self._is_used(lora.digest):
                return
            await self._between(partial(self._access.remove, lora.digest))
            self._table.forget(lora.digest)
        logger.info("the memory of LoRA adapter %s is free", lora.name)


def _below(root: Path, directory: str) -> Path:
    """The directory, which must lie below ``root`` with all its files, links followed. Raises InvalidRequest."""
    try:
        base = root.resolve(strict=True)
        found = (base / directory).resolve(strict=True)
        files = [found, *(file.resolve() for file in found.iterdir())]
    except (OSError, ValueError, RuntimeError):
        files = []
    if not files or any(not file.is_relative_to(base) for file in files):
        raise InvalidRequest("the directory of the LoRA adapter does not lie below lora_root", param="directory")
    return found
