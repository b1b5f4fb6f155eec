"""The system on one page: every seam as a Protocol in domain types.

    client -> Router -> Encoder (one per item, in parallel)  -> Ticket
                     -> Text    (once every item has one)    -> tokens
              Text   -> Encoder's arena through a Transport: a one-sided read, then Encoder.release

A service object and its gRPC stub satisfy the same Protocol, so a caller cannot tell a process of its own from one
across the network; `tests/simulation` runs the whole cluster in one process by that. Every method raises only errors of ``triptych.errors``.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from triptych.domain.chat import ChatRequest, Tokenized
from triptych.domain.embedding import LeaseId, Tensor, TensorSpec, Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.generation import ChatEvent, FinishReason, TextEvent, TextRequest
from triptych.domain.instance import InstanceInfo, InstanceLoad, ModelInfo, TransportOffer
from triptych.domain.media import MediaInfo, Shard
from triptych.domain.membership import MembershipSnapshot
from triptych.domain.rng import Rng as Rng  # noqa: PLC0414 - this page has every seam
from triptych.domain.sampling import SamplingParams
from triptych.domain.timeline import Readiness, Timeline
from triptych.policy.queueing import FIRST_COME, Turn

T = TypeVar("T")

# --- services: what processes offer each other -----------------------------------------------------------------------


class Router(Protocol):
    """The one entrance, for gateway and SDK alike."""

    def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        """The ``TokenChunk`` of all choices, with one ``ChoiceFinished`` after the last of each; then ``ChatFinished``.

        What is ready together comes together, at least one event at a time. Where tools were told of, a
        ``ToolCallMade`` stands for the text of each call.

        Closing the generator cancels the request at every stage.
        """
        ...

    async def models(self) -> tuple[ModelInfo, ...]: ...

    async def tokenize(self, request: ChatRequest, *, return_token_strs: bool = False) -> Tokenized:
        """The ids that ``chat`` would prefill, placeholders included.

        Raises what ``chat`` refuses messages, items and tools with; how to sample is not looked at.
        """
        ...

    async def timeline(self, request_id: str) -> Timeline:
        """Raises NotFound once the bounded history has let the request go."""
        ...

    async def readiness(self) -> Readiness: ...


class Instance(Protocol):
    """A process with an engine, whatever stages it serves."""

    async def describe(self) -> InstanceInfo: ...

    def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        """The load of all its stages now, and again whenever it has changed, at a bounded rate."""
        ...


class Encoder(Instance, Protocol):
    """Turns an item into an embedding that lies in this instance's arena."""

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        """Raises ArenaFull rather than wait for memory, InvalidMedia for what cannot be decoded."""
        ...

    async def lease(self, request: LeaseRequest) -> Ticket:
        """Raises LeaseLost when the embedding is no longer there."""
        ...

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        """Gives leases back; one that is unknown or over is not an error."""
        ...


class HolderStub(Protocol):
    """What the reader of an embedding calls at the address of its holder, besides reading its memory."""

    async def describe(self) -> InstanceInfo: ...

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        """As ``Encoder.release``."""
        ...

    async def close(self) -> None: ...


class Text(Instance, Protocol):
    """Pulls what a request needs, then prefills and decodes."""

    def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        """``Ready``, then the ``TokenChunk`` of all choices, with one ``Finished`` after the last of each.

        What is ready together comes together, at least one event at a time.

        Raises TransferFailed, naming the items, before ``Ready`` and never after.
        """
        ...


class InstanceClient(Encoder, Text, Protocol):
    """An instance as its callers have it: whoever calls a stage has learned from ``describe`` that it is served."""

    async def close(self) -> None:
        """Let go of the connection; calls that still run fail."""
        ...


# --- membership: which instances there are ---------------------------------------------------------------------------


class Membership(Protocol):
    """A source of members: settings, a file, whoever manages the pools."""

    def snapshots(self) -> AsyncGenerator[MembershipSnapshot]:
        """The members now, and again whenever they have changed; it may end when they never will.

        While the source cannot be read, the last snapshot holds.
        """
        ...

    @property
    def fault(self) -> str:
        """Why the source cannot be read now; empty when it can."""
        ...


# --- transport: how embeddings get from one process's memory into another's ------------------------------------------


@dataclass(frozen=True, slots=True)
class Region:
    """Memory as hardware is told of it. ``device`` is the number of a CUDA device, None for host memory."""

    address: int
    nbytes: int
    device: int | None = None


class Arena(Protocol):
    """One block of memory, registered once and never freed while the process lives; on the host or on a device.

    Its bytes are reached through ``read`` and ``write``, by transports also through its ``region``. Slots are made and
    checked by ``transport.slot``. Offsets are in bytes from its start; the caller keeps to ``holds``.
    """

    instance_id: str
    epoch: int
    probe: bytes
    """What stands at its start: different for every incarnation of every instance."""

    @property
    def nbytes(self) -> int: ...

    @property
    def base(self) -> int:
        """Where slots may begin; they end at ``nbytes``."""
        ...

    @property
    def region(self) -> Region: ...

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether these bytes lie where slots may lie."""
        ...

    def read(self, offset: int, nbytes: int) -> memoryview:
        """The bytes, read-only, format ``B``: a view where the memory is the host's, else a copy of what was there."""
        ...

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Copy contiguous bytes in; a one-sided read by a peer sees them once this returns."""
        ...

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """To receive into without a copy, writable, format ``B``; None where the memory is not the host's."""
        ...

    def take_scratch(self) -> int:
        """Room for one probe, until ``give_scratch``. Raises Overloaded when too many are out."""
        ...

    def give_scratch(self, offset: int) -> None: ...


class Peer(Protocol):
    """A holder whose arena this reader can read, over one backend that has been seen to work."""

    @property
    def backend(self) -> str: ...

    async def pull(self, ticket: Ticket, destination_offset: int) -> None:
        """Copy a ticket's slot (``slot_nbytes``) into the reader's own arena.

        It is complete, or raises: LeaseLost when the holder says that lease or slot are gone, TransferFailed for all
        else. When it is cancelled it returns only once nothing can write to the destination any more, or hands the
        range to the transport's quarantine (``Transport.quarantined``).
        """
        ...

    async def close(self) -> None: ...


class Transport(Protocol):
    """One backend, on both sides: its arena can be read by peers, and it reads theirs into its arena."""

    @property
    def backend(self) -> str: ...

    @property
    def arena(self) -> Arena: ...

    def offer(self) -> TransportOffer:
        """What a reader needs to know to connect."""
        ...

    async def connect(self, offer: TransportOffer) -> Peer:
        """Reach a holder and prove it by reading a probe from its arena. Raises TransferFailed."""
        ...

    def quarantined(self) -> tuple[tuple[int, int], ...]:
        """(offset, nbytes) ranges of the own arena that a late write may still reach: not to be reused."""
        ...

    async def close(self) -> None: ...


class LeaseCheck(Protocol):
    """Asked by a holder's transport, where the backend can ask, before it serves a read."""

    def __call__(self, lease_id: LeaseId, offset: int, nbytes: int) -> bool: ...


# --- engines: the compute behind a service ---------------------------------------------------------------------------


class PreparedItem(Protocol):
    """An item after CPU preprocessing; what is inside is the engine's own."""

    @property
    def tokens(self) -> int: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What ``encode`` will make of it, so that memory is reserved before compute is spent."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory it takes while it waits."""
        ...


PreparedT = TypeVar("PreparedT", bound=PreparedItem)


class StopSignal(Protocol):
    """Tells blocking work in a thread that nobody wants it any more."""

    @property
    def stopped(self) -> bool: ...

    def on_stop(self, call: Callable[[], object]) -> AbstractContextManager[None]:
        """Within the context, ``call`` is called once when the signal is given, by the thread that gives it; at once if it
        was given already. Outside of it, it is not called any more, nor is it running.
        """
        ...


class EncoderEngine(Protocol[PreparedT]):
    """Tower and projector. ``prepare`` is thread-safe; ``encode`` is called from one thread at a time."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def version(self) -> str:
        """Changes whenever the same bytes would give another embedding."""
        ...

    @property
    def processor_digest(self) -> bytes: ...

    def decoded_nbytes(self, info: MediaInfo, shard: Shard | None = None) -> int:
        """The most memory that decoding takes on the way, so that it is counted before. Raises InvalidMedia."""
        ...

    def prepare(
        self, media: bytes, info: MediaInfo, shard: Shard | None = None, stop: StopSignal | None = None
    ) -> PreparedT:
        """Decode and preprocess one item, or one shard of it. Given ``stop``, it ends early, with any error.

        Raises InvalidMedia, InvalidRequest for no shard of it.
        """
        ...

    def encode(self, batch: Sequence[PreparedT]) -> list[tuple[Tensor, ...]]:
        """One pass over a batch; per item the tensors that ``outputs`` announced, finite.

        Raises EngineFailure when any item fails; encoding them one by one then tells which.
        """
        ...


@dataclass(frozen=True, slots=True)
class EmbeddingInput:
    """One item's tensors, for the first ``tokens`` placeholders at or after prompt position ``start``.

    ``key`` is the whole identity of the item: equal keys, equal tensors. Empty where it is not known; nothing of the
    request is kept for others then.
    """

    start: int
    tokens: int
    tensors: Mapping[str, Tensor]
    key: bytes = b""


class TokenGrammar(Protocol):
    """Holds one answer to a response format. Blocking, bounded in time per call; for one thread at a time."""

    def fork(self) -> Self:
        """One more at the same place, that goes its own way."""
        ...

    def allowed(self) -> bytes:
        """Which tokens may come next: a bit for each, the least significant first.

        An end-of-sequence token is among them where the answer may end. Raises InvalidRequest when the format has
        become too complex to follow.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Go on with a token that is allowed. Raises as ``allowed`` does."""
        ...


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt for the text engine, to be answered ``sampling.n`` times; ``max_tokens`` and ``seed`` are set.

    Those that wait are begun in the order of ``turn``, and of those that run the last gives way first where memory runs
    out. ``grammar`` stands at the beginning of an answer, and is the engine's from then on. Beginnings of prompts are shared
    only among requests of equal ``tenant_salt``.
    """

    request_id: str
    token_ids: tuple[int, ...]
    embeddings: tuple[EmbeddingInput, ...]
    sampling: SamplingParams
    grammar: TokenGrammar | None = None
    tenant_salt: bytes = b""
    turn: Turn = FIRST_COME


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Scores:
    """The token at one position, and the likeliest for it, best first."""

    chosen: ScoredToken
    top: tuple[ScoredToken, ...]


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one step did for one choice. ``error`` is set when the engine gave the request up, with all its choices.

    A token that ends the answer is among ``token_ids``, as in what ``generate`` returns. ``scores`` has an entry per
    token where ``logprobs`` were asked for.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    choice: int = 0
    scores: tuple[Scores, ...] = ()


class TextEngine(Protocol):
    """The language model with continuous batching. Not thread-safe: one loop calls it, from one thread at a time."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def kv_tokens(self) -> int:
        """Tokens that its memory has room for: of prompt and answer, once for each choice."""
        ...

    @property
    def placeholder_ids(self) -> AbstractSet[int]:
        """The token ids whose places in a prompt items fill."""
        ...

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        """Whether an item that fills so many positions may bring such tensors; asked before anything is pulled."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ContextTooLong or InvalidRequest for what can never run. Tensors are copied."""
        ...

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """Forget a request, or one choice of it; what is unknown or over is fine."""
        ...

    def step(self) -> list[EngineOutput]:
        """Run one iteration: sequences join and leave the batch between steps."""
        ...

    @property
    def has_work(self) -> bool: ...

    @property
    def waiting(self) -> AbstractSet[str]:
        """Requests that were added and have not begun, for want of memory or of a place; or not since they gave way."""
        ...

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens not yet prefilled plus tokens that may still be decoded."""
        ...


class StagedTextEngine(TextEngine, Protocol):
    """A text engine on whose device another stage has its turns, between decodes (``policy.iteration``)."""

    @property
    def prefill_ready(self) -> bool:
        """Whether there is a prompt that the next step could compute something of: it has a place and memory."""
        ...

    def decode_step(self) -> list[EngineOutput]:
        """As ``step``, without prompts: they wait, and those that have begun keep what they have."""
        ...


# --- the world -------------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """Monotonic seconds."""

    def __call__(self) -> float: ...


class Offload(Protocol):
    """Runs blocking work off the event loop: a bounded pool in production, inline under virtual time."""

    async def run(self, fn: Callable[..., T], /, *args: object) -> T: ...
