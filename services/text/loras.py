"""Loads and unloads the LoRA adapters of a text instance while it serves."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from triptych.domain.lora import LoadedLora, LoadLora, LoraLimits
from triptych.errors import FailedPrecondition, InvalidRequest, StageClosed
from triptych.machine.text.lora_table import LoraTable
from triptych.ports import LoraAccess, Offload, TextEngine

from .engine_loop import EngineLoop
from .jobs import Jobs

logger = logging.getLogger(__name__)


class Loras:
    """One adapter is loaded or freed at a time. Requests go on meanwhile."""

    def __init__(
        self,
        engine: TextEngine,
        loop: EngineLoop,
        jobs: Jobs,
        limits: LoraLimits,
        *,
        root: Path | None,
        reading: Offload,
        notify: Callable[[], None],
    ) -> None:
        """``root``: the directory whose parts may be loaded on order; None for none. ``reading`` reads files. ``notify`` reports the load."""
        self._access: LoraAccess[Any] | None = engine.loras
        self._model_id = engine.model.model_id
        self._table = LoraTable(limits, self._model_id)
        self._loop = loop
        self._jobs = jobs
        self._root = root
        self._reading = reading
        self._notify = notify
        self._changing = asyncio.Lock()

    @property
    def loaded(self) -> tuple[LoadedLora, ...]:
        """Those that take requests, by name."""
        return self._table.loaded

    def check(self, digest: str) -> None:
        """Raises StageClosed for a request with an adapter that takes none."""
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
            lora = LoadedLora(name, files.digest, files.rank, files.nbytes)
            self._table.check(lora)
            await self._loop.between(partial(self._access.add, files))
            self._table.add(lora)
        logger.info(
            "LoRA adapter %s is loaded: rank %d, %d bytes, digest %s", name, lora.rank, lora.nbytes, lora.digest
        )
        self._notify()
        return lora

    def unload(self, name: str) -> LoadedLora:
        """Take no more requests for it. ``free`` follows. Raises ModelNotFound."""
        lora = self._table.leave(name)
        logger.info("LoRA adapter %s is unloaded: it takes no more requests", name)
        self._notify()
        return lora

    def is_used(self, digest: str) -> bool:
        """Whether a request with this adapter runs."""
        return any(job.request.lora == digest for job in self._jobs)

    async def free(self, lora: LoadedLora) -> None:
        """Free the memory of an adapter that was unloaded and is not used; does nothing if it is loaded again."""
        async with self._changing:
            if self._access is None or not self._table.is_leaving(lora.digest) or self.is_used(lora.digest):
                return
            await self._loop.between(partial(self._access.remove, lora.digest))
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
