"""Wants of a request: what it asks the cluster for, and its position in the queues of all services."""

from collections.abc import Callable, Iterable
from math import inf

from triptych.domain.queue_position import FIRST_COME, QueuePosition
from triptych.domain.slo import NOTHING_EXPECTED, Expected
from triptych.domain.stage import Stage
from triptych.machine.router.attempts import TextAttempts
from triptych.machine.router.prompt_identity import PromptIdentity, PromptTokens
from triptych.machine.router.request_events import Prepared
from triptych.machine.router.request_items import RequestItems
from triptych.machine.router.shared_events import CreditsWanted, TextWanted
from triptych.policy.fairness import UNSHARED, Share
from triptych.policy.policies import Ordering
from triptych.policy.queueing import by_slo


class RequestWants:
    """The facts by which a request asks for places. Part of ``machine.router.request.RequestMachine``, which alone changes it."""

    def __init__(
        self,
        number: int,
        *,
        arrived_s: float,
        deadline_s: float,
        choices: int = 1,
        priority: int = 0,
        lora: str = "",
        ordering: Ordering = by_slo,
        share: Callable[[Stage], Share] = lambda _: UNSHARED,
    ) -> None:
        """``share`` gives the request's share of its tenant at a stage that it has come to."""
        self._number = number
        self._arrived_s = arrived_s
        self._deadline_s = deadline_s
        self._choices = choices
        self._priority = priority
        self._lora = lora
        self._ordering = ordering
        self._share = share
        self._expected: Expected = NOTHING_EXPECTED
        self.prompt_tokens = self._answer_tokens = 0
        self._prompt: PromptTokens | None = None
        """The prompt, if the beginning of it is to be looked for at other instances."""
        self.begun = False
        """Whether some of its answer has been sent: it is never too late to begin."""
        self.encode_queue_position = self.text_queue_position = FIRST_COME
        """Positions in the queues of encoders and of text instances, as of the last time that it wanted places there."""

    def prepared(self, event: Prepared) -> None:
        """Take over what is known of the prepared request."""
        self._expected, self._prompt = event.expected, event.prompt
        self.prompt_tokens, self._answer_tokens = event.prompt_tokens, event.answer_tokens

    def encoders(
        self, items: RequestItems, wanted: Iterable[int], reason: str, *, wait: bool, again: bool, suspect: bool
    ) -> CreditsWanted:
        """Ask for a place for each of these items."""
        alone = self._expected.isolated
        needs_s = 0.0 if alone is None else alone.prefill_s + alone.encode_s
        self.encode_queue_position = self._queue_position(needs_s, self._share(Stage.ENCODE))
        wants = tuple([items.all[index].want for index in wanted])
        return CreditsWanted(self._number, wants, wait, self.encode_queue_position, reason, again, suspect)

    def text_instance(
        self, items: RequestItems, texts: TextAttempts, reason: str, *, early: bool = False, suspect: bool = False
    ) -> TextWanted:
        """Ask for a place at a text instance; for an ``early`` prefill it is still among those that wait for encoders."""
        handed = texts.kv_transferred
        segments = () if handed is None else handed.kv_segments
        holders = items.nbytes_by_encoder()
        if handed is not None and segments:
            holders[handed.grant.instance_id] = sum([segment.ticket.payload_nbytes for segment in segments])
        alone = self._expected.isolated
        needs_s = 0.0 if alone is None else alone.prefill_s
        self.text_queue_position = self._queue_position(needs_s, self._share(Stage.ENCODE if early else Stage.PREFILL))
        prompt = None
        if self._prompt is not None and not (early or segments):
            prompt = PromptIdentity(self._prompt, items.identified())
        return TextWanted(
            self._number,
            self.prompt_tokens,
            texts.avoid,
            holders,
            reason,
            choices=self._choices,
            max_tokens=self._answer_tokens,
            with_items=bool(items.all),
            continues=self.begun,
            early=early,
            kept_credit=None if texts.kept is None else texts.kept.credit,
            kept_tokens=texts.early_tokens,
            queue_position=self.text_queue_position,
            sender=handed.grant.name if handed is not None and segments else "",
            covered_tokens=0 if handed is None else handed.covered_tokens,
            moves=texts.moves,
            prompt=prompt,
            suspect=suspect,
            lora=self._lora,
        )

    def _queue_position(self, needs_s: float, share: Share) -> QueuePosition:
        """The position in a stage's queues. From there the request needs ``needs_s`` to its first token, with the system to itself."""
        limit_s = self._expected.ttft_limit_s
        queue_position = self._ordering(
            priority=self._priority,
            deadline_s=self._deadline_s,
            arrived_s=self._arrived_s,
            arrival=self._number,
            due_s=inf if limit_s is None else self._arrived_s + limit_s,
            needs_s=needs_s,
        )
        if self.begun:
            queue_position = queue_position._replace(lost_s=inf)
        return queue_position if share is UNSHARED else share.of(queue_position)
