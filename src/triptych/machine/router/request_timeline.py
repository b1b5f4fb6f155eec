"""The timeline of a request: what can be told of its steps from its times and its attempts."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from triptych.domain.generation import Finished, KvReport, Ready
from triptych.domain.timeline import Beginning, Outcome, Timeline
from triptych.machine.router.attempts import Ending, TextAttempt, TextAttempts
from triptych.machine.router.request_items import RequestItem, RequestItems

_NO_KV = KvReport()


@dataclass(slots=True)
class RequestTimes:
    """Times and counts of a request, apart from its attempts. Part of ``machine.router.request.RequestMachine``.

    Times are None until reached.
    """

    request_id: str
    model: str
    started_s: float
    prepared_s: float | None = None
    encoded_s: float | None = None
    """Of the first answer: what is encoded again to go on with it does not count."""
    over_s: float | None = None
    continued_tokens: int | None = None
    """Tokens that another router has passed on; None if it began here."""
    finished: dict[int, Finished] = field(default_factory=dict)
    """By choice."""
    error: str = ""

    def beginning(self, items: RequestItems, answering: TextAttempt) -> Beginning | None:
        """Times to the first token of an answer that began here, from this attempt; None before that."""
        if answering.first_token_s is None or self.prepared_s is None or self.encoded_s is None:
            return None
        return Beginning(
            ttft_s=answering.first_token_s - self.started_s,
            prepare_s=self.prepared_s - self.started_s,
            encode_s=self.encoded_s - self.prepared_s if items.all else 0.0,
            queue_s=0.0 if answering.ready is None else answering.ready.queue_s,
            slowest_encoder=items.slowest_encoder,
        )

    def timeline(
        self,
        now_s: float,
        outcome: Outcome,
        items: Iterable[RequestItem],
        texts: TextAttempts,
        *,
        prompt_tokens: int,
        completion_tokens: int,
    ) -> Timeline:
        """The timeline so far. ``completion_tokens`` counts streamed tokens, for a request that is not done."""
        end_s = now_s if self.over_s is None else self.over_s
        prepared_s = end_s if self.prepared_s is None else self.prepared_s
        encoded_s = end_s if self.encoded_s is None else self.encoded_s
        answer = _Answer(None if self.continued_tokens is None else self.started_s)
        for attempt in texts.sent:
            answer.attempted(attempt, is_last=attempt is texts.sent[-1] and attempt.ended_s == self.over_s)
        answer.ends(end_s)
        if answer.first_token_s is None and texts.sent and outcome is Outcome.DONE:
            answer.first_token_s = end_s  # it has come with the end
        finished_tokens = preemptions = 0
        prefill_s = decode_s = preempted_s = 0.0
        for choice in self.finished.values():
            finished_tokens, preemptions = finished_tokens + choice.completion_tokens, preemptions + choice.preemptions
            prefill_s, decode_s = max(prefill_s, choice.prefill_s), max(decode_s, choice.decode_s)
            preempted_s = max(preempted_s, choice.preempted_s)
        if answer.first_token_s is not None and (answer.interrupted_s or answer.prefilled is not None):
            decode_s = end_s - answer.first_token_s  # the last text instance knows only its own part
        if answer.prefilled is not None:
            prefill_s = answer.prefilled.prefill_s
        ready, kv = answer.ready, answer.kv or _NO_KV
        shown = tuple([item.timeline(ready) for item in items])
        early = texts.early[-1] if texts.early else None
        return Timeline(
            request_id=self.request_id,
            model=self.model,
            outcome=outcome,
            items=shown,
            text_instance=texts.sent[-1].grant.instance_id if texts.sent else "",
            text_attempts=texts.shown,
            continuations=answer.continuations,
            prompt_tokens=prompt_tokens,
            completion_tokens=finished_tokens if outcome is Outcome.DONE else completion_tokens,
            prepare_s=prepared_s - self.started_s,
            encode_s=encoded_s - prepared_s if shown else 0.0,
            queue_s=ready.queue_s if ready else 0.0,
            pull_s=ready.pull_s if ready else 0.0,
            prefill_s=prefill_s,
            decode_s=decode_s,
            ttft_s=0.0 if answer.first_token_s is None else answer.first_token_s - self.started_s,
            total_s=end_s - self.started_s,
            interrupted_s=answer.interrupted_s,
            continued_tokens=self.continued_tokens or 0,
            preemptions=preemptions,
            preempted_s=preempted_s,
            early_tokens=early.tokens if early is not None and early.ended is not Ending.FAILED else 0,
            prefix_tokens=ready.kv.pulled_tokens if ready and ready.kv else 0,
            prefill_instance="" if answer.prefilled is None else answer.prefilled.grant.instance_id,
            kv_transfer_s=answer.kv_transfer_s,
            kv_pulled_tokens=kv.pulled_tokens,
            kv_cached_tokens=kv.cached_tokens,
            kv_computed_tokens=kv.computed_tokens,
            kv_pull_bytes=kv.nbytes,
            error=self.error,
        )


class _Answer:
    """The course of an answer over its attempts at text instances, in their order."""

    def __init__(self, continued_s: float | None) -> None:
        """Begin with ``continued_s``, if another router began the answer: here it is interrupted from that time on."""
        self.first_token_s = self._broke_s = continued_s
        """``_broke_s``: when its stream broke, until it goes on."""
        self._kv_transferred_s: float | None = None
        """When it was transferred, until it goes on."""
        self.ready: Ready | None = None
        self.kv: KvReport | None = None
        """How the keys and values arrived that were transferred last."""
        self.prefilled: TextAttempt | None = None
        """The first attempt that transferred."""
        self.continuations = 0
        self.interrupted_s = self.kv_transfer_s = 0.0

    def attempted(self, attempt: TextAttempt, *, is_last: bool) -> None:
        """Take the next attempt into account. ``is_last``: the request ended with it."""
        if attempt.ready is not None and self._kv_transferred_s is None:
            self.ready = attempt.ready
        elif attempt.ready is not None:
            self.kv = attempt.ready.kv
        if attempt.first_token_s is not None:
            self._goes_on(attempt.first_token_s)
        if attempt.ended is Ending.KV_TRANSFERRED:
            self.prefilled = self.prefilled or attempt
            self._kv_transferred_s = attempt.ended_s if self._kv_transferred_s is None else self._kv_transferred_s
        elif attempt.ended is None or attempt.ended is Ending.RELEASED or is_last:
            pass
        elif attempt.first_token_s is not None:
            self._broke_s = attempt.ended_s
        elif self._kv_transferred_s is None:
            self.ready = None  # it is reported again

    def _goes_on(self, token_s: float) -> None:
        """The first token of an attempt has come."""
        if self.first_token_s is None:
            self.first_token_s = token_s
        if self._kv_transferred_s is not None:
            self.kv_transfer_s += token_s - self._kv_transferred_s
            self._kv_transferred_s = None
        if self._broke_s is not None:
            self.continuations += 1
            self.interrupted_s += token_s - self._broke_s
            self._broke_s = None

    def ends(self, end_s: float) -> None:
        """Count what has not gone on until ``end_s``."""
        if self._broke_s is not None:
            self.interrupted_s += end_s - self._broke_s
        if self._kv_transferred_s is not None:
            self.kv_transfer_s += end_s - self._kv_transferred_s
