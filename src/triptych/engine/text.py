"""The text engine: continuous batching over an unmodified transformers decoder."""

import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from triptych.domain.embedding import TensorSpec
from triptych.domain.generation import FinishReason
from triptych.domain.instance import ModelInfo
from triptych.engine.attention import PACKED_ATTENTION, PackedBatch, segment
from triptych.engine.checkpoint import DTYPES, open_checkpoint
from triptych.engine.halves import PassPart
from triptych.engine.kv import KvCache, KvShape
from triptych.engine.registry import halves_of
from triptych.engine.sequence import Limits, RunningRequest, RunningSequence, accept
from triptych.engine.split import Half, load_half
from triptych.engine.tensors import TORCH_DTYPES
from triptych.errors import EngineFailure, InvalidRequest, TriptychError
from triptych.families.model_files import BadModel
from triptych.policy.batching import Prefill, plan_step
from triptych.ports import EngineOutput, EngineRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Work:
    """Compute the next ``count`` positions of a sequence that has its memory."""

    sequence: RunningSequence
    first_slot: int
    count: int

    @property
    def reaches_end(self) -> bool:
        return self.count == self.sequence.uncomputed


_Logits = npt.NDArray[np.float32]
_Result = _Logits | EngineFailure | None
"""Logits [vocabulary] for the next token; None while the prompt is not through; or why there are none."""


class TransformersTextEngine:
    """A ``TextEngine``. Reads ``model_dir`` once, at construction. Raises BadModel.

    A request reserves KV memory for its prompt and its whole answer, ``n`` times, when it starts, or waits holding
    none (first come, first served), so no sequence is ever stopped half-way for lack of memory. How many may wait is
    bounded by the caller. The prompt is computed once, whatever ``n`` is.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        model_id: str,
        kv_cache_bytes: int,
        max_sequences: int,
        token_budget: int,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
    ) -> None:
        """A step computes at most ``token_budget`` tokens of at most ``max_sequences`` sequences."""
        if not 1 <= max_sequences <= token_budget:
            raise ValueError(f"max_sequences {max_sequences} is not between 1 and the token budget {token_budget}")
        torch.set_num_threads(threads)
        checkpoint = open_checkpoint(model_dir)
        halves = halves_of(checkpoint)
        self._device = torch.device(device)
        model = load_half(checkpoint, Half.TEXT, dtype=DTYPES[dtype], device=self._device)
        self._half = halves.text(model, checkpoint)
        decoder: Any = self._half.decoder
        self._decoder = decoder
        self._embed_tokens = decoder.get_input_embeddings()
        self._model_info = checkpoint.model_info(model_id=model_id, dtype=DTYPES[dtype])
        shape = _kv_shape(self._decoder.config, TORCH_DTYPES[DTYPES[dtype]])
        self._cache = KvCache(shape, nbytes=kv_cache_bytes, device=self._device)
        self._limits = Limits(
            context_length=self._model_info.context_length,
            kv_slots=self._cache.slots,
            max_sequences=max_sequences,
            eos_ids=_eos_ids(model),
            placeholder_ids=checkpoint.family.placeholder_ids,
            vocabulary=int(self._embed_tokens.num_embeddings),
        )
        self._max_sequences = max_sequences
        self._token_budget = token_budget
        self._waiting: dict[str, RunningRequest] = {}
        self._running: dict[str, RunningRequest] = {}
        self._decoder.config._attn_implementation = PACKED_ATTENTION  # noqa: SLF001 - transformers' documented switch

    @property
    def model(self) -> ModelInfo:
        return self._model_info

    @property
    def placeholder_ids(self) -> AbstractSet[int]:
        return self._limits.placeholder_ids

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        return self._half.accepts(tokens, tensors)

    @property
    def kv_free_slots(self) -> int:
        """Tokens that the KV cache has room for now, of ``kv_slots``."""
        return self._cache.free_slots

    @property
    def kv_slots(self) -> int:
        return self._cache.slots

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def pending_tokens(self) -> int:
        return sum(request.pending_tokens for request in (*self._running.values(), *self._waiting.values()))

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Copies its tensors.

        Raises ContextTooLong or InvalidRequest for what can never run, EngineFailure for non-finite embeddings.
        """
        if request.request_id in self._running or request.request_id in self._waiting:
            raise InvalidRequest(f"request {request.request_id!r} is in the engine already")
        self._waiting[request.request_id] = accept(request, self._half, self._limits, self._device)

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """Forget a request, or one choice of it, and free its memory at once; what is unknown or over is fine."""
        requests = self._running if request_id in self._running else self._waiting
        request = requests.get(request_id)
        if request is None:
            return
        for sequence in list(request.sequences):
            if choice is None or sequence.choice == choice:
                request.sequences.remove(sequence)
                if sequence.first_slot is not None:
                    self._cache.give(sequence.first_slot)
        if not request.sequences:
            del requests[request_id]

    def step(self) -> list[EngineOutput]:
        """One pass. Tells of the choices that got a token (an end-of-sequence token included) and of what failed."""
        work = self._next_work()
        results = self._compute(work) if work else []
        outputs: list[EngineOutput] = []
        for item, result in zip(work, results, strict=True):
            if item.sequence.request_id in self._running:  # unless another choice of it has failed just now
                outputs += self._conclude(item, result)
        return outputs

    def _next_work(self) -> list[_Work]:
        running = {one.sequence_id: one for request in self._running.values() for one in request.sequences}
        leaders = [request.leader for request in self._running.values()]
        waiting = {request.leader.sequence_id: request for request in self._waiting.values()}
        plan = plan_step(
            [sequence_id for sequence_id, sequence in running.items() if sequence.generated],
            [Prefill(leader.sequence_id, leader.uncomputed) for leader in leaders if not leader.generated],
            (Prefill(sequence_id, request.leader.uncomputed) for sequence_id, request in waiting.items()),
            token_budget=self._token_budget,
            max_sequences=self._max_sequences,
        )
        work: list[_Work] = []
        for planned in (*(Prefill(sequence_id, 1) for sequence_id in plan.decodes), *plan.prefills):
            sequence = running.get(planned.request_id)
            if sequence is None and self._start(waiting[planned.request_id]):
                sequence = waiting[planned.request_id].leader
            if sequence is None or sequence.first_slot is None:
                break
            work.append(_Work(sequence, sequence.first_slot, planned.tokens))
        return work

    def _start(self, request: RunningRequest) -> bool:
        """Give a request that waits the places and the memory for all its choices, or none."""
        running = sum(len(other.sequences) for other in self._running.values())
        if running + len(request.sequences) > self._max_sequences:
            return False
        for sequence in request.sequences:
            sequence.first_slot = self._cache.take(sequence.slots)
            if sequence.first_slot is None:
                for other in request.sequences:
                    if other.first_slot is not None:
                        self._cache.give(other.first_slot)
                        other.first_slot = None
                return False
        self._running[request.request_id] = self._waiting.pop(request.request_id)
        return True

    def _compute(self, work: Sequence[_Work]) -> list[_Result]:
        """A pass over ``work``; when it fails, a pass for each, so that only the culprit fails."""
        try:
            return self._forward(work)
        except Exception:
            if len(work) > 1:
                logger.warning("a pass over %d sequences failed: running them one by one", len(work), exc_info=True)
                return [result for item in work for result in self._compute([item])]
            logger.exception("sequence %s fails", work[0].sequence.sequence_id)
            return [EngineFailure("the engine failed on this request")]

    @torch.inference_mode()
    def _forward(self, work: Sequence[_Work]) -> list[_Result]:
        ids: list[int] = []
        parts: list[PassPart] = []
        slots: list[int] = []
        segments = []
        for item in work:
            sequence, first = item.sequence, item.sequence.computed
            end = first + item.count
            segments.append(segment(len(ids), item.count, item.first_slot, first, self._device))
            parts.append(PassPart(sequence.plan, first, item.count, len(ids)))
            ids += sequence.token_ids[first:end]
            slots += range(item.first_slot + first, item.first_slot + end)
        embeds = self._embed_tokens(torch.tensor(ids, device=self._device))
        for part in parts:
            _splice(part, embeds[part.row : part.row + part.count])
        hidden = self._decoder(
            inputs_embeds=embeds[None],
            position_ids=_positions(parts, self._device),
            use_cache=False,
            **self._half.inputs(parts, len(ids)),
            packed=PackedBatch(self._cache, tuple(segments), torch.tensor(slots, device=self._device)),
        ).last_hidden_state[0]
        ends = [part.row + part.count - 1 for item, part in zip(work, segments, strict=True) if item.reaches_end]
        if not ends:
            return [None] * len(work)
        logits = iter(self._half.logits(hidden[torch.tensor(ends, device=self._device)]).float().cpu().numpy())
        return [next(logits) if item.reaches_end else None for item in work]

    def _conclude(self, work: _Work, result: _Result) -> list[EngineOutput]:
        """Advance a sequence by what was computed; the first of a request takes the others along past the prompt."""
        sequence = work.sequence
        if isinstance(result, EngineFailure):
            return [self._fail(sequence, result)]
        sequence.computed += work.count
        if result is None:
            return []
        if not np.isfinite(result).all():
            logger.error("sequence %s has logits that are not finite", sequence.sequence_id)
            return [self._fail(sequence, EngineFailure("the model's output for this request is not finite"))]
        following = [] if sequence.generated else self._running[sequence.request_id].followers
        for follower in following:
            if follower.first_slot is None:
                raise AssertionError("a follower has its memory when its leader has")
            self._cache.copy(work.first_slot, follower.first_slot, sequence.computed)
            follower.computed = sequence.computed
        outputs: list[EngineOutput] = []
        for one in (sequence, *following):
            outputs.append(self._extend(one, result))
            if outputs[-1].error is not None:
                break
        return outputs

    def _extend(self, sequence: RunningSequence, logits: _Logits) -> EngineOutput:
        """Give a sequence its next token; let it go when that was its last."""
        try:
            token, scores = sequence.sampler.choose(logits, sequence.answer, len(sequence.token_ids))
        except TriptychError as error:
            return self._fail(sequence, error)
        except Exception:
            logger.exception("no token can be chosen for sequence %s", sequence.sequence_id)
            return self._fail(sequence, EngineFailure("the engine failed on this request"))
        sequence.token_ids.append(token)
        finish_reason = None
        if sequence.sampler.is_end(token):
            finish_reason = FinishReason.STOP
        elif sequence.generated == sequence.max_tokens:
            finish_reason = FinishReason.LENGTH
        if finish_reason is not None:
            self.cancel(sequence.request_id, sequence.choice)
        return EngineOutput(
            sequence.request_id,
            (token,),
            finish_reason,
            choice=sequence.choice,
            scores=() if scores is None else (scores,),
        )

    def _fail(self, sequence: RunningSequence, error: TriptychError) -> EngineOutput:
        """Give up all choices of a request."""
        self.cancel(sequence.request_id)
        return EngineOutput(sequence.request_id, (), error=error, choice=sequence.choice)


def _splice(part: PassPart, rows: torch.Tensor) -> None:
    """Put what items bring into ``rows``, which are the part's positions."""
    for start, embeds in part.plan.rows.items():
        begin, end = max(part.first, start), min(part.first + part.count, start + len(embeds))
        if begin < end:
            rows[begin - part.first : end - part.first] = embeds[begin - start : end - start]


def _positions(parts: Sequence[PassPart], device: torch.device) -> torch.Tensor:
    """Rotary positions of a pass: [1, rows], or [axes, 1, rows] where a prompt has several axes."""
    axes = max((len(part.plan.positions) for part in parts if part.plan.positions is not None), default=1)
    columns: list[torch.Tensor] = []
    for part in parts:
        known = part.plan.positions
        prompt = 0 if known is None else known.shape[1]
        inside = max(0, min(part.count, prompt - part.first))
        if known is not None and inside:
            columns.append(known[:, part.first : part.first + inside].to(device))
        if inside < part.count:
            shift = 0 if part.plan.next_position is None else part.plan.next_position - prompt
            first = part.first + inside + shift
            columns.append(torch.arange(first, first + part.count - inside, device=device).expand(axes, -1))
    positions = torch.cat([column.expand(axes, -1) for column in columns], dim=1)
    return positions if axes == 1 else positions[:, None]


def _eos_ids(model: Any) -> frozenset[int]:
    ids = model.generation_config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _kv_shape(config: Any, dtype: torch.dtype) -> KvShape:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        raise BadModel(f"a language model with attention other than full ({sorted(kinds)}) is not supported")
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KvShape(config.num_hidden_layers, config.num_key_value_heads, head_size, dtype)
