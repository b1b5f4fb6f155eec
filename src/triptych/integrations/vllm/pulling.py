"""The connector of a vLLM that runs by itself: it asks routers for items by their keys, and pulls them from encoders (ADR 29).


    vLLM's scheduler  -->  PulledItems (the engine's thread)  -->  Puller (a thread with an event loop)  -->  router, encoders

Nothing is awaited within a step: a request is held back until its items are there.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from triptych.domain.embedding import KEY_NBYTES, DType, Ticket
from triptych.domain.engine import EmbeddingInput
from triptych.domain.generation import Placement
from triptych.domain.instance import ModelInfo
from triptych.domain.resolving import ResolveRequest
from triptych.engine.arenas import open_arena
from triptych.engine.checkpoint import Checkpoint, open_checkpoint
from triptych.engine.tensors import domain_dtype, embedding_tensors
from triptych.errors import (
    FailedPrecondition,
    InstanceLost,
    InvalidRequest,
    TransferFailed,
    TriptychError,
    Unavailable,
)
from triptych.integrations.vllm.connector import ItemConnector
from triptych.integrations.vllm.families import check_pulled
from triptych.integrations.vllm.features import ItemForm
from triptych.integrations.vllm.items import HeldItems, Item, ItemsLost
from triptych.integrations.vllm.options import PullOptions, parse
from triptych.policy.queueing import by_deadline
from triptych.ports import Offload
from triptych.rpc.data_plane import ProcessDataPlane
from triptych.rpc.routers import Routers
from triptych.rpc.stubs import RouterStub
from triptych.runtime.clock import monotonic
from triptych.runtime.host import instance_name, new_epoch
from triptych.runtime.hub import model_directory
from triptych.runtime.tls import TlsIdentity
from triptych.runtime.world import real_world
from triptych.transport.receiver import TensorReceiver, open_receiver

logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")
_THREADS = 2
"""Threads that verify and copy embeddings."""
_SWEEP_S = 1.0
_ASK_S = 10.0
"""Interval at which routers are asked for their models, seconds."""
_GRACE_S = 2.0
"""Time after its limit at which a fetch that has not ended is given up, seconds."""
_CLOSE_S = 5.0
"""Longest time that the puller may take to end, seconds."""


class PullingConnector(ItemConnector):
    """Connector for ``ec_connector`` and, with this module, ``ec_connector_module_path`` of ``vllm serve``."""

    items: "PulledItems"

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        """Raises ValueError, BadModel or CannotStart for what cannot work."""
        super().__init__(vllm_config, role)
        if role is not ECConnectorRole.SCHEDULER:
            return
        options = parse(vllm_config.ec_transfer_config.ec_connector_extra_config)
        model, dtype = vllm_config.model_config, domain_dtype(vllm_config.model_config.dtype)
        checkpoint = open_checkpoint(model_directory(Path(model.model)))
        check_pulled(checkpoint.family)
        form = ItemForm.of_model(checkpoint.family.hidden_size, dtype, model.hf_config)
        self.items = PulledItems(options, ServedModel(checkpoint, dtype), form)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of this vLLM."""

    checkpoint: Checkpoint
    dtype: DType

    def check(self, model: ModelInfo) -> None:
        """Raise FailedPrecondition unless routers serve the same model as ``model``. Reads its files in full."""
        own_model = self.checkpoint.model_info(model_id=model.model_id, dtype=self.dtype)
        differing = [
            field.name for field in fields(own_model) if getattr(own_model, field.name) != getattr(model, field.name)
        ]
        if differing:
            raise FailedPrecondition(
                f"the routers' model {model.model_id!r} is not this one: it has another {' and '.join(differing)}"
            )


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch of what one request lacks. A request may have several fetches, one after the other."""

    name: str
    rows: Mapping[str, int]
    """Rows by identifier."""
    end_s: float


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The end of a fetch: its items, or why there are none."""

    fetch: str
    items: tuple[Item, ...] = ()
    error: str = ""


@dataclass(slots=True)
class _Waiting:
    """A request of vLLM's that waits for items."""

    end_s: float
    fetch: str = ""
    """The running one."""
    error: str = ""


class PulledItems:
    """An ``ItemSource`` that has a ``Puller`` fetch the items that it does not hold. Owned by the engine's thread.

    Copies of items are held while a request needs them. Those of one fetch count against the limit of bytes until all of
    them are gone; further fetches wait meanwhile. What no request needs any more is kept by the puller until room is needed.
    """

    def __init__(self, options: PullOptions, model: ServedModel, form: ItemForm) -> None:
        """Raises ValueError or CannotStart for options that cannot work here."""
        self._timeout_s = options.timeout_s
        self._held = HeldItems()
        self._waiting: dict[str, _Waiting] = {}
        self._owners: dict[str, str] = {}
        """Requests of the running fetches."""
        self._fetched_by: dict[str, str] = {}
        """Fetches of the identifiers that are held."""
        self._copies: dict[str, set[str]] = {}
        """Identifiers of each fetch that are copies."""
        self._numbers = count()
        self._arrivals: deque[FetchResult] = deque()
        self._arrived = threading.Event()
        self._puller = Puller(options, model, form, self._take)
        self._puller.start()

    def _take(self, arrival: FetchResult) -> None:
        """Called by the puller's thread."""
        self._arrivals.append(arrival)
        self._arrived.set()

    # --- ItemSource --------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        return bool(self._owners)

    def get(self, request_id: str, needed: Mapping[str, int]) -> Mapping[str, torch.Tensor] | None:
        self._collect()
        waiting = self._waiting.get(request_id)
        if waiting is not None and (error := self._fault(waiting)):
            raise ItemsLost(error)
        items = {identifier: item for identifier in needed if (item := self._held.find(identifier)) is not None}
        for identifier, item in items.items():
            if len(item.embedding) != needed[identifier]:
                raise ItemsLost(f"item {identifier} has {len(item.embedding)} rows, not {needed[identifier]}")
        if len(items) == len(needed):
            self._held.hold(request_id, items.values())
            return {identifier: item.embedding for identifier, item in items.items()}
        if waiting is None:
            waiting = self._waiting[request_id] = _Waiting(monotonic() + self._timeout_s)
        if not waiting.fetch:
            waiting.fetch = f"{request_id}/{next(self._numbers)}"
            self._owners[waiting.fetch] = request_id
            rows = {identifier: needed[identifier] for identifier in needed if identifier not in items}
            self._puller.fetch(Fetch(waiting.fetch, rows, waiting.end_s))
        return None

    def settle(self, timeout_s: float) -> None:
        self._arrived.wait(timeout_s)

    def drop(self, request_id: str) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None and self._owners.pop(waiting.fetch, None) is not None:
            self._puller.cancel(waiting.fetch)
        for identifier in self._held.drop(request_id):
            fetch = self._fetched_by.pop(identifier)
            self._copies[fetch].discard(identifier)
            self._settle_copies(fetch)

    def close(self) -> None:
        self._puller.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return self._held.nbytes

    # --- private -----------------------------------------------------------------------------------------------------

    def _fault(self, waiting: _Waiting) -> str:
        if waiting.fetch and monotonic() > waiting.end_s + _GRACE_S:
            return f"its items were not there within {self._timeout_s:g} s"
        return waiting.error

    def _collect(self) -> None:
        """Take what has arrived."""
        self._arrived.clear()
        while self._arrivals:
            arrival = self._arrivals.popleft()
            owner = self._owners.pop(arrival.fetch, None)
            copies = self._copies[arrival.fetch] = set[str]()
            if owner is not None:
                waiting = self._waiting[owner]
                waiting.fetch, waiting.error = "", arrival.error
                for item in arrival.items:
                    if item.identifier not in self._held:
                        copies.add(item.identifier)
                        self._fetched_by[item.identifier] = arrival.fetch
                self._held.hold(owner, arrival.items)
            self._settle_copies(arrival.fetch)

    def _settle_copies(self, fetch: str) -> None:
        if not self._copies[fetch]:
            del self._copies[fetch]
            self._puller.copies_gone(fetch)


class Puller:
    """Fetches items, in a thread of its own with an event loop. Its public methods may be called by any thread.

    Pulled tensors stay in its arena, and are not pulled again, until room is needed.
    """

    def __init__(
        self, options: PullOptions, model: ServedModel, form: ItemForm, arrived: Callable[[FetchResult], None]
    ) -> None:
        """``arrived`` is called by the puller's thread, once for each fetch that was not cancelled."""
        self._options = options
        self._model = model
        self._form = form
        self._arrived = arrived
        self._thread = threading.Thread(target=self._run, name="triptych-pulls", daemon=True)
        self._opened: Future[asyncio.AbstractEventLoop] = Future()
        self._stop = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._arrivals = count()
        self._checked: dict[ModelInfo, TriptychError | None] = {}
        """Reason, by model that routers have named, why it is not the one of this vLLM."""
        self._checking = asyncio.Lock()
        self._group: asyncio.TaskGroup
        self._routers: Routers
        self._receiver: TensorReceiver
        self._offload: Offload

    def start(self) -> None:
        """Return once it works. Raises ValueError or CannotStart for options that cannot work here."""
        self._thread.start()
        self._opened.result()

    def fetch(self, fetch: Fetch) -> None:
        self._call(self._start_fetch, fetch)

    def cancel(self, name: str) -> None:
        """Cancel a fetch. One that has ended still arrives."""
        self._call(self._cancel, name)

    def copies_gone(self, name: str) -> None:
        """The items of this fetch are not held any more."""
        self._call(lambda: self._receiver.copies_gone(name))

    def close(self) -> None:
        """Cancel all fetches, release what they hold, and end."""
        self._call(self._stop.set)
        self._thread.join(_CLOSE_S)

    def _call(self, call: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # it has ended
            self._opened.result().call_soon_threadsafe(call, *args)

    # --- in its thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            if self._opened.done():
                logger.exception("no item can be pulled any more")
            else:
                self._opened.set_exception(error)

    async def _main(self) -> None:
        async with self._open(), asyncio.TaskGroup() as self._group:
            self._opened.set_result(asyncio.get_running_loop())
            await self._stop.wait()
            for task in self._running.values():
                task.cancel()

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        options, epoch = self._options, new_epoch()
        tls = None if options.tls.files is None else TlsIdentity.load(*options.tls.files, name=options.tls.tls_name)
        async with AsyncExitStack() as stack:
            name = instance_name("vllm", 0, epoch)
            world = await stack.enter_async_context(real_world("pulls", name, epoch))
            self._offload = world.threads(_THREADS, name="triptych-check")
            arena = open_arena("host", options.image_cache_bytes, instance_id=name, epoch=epoch, device="")
            self._routers = Routers(lambda address: RouterStub(address, tls))
            stack.push_async_callback(self._routers.close)
            self._routers.use(options.addresses)
            beyond_loopback = options.allow_network or tls is not None
            data_plane = ProcessDataPlane(options.transfers, options.host, tls, beyond_loopback)
            self._receiver = await stack.enter_async_context(
                open_receiver(options, world, data_plane, arena, offload=self._offload)
            )
            world.scope.spawn(self._routers.keep_asking(_ASK_S), name="models")
            world.scope.spawn(self._sweep(), name="sweep")
            yield

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            await self._receiver.tick()

    def _start_fetch(self, fetch: Fetch) -> None:
        task = self._running[fetch.name] = self._group.create_task(self._fetch(fetch), name=f"fetch {fetch.name}")
        task.add_done_callback(lambda _: self._running.pop(fetch.name, None))

    def _cancel(self, name: str) -> None:
        if (task := self._running.get(name)) is not None:
            task.cancel()

    async def _fetch(self, fetch: Fetch) -> None:
        items: tuple[Item, ...] = ()
        error = ""
        try:
            async with asyncio.timeout(fetch.end_s - monotonic()):
                items = await self._items(fetch)
        except TimeoutError:
            error = f"its items were not there within {self._options.timeout_s:g} s"
        except TriptychError as raised:
            error = raised.message
        except Exception:
            logger.exception("fetch %s", fetch.name)
            error = "its items could not be fetched"
        finally:
            if not items:
                self._receiver.copies_gone(fetch.name)
        self._arrived(FetchResult(fetch.name, items, error))

    async def _items(self, fetch: Fetch) -> tuple[Item, ...]:
        keys = {identifier: _key(identifier) for identifier in fetch.rows}
        model = await self._checked_model()
        try:
            return await self._pulled(fetch, keys, model, use_present=True)
        except TransferFailed as error:
            # What was present may have been evicted, and leases may have ended, while the fetch waited for room.
            logger.info("fetch %s starts over: %s", fetch.name, error)
            return await self._pulled(fetch, keys, model, use_present=False)

    async def _pulled(
        self, fetch: Fetch, keys: Mapping[str, bytes], model: str, *, use_present: bool
    ) -> tuple[Item, ...]:
        """The items, pulled unless they are present. Their leases are held by the router's call."""
        tickets: dict[bytes, Ticket] = {}
        if use_present:
            present = {key: self._receiver.cache.ready(key) for key in keys.values()}
            tickets = {key: ticket for key, ticket in present.items() if ticket is not None}
        async with AsyncExitStack() as stack:
            if missing := tuple(key for key in keys.values() if key not in tickets):
                request = ResolveRequest(
                    f"vllm-{uuid4().hex}", model, keys=missing, timeout_s=max(0.0, fetch.end_s - monotonic())
                )
                answer = await stack.enter_async_context(aclosing(self._routers.resolve(request)))
                try:
                    resolved = await anext(answer)
                except StopAsyncIteration:
                    raise InstanceLost("the router ended a call without an answer") from None
                tickets.update(zip(missing, (item.ticket for item in resolved), strict=True))
            wanted = [tickets[keys[identifier]] for identifier in fetch.rows]
            for ticket, (identifier, rows) in zip(wanted, fetch.rows.items(), strict=True):
                self._check(identifier, keys[identifier], rows, ticket)
            now_s = monotonic()
            place = by_deadline(priority=0, deadline_s=fetch.end_s, arrived_s=now_s, arrival=next(self._arrivals))
            try:
                placements = [Placement(number, 0, ticket) for number, ticket in enumerate(wanted)]
                arrived = await self._receiver.acquire(fetch.name, placements, place)
                return await self._offload.run(self._copies, tuple(fetch.rows), arrived.inputs)
            finally:
                self._receiver.leave(fetch.name)

    def _check(self, identifier: str, key: bytes, rows: int, ticket: Ticket) -> None:
        """Check a request before anything is pulled. Raises InvalidRequest."""
        if ticket.key != key:
            raise InvalidRequest(f"the router returned a ticket of another embedding for item {identifier}")
        if ticket.tokens != rows:
            raise InvalidRequest(
                f"item {identifier} has {ticket.tokens} rows, the prompt has {rows} placeholders for it"
            )
        if not self._form.accepts(rows, ticket.tensors):
            raise InvalidRequest(f"item {identifier} is not of the form that the model takes")

    def _copies(self, identifiers: Sequence[str], inputs: Sequence[EmbeddingInput]) -> tuple[Item, ...]:
        """Blocks. Raises EngineFailure for values that are not finite."""
        return tuple(
            Item(identifier, self._form.embedding(embedding_tensors(given, self._form.accepts, _HOST)))
            for identifier, given in zip(identifiers, inputs, strict=True)
        )

    async def _checked_model(self) -> str:
        """The model's name at the routers. Raises FailedPrecondition if it is another one than here."""
        await self._routers.asked()
        try:
            named = {model.model_id: model for model in await self._routers.models()}
        except Unavailable:  # of the only one
            named = {}
        if not named:
            raise Unavailable("no router answers")
        name = self._options.model or min(named)
        if name not in named or (not self._options.model and len(named) > 1):
            raise FailedPrecondition(f"the routers serve {', '.join(sorted(named))}: set model to one of them")
        model = named[name]
        async with self._checking:
            if model not in self._checked:
                self._checked[model] = await self._offload.run(self._difference, model)
        if (error := self._checked[model]) is not None:
            raise error
        return name

    def _difference(self, model: ModelInfo) -> TriptychError | None:
        try:
            self._model.check(model)
        except TriptychError as error:
            return error
        return None


def _key(identifier: str) -> bytes:
    """Raises InvalidRequest for an identifier that is no key."""
    with suppress(ValueError):
        key = bytes.fromhex(identifier)
        if len(key) == KEY_NBYTES and key.hex() == identifier:  # there are several spellings of one key
            return key
    shown = identifier[:80]
    raise InvalidRequest(f"{shown!r} is no key of an embedding: items need the uuid that a router's Resolve gives")
