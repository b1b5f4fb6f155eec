"""The text engine: continuous batching over an unmodified transformers decoder."""

import logging
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from triptych.domain.embedding import TensorSpec
from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.domain.generation import FinishReason
from triptych.domain.instance import ModelInfo
from triptych.domain.kv_segment import KvCopies
from triptych.domain.lora import LoraLimits
from triptych.domain.queue_position import QueuePosition
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import DTYPES, Checkpoint, open_checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.engine.decoder.cuda_graphs import GraphOptions
from triptych.engine.decoder.kv_access import BatchKvAccess, BlockKvAccess
from triptych.engine.decoder.kv_mover import KvMover
from triptych.engine.decoder.model_runner import ForwardInput, ForwardOutput, ModelRunner
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.decoder.packed_runner import PackedModelRunner
from triptych.engine.decoder.sampling import Sampled, sample
from triptych.engine.decoder.sequence import EngineSequence, Limits, accept
from triptych.engine.decoder.sequence_states import StateAccess, UnknownState
from triptych.engine.decoder.setup import DecoderSetup, KvOptions, build_runner
from triptych.engine.families.adapters import CachingDecoderAdapter, UnprovenDecoderAdapter
from triptych.engine.families.item_processor import ItemProcessor
from triptych.engine.families.registry import adapters_of
from triptych.engine.fastest_products import choose_products, load_copies, unload_copies
from triptych.engine.heap import trim
from triptych.engine.lora import LoraLayers
from triptych.engine.measuring import TextProbe
from triptych.engine.part_weights import PartWeights
from triptych.engine.prefill_budget import PrefillBudget, measured_budget
from triptych.engine.request_checks import PromptLimits
from triptych.engine.torch_process import prepare_torch
from triptych.engine.weight_loading import base_of, encoder_names, load_part
from triptych.engine.worker_threads import WorkerThreads
from triptych.errors import EngineFailure, InvalidRequest, Overloaded, TriptychError
from triptych.families.model_files import BadModel
from triptych.machine.text.host_copies import HostCopies
from triptych.machine.text.kept_states import StateIn
from triptych.machine.text.kv_blocks import KvBlocks
from triptych.machine.text.running_batch import Move, RunningBatch, Step, StepLimits, StepPart
from triptych.policy.batching import MEASURED_SHARE, largest_within

logger = logging.getLogger(__name__)

_MOST_DEFAULT_COPIES_NBYTES = 4 << 30
_MEASURED_TOKENS = 64
"""Copies of so many tokens are compared with computing them; both take about proportionally longer for more."""


class TransformersTextEngine:
    """``ports.TextEngine`` and ``ports.DeviceSharing``. Reads ``model_dir`` once, at construction. Raises BadModel.

    A request starts when there is KV memory for its prompt; until then it waits holding none, in turn. When memory runs
    out, the latest sequence is preempted: it frees its memory, and goes on later with the same answer, from a copy in host
    memory if there is room for one, else recomputed. Cached prefixes are not recomputed. The caller bounds the number of
    waiting requests.
    """

    def __init__(
        self,
        model_dir: Path | Checkpoint,
        options: EngineOptions,
        *,
        model_id: str,
        max_embedding_bytes: int,
        compute: ComputeOptions,
        kv: KvOptions | None = None,
        loras: LoraLimits | None = None,
        can_unload: bool = False,
    ) -> None:
        """Steps are measured where ``options`` leave the token budget open. ``max_embedding_bytes`` bounds the copies of requests' embeddings.

        ``kv``: layout of KV memory; None is the device's default. With ``can_unload`` its ``weights`` can leave the memory and come
        back, which is tried now.
        """
        max_sequences = options.max_sequences
        prepare_torch(compute)
        checkpoint = open_checkpoint(model_dir, ItemProcessor)
        adapters = adapters_of(checkpoint)
        self._device = torch.device(compute.device)
        model = load_part(checkpoint, ModelPart.DECODER, dtype=DTYPES[compute.dtype], device=self._device)
        self.module = model
        """The part as a module of torch."""
        self.weights_nbytes = sum(parameter.nbytes for parameter in model.parameters())
        """Bytes of the part's weights as loaded, without packed copies."""
        self.weights = PartWeights(model, checkpoint) if can_unload else None
        self._adapter = adapters.decoder(model, checkpoint)
        if isinstance(self._adapter, CachingDecoderAdapter):
            self._adapter.keep_at_most(options.cross_cache_bytes)
        decoder: Any = self._adapter.decoder
        self._model_info = checkpoint.model_info(model_id=model_id, dtype=DTYPES[compute.dtype])
        context_length = self._model_info.context_length
        setup, computing = self._set_up(model, options, compute, kv or KvOptions(), checkpoint.family.placeholder_ids)
        self._captured_at = None if self.weights is None else self.weights.address
        self._made = setup
        self._runner: ModelRunner = setup.runner
        encoders = encoder_names(base_of(model))
        if isinstance(self._adapter, UnprovenDecoderAdapter):
            encoders -= self._adapter.embedding_parts
        self.loras = self._runner.loras = LoraLayers(decoder, loras or LoraLimits(), encoders=encoders)
        self._mover = KvMover(setup.cache) if setup.cache is not None else None
        self._batch = self._new_batch(PrefillBudget(options.most_step_tokens), max_sequences)
        self._limits = Limits(
            PromptLimits(
                context_length=context_length,
                vocabulary=self._vocabulary(),
                embeddings=decoder.get_input_embeddings().num_embeddings,
                placeholder_ids=checkpoint.family.placeholder_ids,
                max_embedding_nbytes=max_embedding_bytes,
            ),
            kv_blocks=setup.blocks,
            block_tokens=setup.block_tokens,
            blocks_for=self._batch.blocks_for,
            max_sequences=max_sequences,
            hashed_tokens=self._batch.hashed_tokens if self._batch.shares_prefixes else None,
            eos_ids=_eos_ids(model),
        )
        self.finds_prefixes = self._batch.shares_prefixes and not self._adapter.looks_ahead
        self._embedding_nbytes: dict[str, int] = {}
        self.most_tokens = options.most_step_tokens
        captured = isinstance(setup.runner, PackedModelRunner) and setup.runner.graphs is not None
        self.most_sequences = max_sequences if captured else max(max_sequences, min(self.most_tokens, setup.blocks))
        budget = self._chosen_budget(options)
        copies = self._host_copies(options)
        self._batch = self._new_batch(budget, max_sequences, copies)  # with an empty prefix cache
        self.kv = self._kv_access()
        if self.weights is not None:
            self.weights.also(
                load=partial(load_copies, computing),
                unload=partial(self._give_back, computing),
                before_unload=self._before_unload,
                after_load=self._after_load,
            )
            self.weights.measure()
            self._after_load()

    def _set_up(
        self,
        model: nn.Module,
        options: EngineOptions,
        compute: ComputeOptions,
        kv: KvOptions,
        placeholder_ids: AbstractSet[int],
    ) -> tuple[DecoderSetup, nn.Module]:
        """What runs the passes, with the fastest products chosen, and all modules that compute in it. Raises BadModel."""
        threads = None if options.enforce_eager else _kernel_threads(compute)
        graphs = None
        if not options.enforce_eager:
            graphs = GraphOptions(
                options.max_sequences,
                self._model_info.context_length,
                options.most_step_tokens,
                options.compile_passes,
            )
        setup = build_runner(
            self._adapter,
            options.kv_cache_bytes,
            device=self._device,
            options=kv,
            model_revision=self._model_info.revision,
            graphs=graphs,
            threads=threads,
            placeholder_ids=placeholder_ids,
        )
        computing = nn.ModuleList([model, *setup.joined])
        choose_products(
            computing,
            most_packed_nbytes=compute.packed_weight_bytes,
            without=[layer for joined in setup.joined for layer in joined.parts],
            threads=threads,
        )
        if setup.cache is None and options.preempted_kv_bytes:
            kinds = sorted(set(self._adapter.decoder.config.layer_types))
            raise BadModel(
                f"preempted_kv_bytes is {options.preempted_kv_bytes}: layers of the kinds {kinds} have state outside of KV blocks,"
                " which is not copied to host memory"
            )
        return setup, computing

    def _give_back(self, computing: nn.Module) -> None:
        """Give back what else is in memory for the language model."""
        unload_copies(computing)
        if self._mover is not None:
            self._mover.give_back()

    def _before_unload(self) -> None:
        """Forget cached prefixes. Raises EngineFailure if there are requests."""
        if self._batch.has_work:
            raise EngineFailure("the language model is in use")
        self._batch.blocks.evict_cached()
        if self._batch.kept is not None:
            self._batch.kept.shrink(0)
            trim()

    def _after_load(self) -> None:
        """Capture CUDA graphs again if the weights are elsewhere now."""
        if self.weights is not None and self.weights.address != self._captured_at:
            self._captured_at = self.weights.address
            self._runner.weights_moved()

    def _host_copies(self, options: EngineOptions) -> HostCopies | None:
        """Host memory for preempted sequences; None if there is to be none, or copies would take longer than recomputation."""
        nbytes = options.preempted_kv_bytes
        if nbytes is None:
            nbytes = min(options.kv_cache_bytes, _MOST_DEFAULT_COPIES_NBYTES)
        if self._mover is None or not nbytes:
            return None
        tokens = min(_MEASURED_TOKENS, self._longest - 1)
        copies_s, computes_s = self._mover.round_trip_s(tokens), self._prefill_s(TextProbe(self), tokens)
        if copies_s >= computes_s:
            logger.info(
                "preempted sequences are recomputed: %d tokens take %.3g s, to copy them out and back %.3g s",
                tokens,
                computes_s,
                copies_s,
            )
            return None
        self._mover.reserve(nbytes)
        return HostCopies(self._mover.cache.kind, nbytes)

    def _kv_access(self) -> BatchKvAccess | None:
        if self._mover is not None:
            return BlockKvAccess(self._batch, self._mover)
        states = self._made.states
        return None if states is None else StateAccess(self._batch, states)

    def _new_batch(
        self, budget: PrefillBudget, max_sequences: int, copies: HostCopies | None = None
    ) -> RunningBatch[EngineSequence]:
        setup = self._made
        return RunningBatch(
            KvBlocks(setup.blocks, contiguous=setup.contiguous),
            StepLimits(
                setup.block_tokens,
                max(max_sequences, budget.tokens),
                max_sequences,
                fixed_blocks=setup.fixed_blocks,
                supports_chunked_prefill=setup.supports_chunked_prefill,
                beside_decodes=budget.beside_decodes,
            ),
            copies,
            None if self._made.keep_states is None else self._made.keep_states(),
        )

    def _chosen_budget(self, options: EngineOptions) -> PrefillBudget:
        """Budget of prompt tokens that one step computes within the objective (HydraInfer section 4.2), with a margin.
        Without an objective it is as many as are worth computing together, and fewer beside answers.
        """
        most = min(options.most_step_tokens, self._longest - 1)
        if options.tpot_slo_s is not None:
            least = min(options.max_sequences, most)
            prefill_s = partial(self._prefill_s, TextProbe(self))
            prefill_s(least)
            return PrefillBudget(largest_within(MEASURED_SHARE * options.tpot_slo_s, most, prefill_s, least=least))
        if options.token_budget is not None or self._device.type != "cpu" or not self._made.supports_chunked_prefill:
            return PrefillBudget(options.most_step_tokens)
        budget = measured_budget(TextProbe(self), most=options.most_step_tokens, longest_prompt=most)
        logger.info(
            "a step computes up to %d tokens of prompts, %s beside answers", budget.tokens, budget.beside_decodes
        )
        return budget

    def _prefill_s(self, probe: TextProbe, tokens: int) -> float:
        return min(probe.prefill_s(tokens) or inf for _ in range(2))

    @property
    def _longest(self) -> int:
        """Most tokens of a sequence."""
        setup = self._made
        return min(self._model_info.context_length, (setup.blocks - setup.fixed_blocks) * setup.block_tokens)

    @property
    def model(self) -> ModelInfo:
        return self._model_info

    @property
    def sharing(self) -> Self:
        return self

    @property
    def placeholder_ids(self) -> AbstractSet[int]:
        return self._limits.request.placeholder_ids

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        return self._adapter.accepts(tokens, tensors)

    @property
    def steps(self) -> Self:
        return self

    @property
    def max_sequences(self) -> int:
        return self._batch.limits.max_sequences

    @property
    def token_budget(self) -> int:
        return self._batch.limits.token_budget

    def limit_steps(self, max_sequences: int, token_budget: int) -> None:
        self._batch.limit(max_sequences, token_budget)

    @property
    def kv_free_tokens(self) -> int:
        """Free tokens in the KV cache, of ``kv_tokens``; cached prefixes that no sequence uses count as free."""
        return self._batch.blocks.available * self._limits.block_tokens

    @property
    def kv_tokens(self) -> int:
        return self._limits.kv_blocks * self._limits.block_tokens

    @property
    def kv_block_tokens(self) -> int:
        return self._limits.block_tokens

    @property
    def prefix_queries_tokens(self) -> int:
        """Prompt tokens looked up in the prefix cache so far."""
        return self._batch.prefix_queries_tokens

    @property
    def prefix_hits_tokens(self) -> int:
        """Prompt tokens found in the prefix cache so far."""
        return self._batch.prefix_hits_tokens

    @property
    def preemptions(self) -> int:
        """Preemptions so far."""
        return self._batch.preemptions

    @property
    def kv_copies(self) -> KvCopies:
        """Copies of preempted sequences in host memory."""
        return self._batch.copies.stats if self._batch.copies is not None else KvCopies()

    @property
    def embedding_nbytes(self) -> int:
        """Bytes of the copies of requests' embeddings."""
        return sum(self._embedding_nbytes.values())

    @property
    def has_work(self) -> bool:
        return self._batch.has_work

    @property
    def can_step(self) -> bool:
        return self._batch.can_step

    @property
    def prefill_queue_position(self) -> QueuePosition | None:
        return self._batch.prefill_queue_position

    @property
    def waiting(self) -> frozenset[str]:
        return self._batch.waiting

    @property
    def pending_tokens(self) -> int:
        return self._batch.pending_tokens

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Copies its tensors and keeps them to its end, since it may have to be recomputed.

        Raises ContextTooLong or InvalidRequest for what can never run, Overloaded when the other requests' copies leave
        no room, EngineFailure for non-finite embeddings.
        """
        if self.weights is not None and not self.weights.resident:
            raise EngineFailure("the language model is not loaded")
        if request.request_id in self._batch:
            raise InvalidRequest(f"request {request.request_id!r} is in the engine already")
        if request.lora and request.lora not in self.loras.digests:
            raise InvalidRequest("the LoRA adapter of the request is not loaded")
        sequences, nbytes = accept(request, self._adapter, self._limits, self._device)
        if self.embedding_nbytes + nbytes > self._limits.request.max_embedding_nbytes:
            raise Overloaded(f"the engine holds {self.embedding_nbytes} bytes of embeddings, there is no room for more")
        self._batch.add(sequences)
        self._embedding_nbytes[request.request_id] = nbytes

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """Cancel a request, or one choice of it, and free its memory at once; unknown or finished ones are ignored."""
        self._remove(request_id, choice, is_sound=True)

    def _remove(self, request_id: str, choice: int | None, *, is_sound: bool) -> None:
        self._drop(self._batch.remove(request_id, choice, is_sound=is_sound))
        if request_id not in self._batch:
            self._embedding_nbytes.pop(request_id, None)

    def _drop(self, sequences: Iterable[EngineSequence]) -> None:
        self._runner.drop([sequence.sequence_id for sequence in sequences])

    def full_decode_s(self) -> float:
        """Duration of a decode step of as many sequences as run at once, measured now: call before the first request."""
        probe, batch = TextProbe(self), self._limits.max_sequences
        while (steps_s := probe.decode_s(batch, 1, steps=2)) is None and batch > 1:
            batch //= 2
        return min(steps_s or [0.0])

    def reorder(self, request_id: str, queue_position: QueuePosition) -> None:
        """Give a request that has not begun another queue position."""
        self._batch.reorder(request_id, queue_position)

    # --- steps -------------------------------------------------------------------------------------------------------

    def decode_step(self) -> list[EngineOutput]:
        """Run a step like ``step``, but for decoding sequences only: prompts wait."""
        return self._run(self._batch.plan(prefill=False))

    def step(self) -> list[EngineOutput]:
        """Run one pass. Returns the choices that got a token (end-of-sequence tokens included) and the failures."""
        return self._run(self._batch.plan())

    def _run(self, step: Step[EngineSequence]) -> list[EngineOutput]:
        self._drop(step.preempted)
        lost = self._move(step.moves)
        self._batch.lose_states(lost)
        parts = [part for part in step.parts if part.sequence.sequence_id not in lost]
        if not parts:
            return []
        results = self._runner.run([self._forward_input(part) for part in parts])
        outputs: list[EngineOutput] = []
        extended: list[tuple[EngineSequence, ForwardOutput]] = []
        for part, result in zip(parts, results, strict=True):
            if part.sequence.request_id not in self._batch:
                continue  # another choice of it has failed just now
            if isinstance(result, EngineFailure):
                outputs.append(self._fail(part.sequence, result))
                continue
            self._batch.advance(part.sequence, part.count)
            self._keep_state(part.sequence)
            if result is not None and result.is_finite:
                extended += [(sequence, result) for sequence in self._fork(part.sequence)]
            elif result is not None:
                logger.error("sequence %s has logits that are not finite", part.sequence.sequence_id)
                error = EngineFailure("the model's output for this request is not finite")
                outputs.append(self._fail(part.sequence, error))
        for (sequence, _), token in zip(extended, self._sample(extended), strict=True):
            if sequence.request_id in self._batch:
                outputs.append(self._extend(sequence, token))
        return outputs

    def _move(self, moves: Iterable[Move]) -> set[str]:
        """Returns the ids of the sequences that have not got their states."""
        if self._mover is not None:
            self._mover.run(moves)
            return set()
        return {move.sequence_id for move in moves if isinstance(move, StateIn) and not self._load_state(move)}

    def _load_state(self, move: StateIn) -> bool:
        try:
            if self._made.states is not None and self._made.states.load(
                move.sequence_id, move.positions, memoryview(move.memory)
            ):
                return True
            logger.error("sequence %s is computed whole: its state is of another kind", move.sequence_id)
        except Exception:
            logger.exception("sequence %s is computed whole: its state cannot be copied", move.sequence_id)
        return False

    def _keep_state(self, sequence: EngineSequence) -> None:
        """Keep a sequence's state, if it is to be found by others."""
        states, kept = self._made.states, self._batch.kept
        if states is None or kept is None or (memory := self._batch.take_border(sequence)) is None:
            return
        try:
            states.export(sequence.sequence_id, sequence.computed, memoryview(memory))
        except UnknownState:
            logger.exception(
                "no states are kept any more: that of sequence %s is another than at start", sequence.sequence_id
            )
            kept.stop()
        except Exception:
            logger.exception("the state of sequence %s cannot be kept", sequence.sequence_id)
            self._batch.discard_states(sequence)

    @torch.inference_mode()
    def _vocabulary(self) -> int:
        """Size of the head's output, which may be smaller than the number of embeddings."""
        nothing = torch.zeros(1, self._model_info.hidden_size, dtype=self._adapter.decoder.dtype, device=self._device)
        return int(self._adapter.logits(nothing).shape[1])

    def _forward_input(self, part: StepPart[EngineSequence]) -> ForwardInput:
        sequence = part.sequence
        return ForwardInput(
            sequence.sequence_id,
            sequence.token_ids[part.first : part.first + part.count],
            sequence.plan,
            part.first,
            self._batch.blocks.table(sequence.sequence_id),
            self._batch.blocks.is_contiguous(sequence.sequence_id),
            part.reaches_end,
            wants_logits=not sequence.takes_argmax or bool(sequence.followers),
            lora=sequence.lora,
        )

    def _fork(self, leader: EngineSequence) -> list[EngineSequence]:
        """A sequence that gets its next token, and the choices that start from its prompt."""
        followers, copies = self._batch.fork(leader)
        self._move(copies)
        self._runner.fork(leader.sequence_id, [follower.sequence_id for follower in followers])
        return [leader, *followers]

    @torch.inference_mode()
    def _sample(self, extended: Sequence[tuple[EngineSequence, ForwardOutput]]) -> list[Sampled | Exception]:
        """The next token of each: the argmax from the pass, or sampled in one batch."""
        tokens: list[Sampled | Exception] = [Sampled(output.argmax) for _, output in extended]
        rows, logits = list[int](), list[torch.Tensor]()
        for row, (sequence, output) in enumerate(extended):
            if output.logits is not None and not sequence.takes_argmax:
                rows.append(row)
                logits.append(output.logits)
        if rows:
            sampled = self._sample_batch([extended[row][0] for row in rows], logits)
            for row, token in zip(rows, sampled, strict=True):
                tokens[row] = token
        return tokens

    def _sample_batch(
        self, sequences: Sequence[EngineSequence], logits: Sequence[torch.Tensor]
    ) -> list[Sampled | Exception]:
        """Sample one batch. If it fails, sample row by row, so that only the culprit fails."""
        try:
            return sample(torch.stack(list(logits)), sequences)
        except Exception as error:
            if len(sequences) == 1:
                return [error]
            logger.warning("sampling %d sequences failed: trying them one by one", len(sequences), exc_info=True)
            return [
                token
                for sequence, row in zip(sequences, logits, strict=True)
                for token in self._sample_batch([sequence], [row])
            ]

    def _extend(self, sequence: EngineSequence, token: Sampled | Exception) -> EngineOutput:
        """Append a sequence's next token; remove the sequence if it was the last."""
        if isinstance(token, TriptychError):
            return self._fail(sequence, token)
        if isinstance(token, Exception):
            logger.error("no token can be chosen for sequence %s", sequence.sequence_id, exc_info=token)
            return self._fail(sequence, EngineFailure("the engine failed on this request"))
        sequence.append(token.token_id)
        finish_reason = None
        if token.token_id in sequence.end_ids:
            finish_reason = FinishReason.STOP
        elif sequence.generated == sequence.max_tokens:
            finish_reason = FinishReason.LENGTH
        if finish_reason is not None:
            self.cancel(sequence.request_id, sequence.choice)
        return EngineOutput(
            sequence.request_id,
            (token.token_id,),
            finish_reason,
            choice=sequence.choice,
            scores=() if token.scores is None else (token.scores,),
            preemptions=sequence.preemptions,
            cached_tokens=sequence.cached or 0,
        )

    def _fail(self, sequence: EngineSequence, error: TriptychError) -> EngineOutput:
        """Fail all choices of a request; its blocks do not enter the prefix cache."""
        self._remove(sequence.request_id, None, is_sound=False)
        return EngineOutput(sequence.request_id, (), error=error, choice=sequence.choice)


def _kernel_threads(compute: ComputeOptions) -> WorkerThreads | None:
    """Threads for compiled kernels; None where there are none."""
    if torch.device(compute.device).type != "cpu" or compute.dtype != "float32":
        return None
    try:
        from triptych.engine import cpu_kernels, prompt_kernel  # takes a second, and other devices need no numba

        cpu_kernels.prepare()
        prompt_kernel.prepare()
    except (ImportError, OSError) as error:
        logger.warning("nothing is compiled for the processor: %s", error)
        return None
    return WorkerThreads(compute.torch_threads)


def _eos_ids(model: Any) -> frozenset[int]:
    ids = model.generation_config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
