"""Requests and outputs of a text engine, and the grammar that constrains an answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from triptych.domain.continuation import ContinuedChoice, begun
from triptych.domain.embedding import Tensor
from triptych.domain.generation import FinishReason
from triptych.domain.queue_position import FIRST_COME, QueuePosition
from triptych.domain.sampling import SamplingParams


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
class EmbeddingInput:
    """One item's tensors, for the first ``tokens`` placeholders at or after prompt position ``start``. ``key`` is the
    item's full identity: equal keys mean equal tensors. If it is empty, nothing of the request is cached for others.
    """

    start: int
    tokens: int
    tensors: Mapping[str, Tensor]
    key: bytes = b""


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
    """Each choice pauses after its first token, as by ``KvAccess.pause``."""
    arriving: int = 0
    """Leading positions that ``KvAccess.unpack`` will bring, of each choice to run, or of those that get most: it takes
    memory for them when it starts, and computes nothing until ``arrived``."""
    lora: str = ""
    """Digest of its LoRA adapter, which the engine must have; empty without one. Prefixes are shared only between requests with the
    same."""

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
    token if ``logprobs`` were requested. ``preemptions`` counts those of the choice so far, ``cached_tokens`` the tokens that its
    prefix cache had when the choice began, if the engine tells.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    choice: int = 0
    scores: tuple[Scores, ...] = ()
    preemptions: int = 0
    cached_tokens: int = 0
