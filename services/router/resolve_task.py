"""Runs one request that resolves media: has it encoded, and holds the embeddings for the caller."""

import asyncio

from triptych.domain.instance import ModelInfo
from triptych.domain.item_plan import ItemPlan
from triptych.domain.resolving import ResolvedItem, ResolveRequest
from triptych.errors import TriptychError
from triptych.machine.router.request import RequestMachine
from triptych.machine.router.request_events import Failed, Generate, Prepared, Resolved
from triptych.ports import Clock, Offload
from triptych.runtime import tracing

from .cluster import Cluster
from .held_share import HeldShare, Sizes
from .prepare import Prepare
from .request_task import RequestTask


class ResolveTask(RequestTask):
    """A request that resolves media: ``drive`` returns once nothing is held any more."""

    request: ResolveRequest

    def __init__(
        self,
        request: ResolveRequest,
        machine: RequestMachine,
        cluster: Cluster,
        clock: Clock,
        *,
        model: ModelInfo,
        media_bytes: int,
        prepare: Prepare,
        offload: Offload,
        share: HeldShare,
        encoded_lora: str = "",
    ) -> None:
        """``encoded_lora`` is the digest of the adapter that items are encoded with."""
        super().__init__(request, machine, cluster, clock, model=model, media_bytes=media_bytes)
        self._prepare_request = prepare
        self._offload = offload
        self._share = share
        self._encoded_lora = encoded_lora
        self._taken: Sizes = {}
        """Sizes that count against the share."""
        self.plans: tuple[ItemPlan, ...] = ()
        """The items; known once they are resolved."""
        self._items: tuple[ResolvedItem, ...] = ()
        self._error: TriptychError | None = None
        self._settled = asyncio.Event()

    async def resolved(self) -> tuple[ResolvedItem, ...]:
        """Where the items are, once all are encoded. Raises the error that ended the request."""
        await self._settled.wait()
        if self._error is not None:
            raise self._error
        return self._items

    async def ended(self) -> None:
        """Wait until the items are no longer held."""
        await self._over.wait()

    async def _prepare(self) -> None:
        try:
            with tracing.child("prepare"):
                plain = await self._offload.run(self._prepare_request.items, self.request, self.model)
            items = tuple(item.with_lora(self._encoded_lora) for item in plain)
            if self.machine.phase.has_ended:
                return
            sizes = {item.content: item.nbytes for item in items}
            self._share.take(sizes, "media")
            self._taken, self.plans = sizes, items
        except TriptychError as error:
            self.feed(Failed(error))
        else:
            self.feed(Prepared(items, prompt_tokens=0, answer_tokens=0))

    def _serve(self, effect: Generate | Resolved) -> None:
        assert isinstance(effect, Resolved)  # noqa: S101 - the machine of a resolve has no other
        self._items = effect.items
        self._settled.set()

    def _ended(self, error: TriptychError | None) -> None:
        self._share.give_back(self._taken)
        self._error = error
        self._settled.set()
