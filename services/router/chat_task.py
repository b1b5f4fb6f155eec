"""Runs one chat: prepares its prompt, and streams its answer from a text instance."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from math import inf

from triptych.domain.chat import ChatRequest
from triptych.domain.continuation import begun
from triptych.domain.embedding import LeaseId
from triptych.domain.generation import KvTransferred, Ready, TextEvent, TextRequest, Usage
from triptych.domain.instance import ModelInfo
from triptych.domain.item_plan import ItemPlan
from triptych.domain.kv_segment import KvPlacement
from triptych.domain.media import Modality
from triptych.domain.recent import ChatShape
from triptych.domain.sampling import SamplingParams
from triptych.errors import InstanceLost, Overloaded, TriptychError
from triptych.machine.router.attainment import Gaps
from triptych.machine.router.prompt_identity import PromptTokens
from triptych.machine.router.request import RequestMachine
from triptych.machine.router.request_events import (
    AnswerTransferred,
    AttemptKind,
    Failed,
    Generate,
    PrefilledEarly,
    Prepared,
    Resolved,
    TextReported,
)
from triptych.machine.router.shared_events import CreditReturned, FirstToken
from triptych.machine.text.prefix_hashes import salt_of
from triptych.policy import admission
from triptych.ports import Clock, Offload, Rng, Text
from triptych.runtime import tracing

from .answer import Answer
from .attainment import Arrival, Attainment
from .cluster import Cluster
from .late import LateRefusals
from .leases import CallLeases
from .prepare import Prepare, Prompted
from .request_task import RequestTask
from .stream_buffer import StreamBuffer

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, seed=0)
"""A prompt is computed to generate something."""
_WHOLE_S = 0.2
"""How long tokens of an answer that is read as a whole wait for others, seconds: so much is computed again if the router is lost."""


class ChatTask(RequestTask):
    """A chat that runs: ``drive`` puts its answer into ``buffer``."""

    request: ChatRequest

    def __init__(
        self,
        request: ChatRequest,
        machine: RequestMachine,
        cluster: Cluster,
        clock: Clock,
        *,
        model: ModelInfo,
        media_bytes: int,
        attainment: Attainment,
        prepare: Prepare,
        sharding: Callable[[Sequence[ItemPlan]], tuple[ItemPlan, ...]],
        late: LateRefusals,
        offload: Offload,
        rng: Rng,
        new_lease: Callable[[], LeaseId],
        finds_prefixes: bool = False,
        lora: str = "",
        encoded_lora: str = "",
    ) -> None:
        """``rng`` draws a missing seed. ``lora`` is the digest of its adapter, ``encoded_lora`` that of its items. ``finds_prefixes``: the prefix of the prompt is looked for at other instances."""
        listeners = attainment.listeners
        super().__init__(request, machine, cluster, clock, model=model, media_bytes=media_bytes, listeners=listeners)
        self.buffer = StreamBuffer(_WHOLE_S if request.whole else 0.0)
        self._attainment = attainment
        self._gaps: Gaps | None = None
        self._prepare_request = prepare
        self._sharding = sharding
        self._late = late
        self._offload = offload
        self._rng = rng
        self._new_lease = new_lease
        self._finds_prefixes = finds_prefixes
        self._lora, self._encoded_lora = lora, encoded_lora
        self._prompted: Prompted
        """Set by ``_prepare``."""
        self._sampling = request.sampling
        self._answer: Answer | None = None
        self.shape: ChatShape | None = None
        """Sizes of the request, once it is prepared."""
        self.refusal: Overloaded | None = None
        """Why it was refused once it had been prepared, if it was."""

    @property
    def streamed_tokens(self) -> int:
        return self.request.begun_tokens if self._answer is None else self._answer.streamed_tokens

    @property
    def finish_reason(self) -> str:
        """The reason of the choice that finished last; empty before one did."""
        return "" if self._answer is None else self._answer.finish_reason

    def _serve(self, effect: Generate | Resolved) -> None:
        assert isinstance(effect, Generate)  # noqa: S101 - a chat's machine has no other
        task = self._start(partial(self._generate, effect), effect.kind.value, effect.credit)
        if effect.kind is not AttemptKind.EARLY_PREFILL:  # whose place is kept
            task.add_done_callback(partial(self._generated, effect.credit))

    def _ended(self, error: TriptychError | None) -> None:
        self.buffer.close(error)

    async def _prepare(self) -> None:
        try:
            with tracing.child("prepare"):
                self._prompted = await self._offload.run(self._prepare_request, self.request, self.model)
            prompt_tokens = len(self._prompted.token_ids)
            self.shape = ChatShape(
                prompt_tokens,
                sum([item.tokens for item in self._prompted.items]),
                tuple([item.info for item in self._prompted.items]),
                self.request.sampling.n,
            )
            self._sampling = admission.complete(
                self._prompted.sampling,
                prompt_tokens=prompt_tokens,
                context_length=self.model.context_length,
                kv_tokens=self._cluster.machine.instances.kv_tokens,
                kv_block_tokens=self._cluster.machine.instances.kv_block_tokens,
            )
            arrived = self._attainment.arrival(self._prompted.items, prompt_tokens)
            if not self.request.continued:  # its caller has some of it already
                self._refuse_late(arrived)
        except TriptychError as error:
            self.feed(Failed(error))
        else:
            # Another text instance must be able to go on with the same draws.
            self._sampling = self._sampling.seeded(self._rng)
            items = self._sharding([item.with_lora(self._encoded_lora) for item in self._prompted.items])
            self._gaps, expected = self._attainment.prepared(
                self.number,
                arrived,
                self._clock() - self.started_s,
                self.request.priority,
                begun=bool(self.request.continued),
                answer_tokens=self._sampling.n * self._expected_tokens(),
                tenant=self.tenant,
            )
            prompt = None
            if self._finds_prefixes:
                prompted = self._prompted
                salt = salt_of(self.request.tenant_salt, self._lora)
                prompt = PromptTokens(prompted.token_ids, salt, prompted.placeholder_ids)
            self.feed(Prepared(items, prompt_tokens, self._sampling.max_tokens or 0, expected, prompt))

    def _expected_tokens(self) -> int:
        """Tokens of each choice."""
        expected = self._cluster.machine.expected_output
        return expected.predict(bool(self._prompted.items), self._sampling.max_tokens or 0)

    def _refuse_late(self, arrived: Arrival) -> None:
        """Raise Overloaded if the answer cannot be there before the deadline."""
        wait_s, service_s = self._attainment.predicted_s(arrived, self.request.priority, self.tenant)
        if not wait_s:
            return
        try:
            self._late.check(
                lambda: self.request, left_s=self._left_s(), wait_s=wait_s, service_s=service_s, prepared=True
            )
        except Overloaded as error:
            self.refusal = error
            raise

    def _text_request(self, effect: Generate, prefix: tuple[KvPlacement, ...]) -> TextRequest:
        kind = effect.kind
        continued = self._answer.continued() if kind is AttemptKind.DECODE and self._answer is not None else ()
        return TextRequest(
            request_id=self.request.request_id,
            model=self.model.model_id,
            token_ids=self._prompted.token_ids[: effect.tokens],
            placements=effect.placements,
            sampling=_ONE_TOKEN if kind is AttemptKind.EARLY_PREFILL else self._sampling,
            timeout_s=self._left_s(),
            priority=self.request.priority,
            tenant_salt=self.request.tenant_salt,
            position=effect.queue_position.relative(self._clock()),
            continued=continued,
            early=kind is AttemptKind.EARLY_PREFILL,
            transfers_kv=kind is AttemptKind.PREFILL,
            kv_segments=effect.kv_segments or prefix,
            kv_lease_s=effect.kv_lease_s,
            whole=self.request.whole,
            lora=self._lora,
        )

    async def _generate(self, effect: Generate) -> None:
        """Make the call. What comes of an early prefill is no answer."""
        leases = CallLeases(self._cluster, self._new_lease) if effect.prefix else None
        epoch = self._cluster.epoch_of(effect.name)
        answer = None
        if effect.kind is not AttemptKind.EARLY_PREFILL:
            answer = self._answer = self._answer or self._new_answer()
        try:
            prefix = () if leases is None else await leases.take_prefix(effect.prefix, effect.kv_lease_s)
            request = self._text_request(effect, prefix)
            with self._cluster.call(effect.name) as text:
                await self._stream(text, effect, request, answer, leases)
        except TriptychError as error:
            await self._failed(effect.credit, effect.name, error, epoch)
        finally:
            if leases is not None:
                leases.release()

    def _generated(self, credit: int, _: asyncio.Task[None]) -> None:
        self._cluster.feed(CreditReturned(credit))

    async def _stream(
        self, text: Text, effect: Generate, request: TextRequest, answer: Answer | None, leases: CallLeases | None
    ) -> None:
        """Forward the answer, if there is one. Of its events only those that change the request's phase are published."""
        async with aclosing(text.generate(request)) as stream:
            began = kv_transferred = False
            async for events in stream:
                if answer is not None and events and not (answer.has_ended or kv_transferred):
                    if leases is not None:
                        leases.read()  # it sends nothing before that
                    began = began or self._begins(effect.credit, events)
                    for finished in answer.take(events):
                        self.feed(TextReported(effect.credit, finished))
                # Else it waits for the end of the call, which is cheaper for both sides than cancelling it.
                if events and isinstance(last := events[-1], KvTransferred):
                    # The machine gets it whether or not it waits for one, to release its leases.
                    self.feed(AnswerTransferred(effect.credit, effect.name, last.segments, last.prefill_s))
                    kv_transferred = True
        if answer is None:
            self.feed(PrefilledEarly(effect.credit))
        elif not (answer.has_ended or kv_transferred):
            raise InstanceLost("the text instance's stream ended early")

    def _begins(self, credit: int, events: Sequence[TextEvent]) -> bool:
        """Whether these events contain the first part of the answer from this text instance."""
        for event in events:
            if isinstance(event, KvTransferred):
                return False
            if not isinstance(event, Ready):
                self.feed(FirstToken(credit))
                return True
            self.feed(TextReported(credit, event))
        return False

    def _prompt_usage(self) -> Usage:
        tokens = dict.fromkeys(Modality, 0)
        for item in self._prompted.items:
            tokens[item.info.modality] += item.tokens
        prompt_tokens = len(self._prompted.token_ids)
        return Usage(prompt_tokens, 0, tokens[Modality.IMAGE], tokens[Modality.AUDIO], tokens[Modality.VIDEO])

    def _new_answer(self) -> Answer:
        return Answer(
            self.buffer,
            self._prompted.reading,
            begun=begun(self._sampling.n, self.request.continued),
            usage=self._prompt_usage(),
            ignored=self._prompted.ignored,
            most_tokens=self._sampling.max_tokens or inf,
            gaps=self._gaps,
            clock=self._clock,
        )
