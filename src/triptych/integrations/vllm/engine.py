"""The text engine of vLLM, in this process and in the engine's thread (ADR 28)."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any

from prometheus_client.core import Metric
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import RequestStatus

from triptych.domain.embedding import TensorSpec
from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.domain.generation import FinishReason
from triptych.domain.instance import ModelInfo
from triptych.domain.kv_segment import KvCopies
from triptych.domain.queue_position import QueuePosition
from triptych.domain.reasons import reason_of
from triptych.engine.checkpoint import DTYPES, Checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.engine.request_checks import PromptLimits, check_request
from triptych.engine.torch_process import prepare_torch
from triptych.errors import EngineFailure, InstanceLost, InvalidRequest, Overloaded, TriptychError
from triptych.integrations.vllm.choices import Choice, Choices
from triptych.integrations.vllm.connector import TriptychConnector
from triptych.integrations.vllm.families import check_served
from triptych.integrations.vllm.features import Features, ItemForm, PlacedItem
from triptych.integrations.vllm.grammars import ConstrainedChoice, Grammars
from triptych.integrations.vllm.kv_access import VllmKvAccess
from triptych.integrations.vllm.kv_cache import VllmKvCache
from triptych.integrations.vllm.sampling import scores, vllm_params
from triptych.integrations.vllm.starting import start
from triptych.integrations.vllm.statistics import vllm_metrics
from triptych.machine.text.prefix_hashes import KeyedItem, PrefixHashes
from triptych.runtime.clock import unix_s
from triptych.runtime.process import CannotStart

logger = logging.getLogger(__name__)

_STARTED = frozenset({RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS})
_REASONS: Mapping[str, FinishReason] = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class VllmTextEngine:
    """``ports.TextEngine`` over vLLM's engine. Raises BadModel and CannotStart at construction.

    Items are copied to the memory of the host when a request is added, and held until it ends, as vLLM may preempt it and
    compute it again. vLLM's encoder cache holds them besides, for later requests with the same items.
    """

    sharing = None
    steps = None
    weights = None
    loras = None

    def __init__(
        self,
        checkpoint: Checkpoint,
        arguments: str,
        *,
        model_id: str,
        max_embedding_bytes: int,
        compute: ComputeOptions,
        transfers_kv: bool = False,
    ) -> None:
        """``arguments`` is a command line of vLLM's engine arguments. ``transfers_kv``: its keys and values can be copied out and in."""
        dtype = DTYPES[compute.dtype]
        check_served(checkpoint.files.model_type, checkpoint.architecture)
        self._model_info = checkpoint.model_info(model_id=model_id, dtype=dtype)
        prepare_torch(compute)
        self._started = started = start(
            arguments, checkpoint, model_id=model_id, compute=compute, transfers_kv=transfers_kv
        )
        self._engine, self._totals, self._eos_ids = started.engine, started.totals, started.eos_ids
        self.identity = started.identity
        core: Any = self._engine.engine_core
        self._scheduler: Any = core.engine_core.scheduler
        connector = self._scheduler.get_ec_connector()
        assert isinstance(connector, TriptychConnector)  # by the arguments
        self._items = connector.items
        model: Any = started.config.model_config
        vocabulary = int(model.get_vocab_size())
        self._limits = PromptLimits(
            context_length=int(model.max_model_len),
            vocabulary=vocabulary,
            embeddings=vocabulary,
            placeholder_ids=checkpoint.family.placeholder_ids,
            max_embedding_nbytes=max_embedding_bytes,
        )
        cache = self._scheduler.encoder_cache_manager.cache_size
        self._form = ItemForm.of_model(self._model_info.hidden_size, dtype, model.hf_config)
        self._features = Features(
            self._form,
            checkpoint.family,
            model.hf_config,
            largest_item=min(self._scheduler.max_num_encoder_input_tokens, cache),
            find_fault=self._position_fault if model.uses_mrope else None,
        )
        if model.is_mm_prefix_lm and current_platform.is_cpu():
            logger.warning("on a CPU, vLLM's attention within an image is causal: answers differ from those on a GPU")
        self._grammars = Grammars(started.config, vocabulary)
        core.engine_core.structured_output_manager.backend = self._grammars
        self._choices = Choices()
        self._nbytes: dict[str, int] = {}
        self.kv = self._kv_access(dtype=compute.dtype) if transfers_kv else None
        self._has_failed = False
        self._on_lost: Callable[[], None] = _nothing
        executor: Any = self._engine.model_executor
        executor.register_failure_callback(self._lose)

    def _kv_access(self, dtype: str) -> VllmKvAccess:
        """Raises CannotStart if the cache's blocks cannot be copied."""
        try:
            cache = VllmKvCache(
                self._started.config,
                self._scheduler.kv_cache_config,
                model_revision=self._model_info.revision,
                dtype=dtype,
            )
        except CannotStart:
            self.close()
            raise
        return VllmKvAccess(self._engine, self._scheduler, cache, self._choices)

    def when_lost(self, call: Callable[[], None]) -> None:
        """Set what is called, in a thread of vLLM, when one of its workers has ended: the next step raises InstanceLost."""
        self._on_lost = call
        if self._has_failed:
            call()

    def _lose(self) -> None:
        self._has_failed = True
        self._on_lost()

    def close(self) -> None:
        """End vLLM's workers and free its memory. The engine must not be used afterwards."""
        self._started.close()

    # --- what it is --------------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo:
        return self._model_info

    @property
    def max_sequences(self) -> int:
        """Most sequences in one step."""
        return int(self._scheduler.max_num_active_reqs)

    @property
    def token_budget(self) -> int:
        """Most tokens of one step."""
        return int(self._scheduler.max_num_scheduled_tokens)

    @property
    def kv_token_nbytes(self) -> int:
        """KV memory per token, of all workers and layers."""
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        nbytes = sum(
            group.kv_cache_spec.page_size_bytes * len(group.layer_names) // group.kv_cache_spec.block_size
            for group in groups
        )
        return int(nbytes) * self.identity.tensor_parallel

    @property
    def caches_prefixes(self) -> bool:
        """Whether a prompt's whole blocks are found again."""
        return bool(self._started.config.cache_config.enable_prefix_caching)

    @property
    def placeholder_ids(self) -> AbstractSet[int]:
        return self._limits.placeholder_ids

    @property
    def kv_tokens(self) -> int:
        """The capacity of KV memory, or vLLM's ``max_model_len`` if that is below the model's context."""
        longest = self._limits.context_length
        return longest if longest < self._model_info.context_length else self._kv_capacity

    @property
    def kv_block_tokens(self) -> int:
        return self._block_tokens

    @property
    def _kv_capacity(self) -> int:
        return int(self._pool.num_gpu_blocks - 1) * self._block_tokens  # one block is vLLM's own

    @property
    def _pool(self) -> Any:
        return self._scheduler.kv_cache_manager.block_pool

    @property
    def _block_tokens(self) -> int:
        return int(self._scheduler.block_size)

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        return self._form.accepts(tokens, tensors)

    # --- load --------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._choices.by_name)

    @property
    def can_step(self) -> bool:
        if (kv := self.kv) is None:
            return self.has_work
        waits = len(self._choices.paused) + len(kv.connector.arriving)
        return len(self._choices.by_name) > waits or (self.has_work and kv.connector.has_news)

    @property
    def waiting(self) -> AbstractSet[str]:
        return {
            request_id
            for request_id, choices in self._choices.by_request.items()
            if not any(map(self._has_started, choices.values()))
        }

    def _has_started(self, choice: Choice) -> bool:
        request = self._scheduler.requests.get(choice.vllm_id)
        return choice.name in self._choices.paused or (request is not None and request.status in _STARTED)

    @property
    def pending_tokens(self) -> int:
        pending = 0
        for choice in self._choices.by_name.values():
            request = self._scheduler.requests.get(choice.vllm_id)
            if request is not None and choice.name not in self._choices.paused:
                pending += max(0, request.num_prompt_tokens - request.num_computed_tokens)
                pending += request.max_tokens - request.num_output_tokens
        return pending

    @property
    def kv_free_tokens(self) -> int:
        """Free tokens of ``kv_tokens``; cached prefixes that no sequence uses count as free."""
        free = self._pool.get_num_free_blocks() * self._block_tokens / self._kv_capacity
        return int(free * self.kv_tokens)

    @property
    def prefix_queries_tokens(self) -> int:
        return self._totals.prefix_queries_tokens

    @property
    def prefix_hits_tokens(self) -> int:
        return self._totals.prefix_hits_tokens

    @property
    def preemptions(self) -> int:
        return self._totals.preemptions

    @property
    def finds_prefixes(self) -> bool:
        """Whether the engine finds prefixes of prompts. Its prefix cache may be off, and finds what its own blocks end
        with: routers send it whole prompts.
        """
        return False

    @property
    def kv_copies(self) -> KvCopies:
        """None: vLLM recomputes what it preempts."""
        return KvCopies()

    @property
    def embedding_nbytes(self) -> int:
        """Bytes of the copies of requests' embeddings."""
        return sum(self._nbytes.values())

    def metrics(self) -> Iterable[Metric]:
        """VLLM's metrics."""
        return vllm_metrics()

    # --- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ContextTooLong or InvalidRequest for what can never run, Overloaded when the other
        requests' copies leave no room, EngineFailure for embeddings that are not finite.
        """
        if request.request_id in self._nbytes:
            raise InvalidRequest(f"request {request.request_id!r} is in the engine already")
        # vLLM's own checks are made where it tokenizes, which it does not do here.
        checked = check_request(request, self._limits)
        if self.embedding_nbytes + checked.nbytes > self._limits.max_embedding_nbytes:
            raise Overloaded(f"the engine holds {self.embedding_nbytes} bytes of embeddings, there is no room for more")
        placed = self._features.place(request, checked.positions)
        keys = [given.key for given in request.embeddings]
        items = None
        if all(keys):
            items = [KeyedItem(key, filled) for key, filled in zip(keys, checked.positions, strict=True)]
        self._nbytes[request.request_id] = checked.nbytes
        try:
            for number, begun in request.begun.items():
                self._add_choice(request, number, begun, checked.token_ids, placed, items)
        except Exception:
            self._withdraw(request)
            raise

    def _position_fault(self, token_ids: list[int], features: list[MultiModalFeatureSpec]) -> str:
        """Why the model cannot compute a prompt's positions; empty if it can."""
        (fault, *_) = self._engine.collective_rpc(_find_position_fault, args=(token_ids, features))
        return str(fault)

    def _withdraw(self, request: EngineRequest) -> None:
        """Take back a request of which vLLM has refused a choice."""
        self.cancel(request.request_id)
        names = [_name(request.request_id, number) for number in request.begun]
        self._engine.abort_request(names)
        for name in names:
            self._grammars.drop(name)
        self._nbytes.pop(request.request_id, None)

    def _add_choice(
        self,
        request: EngineRequest,
        number: int,
        begun: tuple[int, ...],
        token_ids: Sequence[int],
        placed: Sequence[PlacedItem],
        items: Sequence[KeyedItem] | None,
    ) -> None:
        """Add a choice. What it has begun with becomes part of vLLM's prompt, so that vLLM counts for penalties only
        what follows. ``items`` is None if one has no identity.
        """
        name = _name(request.request_id, number)
        end_ids = self._end_ids(request)
        if request.grammar is not None:
            grammar = ConstrainedChoice(request.grammar.fork(), end_ids, request.sampling.min_tokens, begun)
            self._grammars.put(name, grammar)
        grammar_name = None if request.grammar is None else name
        most = 1 if request.pauses else None
        params = vllm_params(request.sampling, number, end_ids, grammar_name, begun=len(begun), most=most)
        asked = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[*token_ids, *begun],
            mm_features=[item.feature for item in placed] or None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=unix_s(),
            lora_request=None,
            # An item without identity is shared with nobody.
            cache_salt=request.tenant_salt.hex() or None if items is not None else name,
            data_parallel_rank=None,
            priority=request.queue_position.priority,
        )
        vllm_id = self._engine.add_request(name, asked, params)
        self._items.hold(vllm_id, [item.item for item in placed])
        choice = Choice(
            request.request_id,
            number,
            name,
            vllm_id,
            request.sampling.logprobs,
            None if items is None else PrefixHashes(items, salt=request.tenant_salt),
            pauses=request.pauses and (request.sampling.max_tokens or 0) > len(begun) + 1,
        )
        self._choices.add(choice)
        if self.kv is not None and choice.pauses:
            self.kv.connector.keep(vllm_id)
        if self.kv is not None and request.arriving:
            self.kv.connector.expect(vllm_id, request.arriving)

    def _end_ids(self, request: EngineRequest) -> AbstractSet[int]:
        sampling = request.sampling
        return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_ids)

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """Cancel a request or one of its choices, and free its memory; unknown or finished ones are ignored."""
        choices = self._choices.of(request_id)
        cancelled = [held for number, held in choices.items() if choice is None or number == choice]
        if cancelled:
            if self.kv is not None:
                for held in cancelled:
                    self.kv.connector.drop(held.vllm_id)
            self._engine.abort_request([held.name for held in cancelled])
            for held in cancelled:
                self._forget(held)
            self._settle()

    def _settle(self) -> None:
        """Run the step in which vLLM's workers and metrics forget the last requests, once these were cancelled."""
        if not self.has_work and not self._has_failed and self._scheduler.has_requests():
            with suppress(InstanceLost):  # the next step raises it
                self.step()

    def _forget(self, choice: Choice) -> TriptychError | None:
        """A choice has left vLLM. Returns why its grammar failed, if it did."""
        self._choices.remove(choice)
        if not self._choices.of(choice.request_id):
            del self._nbytes[choice.request_id]
        return self._grammars.drop(choice.name)

    def reorder(self, request_id: str, queue_position: QueuePosition) -> None:
        """Has no effect: vLLM orders requests of one priority by their arrival."""
        del request_id, queue_position

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> list[EngineOutput]:
        """Run one step of vLLM's engine. Raises InstanceLost if it failed: vLLM cannot go on then."""
        if self._has_failed:
            raise InstanceLost("the engine has failed")
        try:
            answered = self._engine.step()
        except Exception as error:
            self._has_failed = True
            logger.exception("vLLM's engine has failed")
            raise InstanceLost(f"the engine has failed: {reason_of(error)}") from error
        outputs: list[EngineOutput] = []
        for answer in answered:
            choice = self._choices.by_name.get(answer.request_id)
            if choice is not None:
                outputs += self._outputs(choice, answer)
        return outputs

    def _outputs(self, choice: Choice, answer: Any) -> list[EngineOutput]:
        (completion,) = answer.outputs
        token_ids = tuple(completion.token_ids)
        reason = _REASONS.get(completion.finish_reason)
        error: TriptychError | None = None
        if answer.finished and choice.pauses and reason is FinishReason.LENGTH:
            self._choices.paused.add(choice.name)
            reason = None
        elif answer.finished:
            why = self._forget(choice)
            if reason is None:
                error = why or EngineFailure("the engine failed on this request")
        token_scores = scores(token_ids, completion.logprobs, choice.alternatives) if error is None else ()
        if not (token_ids or reason or error):
            return []
        if error is not None:
            self.cancel(choice.request_id)
            return [EngineOutput(choice.request_id, (), error=error, choice=choice.number)]
        return [
            EngineOutput(
                choice.request_id,
                token_ids,
                reason,
                choice=choice.number,
                scores=token_scores,
                cached_tokens=answer.num_cached_tokens or 0,
            )
        ]


def _name(request_id: str, number: int) -> str:
    """A choice's id outside of vLLM."""
    return f"{request_id}/{number}"


def _find_position_fault(worker: Any, token_ids: list[int], features: list[MultiModalFeatureSpec]) -> str:
    """Runs in each worker. A failure there would end some of them."""
    try:
        runner = worker.model_runner
        positions, _ = runner.get_model().get_mrope_input_positions(token_ids, features)
        most = runner.model_config.hf_text_config.max_position_embeddings
        if int(positions.min()) < 0 or int(positions.max()) >= most:
            return "an item has positions beyond those of the model"
    except Exception as error:  # noqa: BLE001 - whatever a model of vLLM raises
        return reason_of(error)
    return "" if positions.shape[-1] == len(token_ids) else "it has other positions than tokens"


def _nothing() -> None:
    """Do nothing, as nobody waits for it."""
