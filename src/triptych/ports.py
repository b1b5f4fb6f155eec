"""Every interface between parts of the system, as a Protocol in domain types.


    client -> Router -> Encoder (one per item, in parallel)  -> Ticket
                     -> Text    (once every item has one)    -> tokens
              Text   -> Encoder's arena through a Transport: a one-sided read, then Encoder.release

A service object and its gRPC stub satisfy the same Protocol, so a caller need not know whether a service is local or
remote; `tests/simulation` runs a whole cluster in one process that way. Methods raise only errors of
``triptych.errors``.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar, runtime_checkable

from triptych.domain.chat import ChatRequest, Tokenized
from triptych.domain.continuation import ContinuedChoice, begun
from triptych.domain.embedding import LeaseId, Tensor, TensorSpec, Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.generation import ChatEvent, FinishReason, TextEvent, TextRequest
from triptych.domain.instance import InstanceInfo, InstanceLoad, ModelInfo, TransportOffer
from triptych.domain.kv_segment import KvCopies, KvKind, KvSegment
from triptych.domain.media import MediaInfo, Shard
from triptych.domain.membership import MembershipSnapshot
from triptych.domain.pool import ManagerStatus, ManualSize, MemberReport, MembershipDelta, Order, Watch
from triptych.domain.queue_position import FIRST_COME, QueuePosition
from triptych.domain.resolving import ResolvedItem, ResolveRequest
from triptych.domain.rng import Rng as Rng  # noqa: PLC0414 - this page has every seam
from triptych.domain.sampling import SamplingParams
from triptych.domain.scaling import PoolName, ScaledPool
from triptych.domain.stage import Role
from triptych.domain.store import Changes, Entry, Fence, LogRecord
from triptych.domain.timeline import Readiness, Timeline

T = TypeVar("T")

# --- services --------------------------------------------------------------------------------------------------------


class Router(Protocol):
    """The single entry point, for gateway and SDK."""

    def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        """``TokenChunk`` events of all choices, ``ChoiceFinished`` as the last of each; then ``ChatFinished``.

        Events that are ready together are yielded together; a batch is never empty. If the request has tools, each call
        is a ``ToolCallMade`` instead of text. Closing the generator cancels the request at every stage.
        """
        ...

    async def models(self) -> tuple[ModelInfo, ...]: ...

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


class Instance(Protocol):
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
    """What the reader of an embedding calls at the holder's address, besides reading its memory."""

    async def describe(self) -> InstanceInfo: ...

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        """As ``Encoder.release``."""
        ...

    async def close(self) -> None: ...


class Text(Instance, Protocol):
    """Pulls a request's embeddings, then prefills and decodes."""

    def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        """``Ready``, then ``TokenChunk`` events of all choices, each choice ending with a ``Finished``; or ``HandedOver`` as the last
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
        """What the watcher does not know yet, then every change, at a bounded rate; and regularly without a change.

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

    async def set_size(self, order: ManualSize) -> None:
        """Set or end the manual size of a pool. Returns once the store has it, before anything is started.

        Raises NotFound for an unknown pool, InvalidRequest for a size out of its bounds or a time of 0, Unavailable if
        another manager decides, StoreUnavailable if it is unknown whether the next manager that leads will know it.
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

    async def pools(self) -> tuple[ScaledPool, ...]:
        """What exists in each pool, what is under way, and what is wrong. Raises Unavailable if that cannot be learned."""
        ...

    async def close(self) -> None:
        """Stop carrying out orders. Instances go on."""
        ...


# --- transport: copies embeddings between the memories of processes --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Region:
    """Memory for registration with hardware. ``device`` is a CUDA device index, None for host memory."""

    address: int
    nbytes: int
    device: int | None = None


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
        """Its memory while it waits."""
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
    """The weights of a part of the model, which can leave the memory while nothing computes with them. Blocking; called by one thread
    at a time.
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

    def unload(self) -> None: ...


@runtime_checkable
class UnloadableEngine(Protocol):
    """An engine that can be without its weights while it is not used."""

    @property
    def weights(self) -> UnloadableWeights | None:
        """None where they always stay."""
        ...


@runtime_checkable
class UnloadableTextEngine(UnloadableEngine, Protocol):
    """Both methods are called by the thread that calls ``step``."""

    def before_unload(self) -> None:
        """Forget what the weights have made. Raises EngineFailure if there are requests."""
        ...

    def after_load(self) -> None: ...


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


@dataclass(frozen=True, slots=True)
class EmbeddingInput:
    """One item's tensors, for the first ``tokens`` placeholders at or after prompt position ``start``. ``key`` is the
    item's full identity: equal keys mean equal tensors. If it is empty, nothing of the request is cached for others.
    """

    start: int
    tokens: int
    tensors: Mapping[str, Tensor]
    key: bytes = b""


class TokenGrammar(Protocol):
    """Constrains one answer to a response format. Blocking, with bounded time per call; not thread-safe."""

    def fork(self) -> Self:
        """An independent copy in the same state."""
        ...

    def allowed(self) -> bytes:
        """Bitmask of the tokens allowed next, least significant bit first. It includes an end-of-sequence token if the
        answer may end. Raises InvalidRequest if the format has become too complex.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Advance by an allowed token. Raises the same errors as ``allowed``."""
        ...


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt for the text engine, with ``sampling.n`` choices; ``max_tokens`` and ``seed`` are set.

    Waiting requests start in the order of ``queue_position``; when memory runs out, the last running one is preempted. ``grammar`` is in
    its initial state and owned by the engine from then on. Prefixes are shared only between requests of equal
    ``tenant_salt``. With ``continued`` only these choices run, and go on after their tokens, as if the engine had generated
    them: they count for limits and penalties, and the grammar has yet to accept them.
    """

    request_id: str
    token_ids: tuple[int, ...]
    embeddings: tuple[EmbeddingInput, ...]
    sampling: SamplingParams
    grammar: TokenGrammar | None = None
    tenant_salt: bytes = b""
    queue_position: QueuePosition = FIRST_COME
    continued: tuple[ContinuedChoice, ...] = ()
    pauses: bool = False
    """Each choice pauses after its first token, as by ``HandingTextEngine.pause``."""
    arriving: int = 0
    """Leading positions that ``HandingTextEngine.unpack`` will bring, of each choice to run, or of those that get most: it takes
    memory for them when it starts, and computes nothing until ``arrived``."""

    @property
    def begun(self) -> Mapping[int, tuple[int, ...]]:
        """The choices to run, and the tokens that each has already."""
        return begun(self.sampling.n, self.continued)


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token and its log-probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Scores:
    """The token at one position and the most likely ones, best first."""

    chosen: ScoredToken
    top: tuple[ScoredToken, ...]


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """The result of one step for one choice. ``error`` is set if the engine failed the request, with all its choices.

    ``token_ids`` includes the token that ends the answer, as ``generate`` returns it. ``scores`` has one entry per
    token if ``logprobs`` were requested. ``preemptions`` counts those of the choice so far, if the engine tells.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    choice: int = 0
    scores: tuple[Scores, ...] = ()
    preemptions: int = 0


class TextEngine(Protocol):
    """The language model with continuous batching. Not thread-safe: called by one thread at a time."""

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


@runtime_checkable
class StagedTextEngine(TextEngine, Protocol):
    """A text engine that shares its device with another stage, between decodes (``policy.iteration``)."""

    @property
    def prefill_queue_position(self) -> QueuePosition | None:
        """The first queue position of the prompts of which the next step could compute part, given batch slots and memory; None if there
        are none.
        """
        ...

    def decode_step(self) -> list[EngineOutput]:
        """Like ``step``, but without prefills: prompts wait, and started ones keep their state."""
        ...


class ObservedTextEngine(TextEngine, Protocol):
    """A text engine that an instance runs: metrics show its memory."""

    @property
    def kv_free_tokens(self) -> int: ...

    @property
    def prefix_queries_tokens(self) -> int:
        """Prompt tokens looked up in the prefix cache."""
        ...

    @property
    def prefix_hits_tokens(self) -> int:
        """Those of them that were found."""
        ...

    @property
    def preemptions(self) -> int:
        """Sequences that gave way for want of memory."""
        ...

    @property
    def kv_copies(self) -> KvCopies:
        """Copies of such sequences in the memory of the host."""
        ...


@runtime_checkable
class HandingTextEngine(ObservedTextEngine, Protocol):
    """A text engine whose keys and values can be copied out and in, by position: for hand-overs (docs/adr/0044).

    All methods are called between two steps, by the thread that calls ``step``.
    """

    @property
    def kv_kind(self) -> KvKind | None:
        """None if its decoder has state outside of KV blocks: then nothing can be copied out or in."""
        ...

    @property
    def awaiting(self) -> AbstractSet[tuple[str, int]]:
        """The requests and choices that have their memory and await ``unpack`` or ``arrived``. Of new choices that share a prompt,
        the first one stands for all.
        """
        ...

    def pause(self, request_id: str) -> None:
        """Its choices get no further token. They keep their memory until ``cancel``, as long as nothing preempts them."""
        ...

    def computed(self, request_id: str, choice: int) -> int:
        """Positions whose keys and values are in its memory, from 0 on. 0 if the choice waits, is unknown or has finished."""
        ...

    def prefix_hash(self, request_id: str, choice: int, end: int) -> bytes | None:
        """Over the tokens and items before position ``end``, and the tenant's salt. ``end`` is at most the choice's length.

        Known from ``add`` on, before anything is computed. None if its contents have no identity, or the choice is unknown or
        has finished. It does not depend on the sizes of the engine's blocks.
        """
        ...

    def pack(self, request_id: str, choice: int, segment: KvSegment, memory: memoryview) -> bool:
        """Copy these positions to ``memory``, ``segment.nbytes`` of writable bytes in host memory.

        Returns False, having written nothing of value, if they are not all computed (any more).
        """
        ...

    def unpack(self, request_id: str, choice: int, segment: KvSegment, memory: memoryview) -> bool:
        """Copy a segment in. Those of a choice come in order: what lies before is computed, found or unpacked.

        Returns False, changing nothing, if the choice does not await it (any more).
        """
        ...

    def arrived(self, request_id: str) -> None:
        """No more will come: what is missing is computed. Without effect for a request that awaits nothing."""
        ...


# --- environment -----------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """Monotonic seconds."""

    def __call__(self) -> float: ...


class Offload(Protocol):
    """Runs blocking work off the event loop: a bounded pool in production, inline under virtual time."""

    async def run(self, fn: Callable[..., T], /, *args: object) -> T: ...
