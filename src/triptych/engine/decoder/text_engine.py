"""The text engine: continuous batching over an unmodified transformers decoder."""

import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch

from triptych.domain.embedding import TensorSpec
from triptych.domain.generation import FinishReason
from triptych.domain.instance import ModelInfo
from triptych.engine.checkpoint import DTYPES, Checkpoint, open_checkpoint
from triptych.engine.decoder.model_runner import ForwardInput, ForwardOutput, ModelRunner, Result
from triptych.engine.decoder.packed_weights import pack
from triptych.engine.decoder.sequence import AcceptedRequest, Limits, RunningSequence, accept
from triptych.engine.decoder.setup import GraphOptions, KvOptions, build_runner, measured_budget, measured_forward_s
from triptych.engine.families.adapters import CachingDecoderAdapter
from triptych.engine.families.registry import adapters_of
from triptych.engine.heap import keep_freed
from triptych.engine.weight_loading import ModelPart, load_part
from triptych.errors import EngineFailure, InvalidRequest, Overloaded, TriptychError
from triptych.machine.text.kv_blocks import KvBlocks
from triptych.machine.text.prefix_hashes import PrefixHashes
from triptych.machine.text.running_batch import BatchLimits, Part, RunningBatch, Step
from triptych.ports import EngineOutput, EngineRequest

logger = logging.getLogger(__name__)


class TransformersTextEngine:
    """A ``TextEngine``. Reads ``model_dir`` once, at construction. Raises BadModel.

    A request starts when there is KV memory for its prompt, or waits holding none (first come, first served). When
    memory runs out, the sequence that came last gives all of its own and is computed again later; its answer stays the
    same. Beginnings of prompts that are known are not computed again. How many may wait is bounded by the caller.
    """

    def __init__(
        self,
        model_dir: Path | Checkpoint,
        *,
        model_id: str,
        kv_cache_bytes: int,
        max_sequences: int,
        token_budget: int,
        tpot_slo_s: float | None = None,
        max_embedding_bytes: int = 1 << 30,
        cross_cache_bytes: int = 1 << 30,
        packed_weight_bytes: int = 2 << 30,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        enforce_eager: bool = False,
        kv: KvOptions | None = None,
    ) -> None:
        """A step computes at most ``token_budget`` tokens of at most ``max_sequences`` sequences.

        With ``tpot_slo_s`` steps are measured now, and the budget is the largest up to ``token_budget`` that leaves
        room to spare. ``max_embedding_bytes`` bounds the copies of what requests bring, ``cross_cache_bytes`` the keys and
        values of items where text attends to them in layers of its own, ``packed_weight_bytes`` the weights that are
        kept a second time on a CPU, since small batches are computed faster so. ``enforce_eager`` records no CUDA
        graphs for decoding. ``kv``: how KV memory is laid out; None is what suits the device.
        """
        if not 1 <= max_sequences <= token_budget:
            raise ValueError(f"max_sequences {max_sequences} is not between 1 and the token budget {token_budget}")
        torch.set_num_threads(threads)
        keep_freed()
        checkpoint = open_checkpoint(model_dir)
        adapters = adapters_of(checkpoint)
        self._device = torch.device(device)
        model = load_part(checkpoint, ModelPart.DECODER, dtype=DTYPES[dtype], device=self._device)
        self._adapter = adapters.decoder(model, checkpoint)
        pack(model, most_nbytes=packed_weight_bytes)
        if isinstance(self._adapter, CachingDecoderAdapter):
            self._adapter.keep_at_most(cross_cache_bytes)
        decoder: Any = self._adapter.decoder
        self._model_info = checkpoint.model_info(model_id=model_id, dtype=DTYPES[dtype])
        context_length = self._model_info.context_length
        graphs = None if enforce_eager else GraphOptions(max_sequences, context_length)
        made = build_runner(
            self._adapter, kv_cache_bytes, device=self._device, options=kv or KvOptions(), graphs=graphs
        )
        self._made = made
        self._runner: ModelRunner = made.runner
        if tpot_slo_s is not None:
            most = min(token_budget, context_length, made.blocks * made.block_tokens)
            token_budget = max(
                max_sequences,
                measured_budget(made, self._adapter, tpot_slo_s, most=most, least=min(max_sequences, most)),
            )
        self._batch = RunningBatch(
            KvBlocks(made.blocks, contiguous=made.contiguous),
            BatchLimits(
                made.block_tokens,
                token_budget,
                max_sequences,
                fixed_blocks=made.fixed_blocks,
                is_cuttable=made.is_cuttable,
            ),
        )
        self._limits = Limits(
            context_length=context_length,
            kv_blocks=made.blocks,
            block_tokens=made.block_tokens,
            blocks_for=self._batch.blocks_for,
            max_sequences=max_sequences,
            max_embedding_nbytes=max_embedding_bytes,
            eos_ids=_eos_ids(model),
            placeholder_ids=checkpoint.family.placeholder_ids,
            vocabulary=self._vocabulary(),
            embeddings=decoder.get_input_embeddings().num_embeddings,
        )
        self._sequences: dict[str, dict[int, RunningSequence]] = {}
        self._embedding_nbytes: dict[str, int] = {}

    @property
    def model(self) -> ModelInfo:
        return self._model_info

    @property
    def placeholder_ids(self) -> AbstractSet[int]:
        return self._limits.placeholder_ids

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        return self._adapter.accepts(tokens, tensors)

    @property
    def token_budget(self) -> int:
        """Most tokens that one step computes."""
        return self._batch.limits.token_budget

    @property
    def kv_free_tokens(self) -> int:
        """Tokens that the KV cache has room for now, of ``kv_tokens``; what is only kept for later counts as room."""
        return self._batch.blocks.available * self._limits.block_tokens

    @property
    def kv_tokens(self) -> int:
        return self._limits.kv_blocks * self._limits.block_tokens

    @property
    def prefix_queries_tokens(self) -> int:
        """Tokens of all requests so far whose beginning was looked up."""
        return self._batch.prefix_queries_tokens

    @property
    def prefix_hits_tokens(self) -> int:
        """... and was there, so that it was not computed."""
        return self._batch.prefix_hits_tokens

    @property
    def preemptions(self) -> int:
        """How often a sequence was put back so far, to be computed again."""
        return self._batch.preemptions

    @property
    def embedding_nbytes(self) -> int:
        """Bytes of the copies of what requests brought."""
        return sum(self._embedding_nbytes.values())

    @property
    def has_work(self) -> bool:
        return self._batch.has_work

    @property
    def prefill_ready(self) -> bool:
        return self._batch.prefill_ready

    @property
    def pending_tokens(self) -> int:
        return self._batch.pending_tokens

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Copies its tensors; they are kept to its end, since it may have to be computed again.

        Raises ContextTooLong or InvalidRequest for what can never run, Overloaded when the copies of others leave no
        room, EngineFailure for non-finite embeddings.
        """
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request {request.request_id!r} is in the engine already")
        accepted = accept(request, self._adapter, self._limits, self._device)
        if self.embedding_nbytes + accepted.nbytes > self._limits.max_embedding_nbytes:
            raise Overloaded(f"the engine holds {self.embedding_nbytes} bytes of embeddings, there is no room for more")
        first = accepted.sequences[0]
        self._batch.add(
            request.request_id,
            choices=len(accepted.sequences),
            prompt_tokens=first.prompt_length,
            max_tokens=first.max_tokens,
            bidirectional=accepted.plan.bidirectional,
            prefix_hashes=self._prefix_hashes(accepted, request.tenant_salt),
        )
        self._sequences[request.request_id] = {one.choice: one for one in accepted.sequences}
        self._embedding_nbytes[request.request_id] = accepted.nbytes

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """Forget a request, or one choice of it, and free its memory at once; what is unknown or over is fine."""
        self._remove(request_id, choice, is_sound=True)

    def _remove(self, request_id: str, choice: int | None, *, is_sound: bool) -> None:
        self._runner.drop(self._batch.remove(request_id, choice, is_sound=is_sound))
        left = self._batch.choices(request_id)
        sequences = self._sequences.get(request_id, {})
        for gone in set(sequences).difference(left):
            del sequences[gone]
        if not sequences:
            self._sequences.pop(request_id, None)
            self._embedding_nbytes.pop(request_id, None)

    def full_decode_s(self) -> float:
        """How long a step of as many sequences takes as can run, measured now: to be asked before the first request."""
        return measured_forward_s(self._made, self._adapter, min(self._batch.limits.max_sequences, self.kv_tokens))

    def decode_step(self) -> list[EngineOutput]:
        """As ``step``, of what decodes alone: prompts wait."""
        return self._run(self._batch.plan(prefill=False))

    def step(self) -> list[EngineOutput]:
        """One pass. Tells of the choices that got a token (an end-of-sequence token included) and of what failed."""
        return self._run(self._batch.plan())

    def _run(self, step: Step) -> list[EngineOutput]:
        self._runner.drop(step.preempted)
        self._runner.copy(step.copies)
        if not step.parts:
            return []
        sequences = [self._sequences[part.request_id][part.choice] for part in step.parts]
        work = [self._work(part, one) for part, one in zip(step.parts, sequences, strict=True)]
        outputs: list[EngineOutput] = []
        for part, one, result in zip(step.parts, sequences, self._runner.run(work), strict=True):
            if part.request_id in self._sequences:  # unless another choice of it has failed just now
                outputs += self._conclude(part, one, result)
        return outputs

    @torch.inference_mode()
    def _vocabulary(self) -> int:
        """Tokens that the head tells apart: there may be fewer than the embeddings have."""
        nothing = torch.zeros(1, self._model_info.hidden_size, dtype=self._adapter.decoder.dtype, device=self._device)
        return int(self._adapter.logits(nothing).shape[1])

    def _work(self, part: Part, one: RunningSequence) -> ForwardInput:
        name = one.sequence_id
        return ForwardInput(
            name,
            one.token_ids[part.first : part.first + part.count],
            one.plan,
            part.first,
            self._batch.blocks.table(name),
            self._batch.blocks.is_contiguous(name),
            part.reaches_end,
            wants_logits=not one.sampler.is_plain or len(self._batch.choices(part.request_id)) > 1,
        )

    def _conclude(self, part: Part, one: RunningSequence, result: Result) -> list[EngineOutput]:
        """Advance a sequence by what was computed; the first of a request takes the others along past the prompt."""
        if isinstance(result, EngineFailure):
            return [self._fail(one, result)]
        self._batch.advance(part.request_id, part.choice, part.count)
        if result is None:
            return []
        if not result.is_finite:
            logger.error("sequence %s has logits that are not finite", one.sequence_id)
            return [self._fail(one, EngineFailure("the model's output for this request is not finite"))]
        others, copies = self._batch.fork(part.request_id, part.choice)
        following = [self._sequences[part.request_id][choice] for choice in others]
        self._runner.copy(copies)
        self._runner.fork(one.sequence_id, [other.sequence_id for other in following])
        outputs: list[EngineOutput] = []
        for each in (one, *following):
            outputs.append(self._extend(each, result))
            if outputs[-1].error is not None:
                break
        return outputs

    def _extend(self, one: RunningSequence, outcome: ForwardOutput) -> EngineOutput:
        """Give a sequence its next token; let it go when that was its last."""
        scores = None
        try:
            token = outcome.likeliest
            if not one.sampler.is_plain:
                if outcome.logits is None:
                    raise AssertionError("logits were wanted")  # noqa: TRY301 - ends the request, as any defect here
                token, scores = one.sampler.choose(outcome.logits, one.answer, len(one.token_ids))
        except TriptychError as error:
            return self._fail(one, error)
        except Exception:
            logger.exception("no token can be chosen for sequence %s", one.sequence_id)
            return self._fail(one, EngineFailure("the engine failed on this request"))
        one.token_ids.append(token)
        self._batch.extend(one.request_id, one.choice, token)
        finish_reason = None
        if one.sampler.is_end(token):
            finish_reason = FinishReason.STOP
        elif one.generated == one.max_tokens:
            finish_reason = FinishReason.LENGTH
        if finish_reason is not None:
            self.cancel(one.request_id, one.choice)
        return EngineOutput(
            one.request_id,
            (token,),
            finish_reason,
            choice=one.choice,
            scores=() if scores is None else (scores,),
        )

    def _fail(self, one: RunningSequence, error: TriptychError) -> EngineOutput:
        """Give up all choices of a request; nobody is to make use of what was computed of it."""
        self._remove(one.request_id, None, is_sound=False)
        return EngineOutput(one.request_id, (), error=error, choice=one.choice)

    def _prefix_hashes(self, accepted: AcceptedRequest, salt: bytes) -> PrefixHashes | None:
        """What the prompt is, where that is known of all its items."""
        if accepted.items is None or not self._batch.shares_beginnings:
            return None
        if accepted.plan.looks_ahead:
            salt = b"".join((salt, *(b"%d:" % len(item.key) + item.key for item in accepted.items)))
        return PrefixHashes(self._limits.block_tokens, accepted.sequences[0].token_ids, accepted.items, salt=salt)


def _eos_ids(model: Any) -> frozenset[int]:
    ids = model.generation_config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
