"""Every interface between parts of the system, as a Protocol in domain types.


    client -> Router -> Encoder (one per item, in parallel)  -> Ticket
                     -> Text    (once every item has one)    -> tokens
              Text   -> Encoder's arena through a Transport: a one-sided read, then Encoder.release

A service object and its gRPC stub satisfy the same Protocol, so a caller need not know whether a service is local or
remote; `tests/simulation` runs a whole cluster in one process that way. Methods raise only errors of
``triptych.errors``.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from triptych.domain.chat import ChatRequest, Tokenized
from triptych.domain.embedding import LeaseId, Tensor, TensorSpec, Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.domain.engine import TokenGrammar as TokenGrammar  # noqa: PLC0414 - this page has every seam
from triptych.domain.generation import ChatEvent, TextEvent, TextRequest
from triptych.domain.instance import InstanceInfo, InstanceLimits, InstanceLoad, ModelInfo, TransportOffer
from triptych.domain.kv_segment import KvCopies, KvSegment, SegmentKind
from triptych.domain.lora import LoadedLora, LoadLora
from triptych.domain.media import MediaInfo, Shard
from triptych.domain.membership import MembershipSnapshot
from triptych.domain.pool import ManagerStatus, ManualSize, MemberReport, MembershipDelta, Order, Watch
from triptych.domain.queue_position import QueuePosition
from triptych.domain.region import Region
from triptych.domain.replanning import PlanQuestion, Proposal
from triptych.domain.resolving import ResolvedItem, ResolveRequest
from triptych.domain.rng import Rng as Rng  # noqa: PLC0414 - this page has every seam
from triptych.domain.scaling import PoolName, ScaledPool
from triptych.domain.stage import Role
from triptych.domain.store import Changes, Entry, Fence, LogRecord
from triptych.domain.timeline import Readiness, Timeline

T = TypeVar("T")

# --- services --------------------------------------------------------------------------------------------------------


class Loras(Protocol):
    """Loads and unloads LoRA adapters while requests run: of one instance, or of all that a router knows."""

    async def load_lora(self, order: LoadLora) -> LoadedLora:
        """Returns when requests for the model of its name are taken. Raises InvalidRequest for one that cannot be loaded or whose name is
        taken, FailedPrecondition where nothing is loaded on order.
        """
        ...

    async def unload_lora(self, name: str) -> None:
        """Take no more requests for it; those that run go on. Raises ModelNotFound."""
        ...


class Router(Loras, Protocol):
    """The single entry point, for gateway and SDK."""

    def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        """``TokenChunk`` events of all choices, ``ChoiceFinished`` as the last of each; then ``ChatFinished``.

        Events that are ready together are yielded together; a batch is never empty. If the request has tools, each call
        is a ``ToolCallMade`` instead of text. Closing the generator cancels the request at every stage.
        """
        ...

    async def models(self) -> tuple[ModelInfo, ...]:
        """The model, and each LoRA adapter that is served as one."""
        ...

    async def tokenize(self, request: ChatRequest, *, return_token_strs: bool = False) -> Tokenized:
        """The token ids that ``chat`` would prefill, placeholders included.

        Raises the same errors as ``chat`` for messages, items and tools; sampling is not checked.
        """
        ...

    def resolve(self, request: ResolveRequest) -> AsyncGenerator[tuple[ResolvedItem, ...]]:
        """The embeddings of the request's media or keys, in its order: yielded once, when all are there.

        They are held until the generator is closed; it ends by itself at the request's time limit, or when holders no longer
        keep them. Raises NotFound for a key whose embedding is not held any more or was never known, and for media what
        ``chat`` raises.
        """
        ...

    async def timeline(self, request_id: str) -> Timeline:
        """Raises NotFound once the request has left the bounded history."""
        ...

    async def readiness(self) -> Readiness: ...


class Instance(Loras, Protocol):
    """A process with an engine, whatever its stages."""

    async def describe(self) -> InstanceInfo: ...

    def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        """The load of its stages now, and after each change, at a bounded rate."""
        ...


class Encoder(Instance, Protocol):
    """Encodes an item; the embedding is stored in this instance's arena."""

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        """Raises ArenaFull instead of waiting for memory, InvalidMedia for an item that cannot be decoded."""
        ...

    async def lease(self, request: LeaseRequest) -> Ticket:
        """Raises LeaseLost if the embedding is gone."""
        ...

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        """Release leases; unknown or expired ones are ignored."""
        ...


class HolderStub(Protocol):
    """Calls of the reader of an embedding at the holder's address, besides reading its memory."""

    async def describe(self) -> InstanceInfo: ...

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        """As ``Encoder.release``."""
        ...

    async def close(self) -> None: ...


class Text(Instance, Protocol):
    """Pulls a request's embeddings, then prefills and decodes."""

    def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        """``Ready``, then ``TokenChunk`` events of all choices, each choice ending with a ``Finished``; or ``KvTransferred`` as the last
        event, for the choices that have not ended.

        Events that are ready together are yielded together; a batch is never empty. Raises TransferFailed, naming the
        items, only before ``Ready``. Of a continuation (``request.continued``) only what follows is sent; token counts are those
        of the whole answer.
        """
        ...


class InstanceClient(Encoder, Text, Protocol):
    """An instance as seen by its callers, which know from ``describe`` which stages it serves."""

    async def close(self) -> None:
        """Close the connection; running calls fail."""
        ...


class PoolManager(Protocol):
    """Knows the members of all pools, and tells watchers. Nothing on a request's path calls it."""

    def attend(self, reports: AsyncGenerator[MemberReport]) -> AsyncGenerator[Order]:
        """A member's stream: a registration first, then heartbeats; a farewell at the end.

        Raises Unavailable for a registration that contradicts another member's, InvalidRequest for an invalid one.
        """
        ...

    def watch(self, watch: Watch) -> AsyncGenerator[MembershipDelta]:
        """Yield what the watcher does not know yet, then every change, at a bounded rate; and regularly without a change.

        Raises Overloaded at the limit of watchers.
        """
        ...

    async def status(self) -> ManagerStatus: ...

    async def drain_instance(self, instance_id: str, *, force: bool) -> None:
        """Order the instance to drain. Raises NotFound, and without ``force`` FailedPrecondition if no other member of its model
        does what it does.
        """
        ...

    async def switch_instance(self, instance_id: str, role: Role, *, force: bool) -> None:
        """Order the instance to serve the stages of this role. Returns at once; ``status`` says when it does.

        Raises NotFound, InvalidRequest if it cannot switch to that role, FailedPrecondition if it drains, and without
        ``force`` if no other instance of its model serves a stage that it would leave, and Unavailable if another manager leads.
        """
        ...

    async def set_limits(self, instance_id: str, wanted: InstanceLimits) -> None:
        """Order the instance, by hand, to have these limits of its batches. Returns at once; ``status`` says when it does, or why not.
        Limits without any value end an earlier order.

        Raises NotFound, InvalidRequest for limits that it does not have or cannot change, and Unavailable if another manager leads.
        """
        ...

    async def set_size(self, order: ManualSize) -> None:
        """Set or end the manual size of a pool. Returns once the store has it, before anything is started.

        Raises NotFound for an unknown pool, InvalidRequest for a size out of its bounds or a time of 0, Unavailable if
        another manager decides, StoreUnavailable if it is unknown whether the next manager that leads will know it.
        """
        ...

    async def roll(self, pool: PoolName, degree: int) -> None:
        """Replace the instances of a pool, one by one, by such with another tensor-parallel degree. Returns once the scaler has the degree;
        ``status`` says how far it has come, and why it has ended.

        Raises NotFound for an unknown pool, InvalidRequest for a degree that it has, or that the scaler cannot start, FailedPrecondition
        if it has no room for one instance more, no instance, or rolls already, and Unavailable if another manager leads.
        """
        ...


class PoolManagerClient(PoolManager, Protocol):
    """A pool manager as seen by its callers."""

    async def close(self) -> None:
        """Close the connection; running calls fail."""
        ...


# --- membership ------------------------------------------------------------------------------------------------------


class Membership(Protocol):
    """A source of members: settings, a file, or a pool manager."""

    def snapshots(self) -> AsyncGenerator[MembershipSnapshot]:
        """The members now, and after each change; it may end if they never change.

        While the source cannot be read, the last snapshot stays valid.
        """
        ...

    @property
    def fault(self) -> str:
        """Why the source cannot be read; empty if it can."""
        ...


# --- the control plane's store -------------------------------------------------------------------------------------------


class Store(Protocol):
    """Small values of the control plane that several managers share: tables, logs and leases.

    No request waits for it. Every method but ``watch`` ends within a time that the backend's settings give, and raises
    StoreUnavailable if the store does not answer: a write has then happened or not. StoreCorrupt: it holds foreign data.
    InvalidRequest: a name or a value is out of bounds. A write with a ``fence`` is carried out only while that lease is held
    under that token, else Deposed; with ``expected`` only if the entry has that version (0: does not exist), else Conflict.
    The store checks both atomically with the write.
    """

    @property
    def fault(self) -> str:
        """Why the last call failed; empty if the store answered."""
        ...

    async def get(self, table: str, key: str) -> Entry | None: ...

    async def entries(self, table: str) -> tuple[Entry, ...]:
        """All entries by key, from one moment."""
        ...

    async def put(
        self, table: str, key: str, value: bytes, *, expected: int | None = None, fence: Fence | None = None
    ) -> int:
        """Write an entry and return its new version. Raises Overloaded when the table is full."""
        ...

    async def delete(self, table: str, key: str, *, expected: int | None = None, fence: Fence | None = None) -> bool:
        """Whether there was such an entry."""
        ...

    def watch(self, table: str) -> AsyncGenerator[Changes]:
        """All entries, then what has changed since; an entry that changed several times in between comes once.

        While the store is away nothing is yielded, and then what changed meanwhile. Raises StoreUnavailable once it is closed.
        """
        ...

    async def append(self, log: str, value: bytes, *, keep: int, fence: Fence | None = None) -> int:
        """Append a record, drop all but the last ``keep``, and return the record's number."""
        ...

    async def tail(self, log: str, n: int) -> tuple[LogRecord, ...]:
        """The last ``n`` records, oldest first."""
        ...

    async def acquire(self, lease: str, owner: str, ttl_s: float) -> Fence | None:
        """Take a lease for ``ttl_s`` on the store's clock; None if another owner holds it.

        An owner that holds it already gets a new token; its former one is refused from then on.
        """
        ...

    async def renew(self, fence: Fence, ttl_s: float) -> bool:
        """Let a lease end ``ttl_s`` from now; False if it is no longer held under this token."""
        ...

    async def release(self, fence: Fence) -> bool:
        """Give a lease back; False if it was no longer held under this token."""
        ...

    async def holder(self, lease: str) -> str | None:
        """The owner of a lease, if there is one."""
        ...

    async def close(self) -> None:
        """End connections; later calls raise StoreUnavailable."""
        ...


# --- scaling ---------------------------------------------------------------------------------------------------------


class Scaler(Protocol):
    """Makes pools have the wanted number of instances: starts them, and stops those that are named.

    Orders have the fencing token of the leader that gives them. A token below the highest one seen raises Deposed, and
    nothing is done. An accepted order is carried out later, and retried until a newer one replaces it.
    """

    async def scale(self, pool: PoolName, size: int, token: int) -> None:
        """Declare the wanted size of a pool. What an earlier size ordered and does not run yet is taken back at once.

        A running instance is never chosen: below their number, nothing changes until ``remove`` names some. Raises
        NotFound for an unknown pool, InvalidRequest for a size out of bounds.
        """
        ...

    async def remove(self, pool: PoolName, instance: str, token: int) -> None:
        """Stop one instance, which has drained. It is replaced if the pool is then smaller than wanted.

        Raises NotFound if there is no such instance.
        """
        ...

    async def set_degree(self, pool: PoolName, degree: int, token: int) -> None:
        """Start the instances of a pool with this tensor-parallel degree from now on; those that exist keep theirs.

        Raises NotFound for an unknown pool, InvalidRequest if it cannot start such instances.
        """
        ...

    async def pools(self) -> tuple[ScaledPool, ...]:
        """What exists in each pool, what is under way, and what is wrong. Raises Unavailable if that cannot be learned."""
        ...

    async def close(self) -> None:
        """Stop carrying out orders. Instances go on."""
        ...


class Replanner(Protocol):
    """Searches for a better placement."""

    async def search(self, question: PlanQuestion) -> Proposal:
        """May take minutes; the caller bounds it. Raises TriptychError, saying why there is no answer."""
        ...


# --- transport: copies embeddings between the memories of processes --------------------------------------------------


class Arena(Protocol):
    """A block of host or device memory, registered once and never freed while the process lives.

    Services use ``read`` and ``write``; transports may use its ``region``. ``transport.slot`` writes and checks slots.
    Offsets are in bytes from the start; callers must check ``holds``.
    """

    instance_id: str
    epoch: int
    probe: bytes
    """Bytes at its start, unique to every incarnation of every instance."""

    @property
    def nbytes(self) -> int: ...

    @property
    def base(self) -> int:
        """First offset of slots; they end at ``nbytes``."""
        ...

    @property
    def region(self) -> Region: ...

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether this range lies within the slots' range."""
        ...

    def read(self, offset: int, nbytes: int) -> memoryview:
        """The bytes, read-only, format ``B``: a view of host memory, or a copy of device memory."""
        ...

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Copy contiguous bytes in. One-sided reads by peers see them once this returns."""
        ...

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """A writable view to receive into, format ``B``; None for device memory."""
        ...

    def take_scratch(self) -> int:
        """Reserve room for one probe, until ``give_scratch``. Raises Overloaded if too many are reserved."""
        ...

    def give_scratch(self, offset: int) -> None: ...


class Peer(Protocol):
    """A holder whose arena this reader can read, over one tested backend."""

    @property
    def backend(self) -> str: ...

    async def pull(self, ticket: Ticket, destination_offset: int) -> None:
        """Copy a ticket's slot (``slot_nbytes``) into the reader's own arena.

        Raises LeaseLost if the holder reports the lease or slot gone, TransferFailed for any other failure. When
        cancelled, it returns only once nothing can write to the destination any more, or leaves the range in quarantine
        (``Transport.quarantined``).
        """
        ...

    async def close(self) -> None: ...


class Transport(Protocol):
    """One backend, both sides: peers read its arena, and it reads theirs into its arena."""

    @property
    def backend(self) -> str: ...

    @property
    def arena(self) -> Arena: ...

    def offer(self) -> TransportOffer:
        """What a reader needs to connect."""
        ...

    async def connect(self, offer: TransportOffer) -> Peer:
        """Connect to a holder and verify it by reading a probe from its arena. Raises TransferFailed."""
        ...

    def quarantined(self) -> tuple[tuple[int, int], ...]:
        """(offset, nbytes) ranges of its arena that a late write may still reach, so they must not be reused."""
        ...

    async def close(self) -> None: ...


class LeaseCheck(Protocol):
    """Called by a holder's transport before it serves a read, if the backend supports it."""

    def __call__(self, lease_id: LeaseId, offset: int, nbytes: int) -> bool: ...


# --- engines ---------------------------------------------------------------------------------------------------------


class PreparedItem(Protocol):
    """An item after CPU preprocessing; its content is private to the engine."""

    @property
    def tokens(self) -> int: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The tensors that ``encode`` will return, so that memory can be reserved before compute."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory that it takes while it waits."""
        ...


PreparedT = TypeVar("PreparedT", bound=PreparedItem)


class StopSignal(Protocol):
    """Signals blocking work in a thread that its result is no longer needed."""

    @property
    def stopped(self) -> bool: ...

    def on_stop(self, call: Callable[[], object]) -> AbstractContextManager[None]:
        """Within the context, ``call`` is called once when the signal is given (or at once), by the signalling thread.

        After the context, it is not called and not running.
        """
        ...


class UnloadableWeights(Protocol):
    """The weights of a part of the model, which can leave the memory while nothing computes with them.

    Blocking. ``load`` and ``unload`` are called by one thread at a time, the others by the thread that computes with them.
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def resident(self) -> bool:
        """Whether they are in memory; also while another thread loads or unloads them, when they are not."""
        ...

    @property
    def load_s(self) -> float:
        """How long the last load took."""
        ...

    def load(self) -> None:
        """Raises Unavailable, with nothing in memory."""
        ...

    def after_load(self) -> None:
        """Prepare the engine to compute with them."""
        ...

    def before_unload(self) -> None:
        """Forget what the weights have made. Raises EngineFailure if they are in use."""
        ...

    def unload(self) -> None: ...


class LoraFiles(Protocol):
    """An adapter that was read; its content is private to the engine."""

    @property
    def digest(self) -> str:
        """Over its files, 64 hex digits: the identity by which requests name it."""
        ...

    @property
    def rank(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Memory that it takes in the engine."""
        ...

    @property
    def encodes(self) -> bool:
        """Whether it changes embeddings."""
        ...


LoraFilesT = TypeVar("LoraFilesT", bound=LoraFiles)


class LoraAccess(Protocol[LoraFilesT]):
    """The LoRA adapters of an engine, each applied to the requests or items that name it."""

    def read(self, directory: Path) -> LoraFilesT:
        """Read an adapter's files, checked against the model. Blocks; for any thread. Raises InvalidRequest."""
        ...

    def add(self, files: LoraFilesT) -> None:
        """Take requests with what ``read`` has returned. Called between two steps or passes, by the thread that computes them."""
        ...

    def remove(self, digest: str) -> None:
        """Free an adapter's memory, called likewise: of one that no request in the engine names."""
        ...


class EncoderEngine(Protocol[PreparedT]):
    """Vision or audio encoder with its projector.

    ``prepare`` is thread-safe; ``encode`` is called by one thread at a time.
    """

    @property
    def model(self) -> ModelInfo: ...

    @property
    def version(self) -> str:
        """Changes whenever the same input would give another embedding."""
        ...

    @property
    def processor_digest(self) -> bytes: ...

    @property
    def loras(self) -> LoraAccess[Any] | None:
        """None if it applies no LoRA adapters per item."""
        ...

    @property
    def weights(self) -> UnloadableWeights | None:
        """None where they always stay in memory."""
        ...

    def decoded_nbytes(self, info: MediaInfo, shard: Shard | None = None) -> int:
        """Peak memory of decoding, for admission before it starts. Raises InvalidMedia."""
        ...

    def prepare(
        self, media: bytes, info: MediaInfo, shard: Shard | None = None, stop: StopSignal | None = None
    ) -> PreparedT:
        """Decode and preprocess one item or shard. It ends early, with any error, when ``stop`` is given.

        Raises InvalidMedia; InvalidRequest for an invalid shard.
        """
        ...

    def encode(self, batch: Sequence[PreparedT]) -> list[tuple[Tensor, ...]]:
        """One forward pass over a batch. Returns for each item the tensors announced by ``outputs``, all finite.

        Raises EngineFailure if any item fails; encoding them one by one identifies it. Raises InstanceLost if the engine
        cannot go on: then the process must end.
        """
        ...


class KvAccess(Protocol):
    """Keys and values of a text engine's requests, copied out and in by position: for KV transfers (docs/adr/0044).

    All methods are called between two steps, by the thread that calls ``step``.
    """

    @property
    def kind(self) -> SegmentKind: ...

    @property
    def awaiting(self) -> AbstractSet[tuple[str, int]]:
        """The requests and choices that have their memory and await ``unpack`` or ``arrived``. Of new choices that share a prompt,
        the first one stands for all.
        """
        ...

    def pause(self, request_id: str) -> None:
        """Give its choices no further token. They keep their memory until ``cancel``, as long as nothing preempts them."""
        ...

    def computed(self, request_id: str, choice: int) -> int:
        """Positions whose keys and values are in memory, from 0 on. 0 if the choice waits, is unknown or has finished."""
        ...

    def prefix_hash(self, request_id: str, choice: int, end: int) -> bytes | None:
        """Over the tokens and items before position ``end``, and the tenant's salt. ``end`` is at most the choice's length.

        Known from ``add`` on, before anything is computed. None if its contents have no identity, or the choice is unknown or
        has finished. It does not depend on the sizes of the engine's blocks.
        """
        ...

    def pack(self, request_id: str, choice: int, segment: KvSegment, memory: memoryview) -> bool:
        """Copy these positions to ``memory``, ``segment.nbytes`` of writable bytes in host memory.

        Returns False, having written nothing of value, if they are not all computed (any more). Raises EngineFailure if they cannot be
        copied, as a state that is later already.
        """
        ...

    def unpack(self, request_id: str, choice: int, segment: KvSegment, memory: memoryview) -> bool:
        """Copy a segment in. Those of a choice come in order: what lies before is computed, found or unpacked.

        Returns False, changing nothing, if the choice does not await it (any more), or it is found to be another one.
        """
        ...

    def arrived(self, request_id: str) -> None:
        """No more will come: what is missing is computed. Without effect for a request that awaits nothing."""
        ...


class DeviceSharing(Protocol):
    """Steps of a text engine that shares its device with another stage, between decodes (``policy.iteration``)."""

    @property
    def prefill_queue_position(self) -> QueuePosition | None:
        """The first queue position of the prompts of which the next step could compute part, given batch slots and memory; None if
        there are none.
        """
        ...

    def step(self) -> list[EngineOutput]:
        """As ``TextEngine.step``."""
        ...

    def decode_step(self) -> list[EngineOutput]:
        """Like ``step``, but without prefills: prompts wait, and started ones keep their state."""
        ...


class AdjustableSteps(Protocol):
    """Limits of the steps of a text engine, which can change between two of them."""

    @property
    def max_sequences(self) -> int:
        """Most sequences in one step."""
        ...

    @property
    def token_budget(self) -> int:
        """Most tokens in one step, at least ``max_sequences``."""
        ...

    @property
    def most_sequences(self) -> int:
        """Largest ``max_sequences`` that it can have: its KV memory has room for so many, and so many were prepared for."""
        ...

    @property
    def most_tokens(self) -> int:
        """Largest ``token_budget`` that it can have: as much was expected at its start."""
        ...

    def limit_steps(self, max_sequences: int, token_budget: int) -> None:
        """Set both, within their bounds. What runs goes on; nothing starts while more than that runs."""
        ...


class TextEngine(Protocol):
    """The language model with continuous batching. Not thread-safe: called by one thread at a time.

    What only some engines can do is a member of its own: ``kv``, ``sharing``, ``steps``, ``weights`` and ``loras``, each None where an
    engine cannot.
    """

    @property
    def kv(self) -> KvAccess | None:
        """None if keys and values cannot be copied."""
        ...

    @property
    def sharing(self) -> DeviceSharing | None:
        """None if no other stage can compute between its decodes."""
        ...

    @property
    def steps(self) -> AdjustableSteps | None:
        """None where the limits of steps are fixed at its start."""
        ...

    @property
    def weights(self) -> UnloadableWeights | None:
        """None where they always stay in memory."""
        ...

    @property
    def loras(self) -> LoraAccess[Any] | None:
        """None if it applies no LoRA adapters per request."""
        ...

    @property
    def model(self) -> ModelInfo: ...

    @property
    def kv_tokens(self) -> int:
        """Token capacity of its KV memory (prompt and answer, per choice)."""
        ...

    @property
    def kv_block_tokens(self) -> int:
        """Tokens of a block of it. A choice takes whole blocks."""
        ...

    @property
    def placeholder_ids(self) -> AbstractSet[int]:
        """The token ids that mark items in a prompt."""
        ...

    @property
    def finds_prefixes(self) -> bool:
        """Whether it computes no prefix of a prompt twice, also where it ends between two items."""
        ...

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        """Whether an item of this many positions may have such tensors. Called before anything is pulled."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ContextTooLong or InvalidRequest if it can never run. Tensors are copied."""
        ...

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """Cancel a request or one of its choices. Unknown or finished ones are ignored."""
        ...

    def reorder(self, request_id: str, queue_position: QueuePosition) -> None:
        """Give a request that has not begun another position. Others are ignored, as in engines with an order of their own."""
        ...

    def step(self) -> list[EngineOutput]:
        """Run one iteration. Sequences join and leave the batch between steps.

        Raises InstanceLost if the engine cannot go on: then the process must end.
        """
        ...

    @property
    def has_work(self) -> bool: ...

    @property
    def can_step(self) -> bool:
        """Whether the next ``step`` would compute something. Not where all that is left waits for a call, paused or arriving."""
        ...

    @property
    def waiting(self) -> AbstractSet[str]:
        """Requests that were added and have not begun, for want of memory or of a place; or not since they gave way."""
        ...

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens still to prefill plus tokens that may still be decoded."""
        ...

    @property
    def kv_free_tokens(self) -> int:
        """Of ``kv_tokens``; cached prefixes that no sequence uses count as free."""
        ...

    @property
    def prefix_queries_tokens(self) -> int:
        """Prompt tokens looked up in the prefix cache."""
        ...

    @property
    def prefix_hits_tokens(self) -> int:
        """Tokens of those that were found."""
        ...

    @property
    def preemptions(self) -> int:
        """Sequences that gave way for want of memory."""
        ...

    @property
    def kv_copies(self) -> KvCopies:
        """Copies of such sequences in the memory of the host."""
        ...


# --- environment -----------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """Monotonic seconds."""

    def __call__(self) -> float: ...


class Offload(Protocol):
    """Runs blocking work off the event loop: a bounded pool in production, inline under virtual time."""

    async def run(self, fn: Callable[..., T], /, *args: object) -> T: ...
