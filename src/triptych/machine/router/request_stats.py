"""Data for a request's timeline that no decision needs."""

from dataclasses import dataclass, field

from triptych.domain.generation import Finished, KvReport, Ready
from triptych.domain.timeline import ItemTimeline, Outcome, Timeline


@dataclass(slots=True)
class RequestStats:
    """Part of ``machine.router.request.RequestMachine``. Times are None until reached."""

    request_id: str
    model: str
    started_s: float
    prepared_s: float | None = None
    encoded_s: float | None = None
    first_token_s: float | None = None
    over_s: float | None = None
    instance_id: str = ""
    """The text instance chosen last."""
    ready: Ready | None = None
    finished: dict[int, Finished] = field(default_factory=dict)
    """By choice."""
    error: str = ""
    prompt_tokens: int = 0
    text_attempts: int = 0
    continuations: int = 0
    """How often the answer went on at a text instance."""
    interrupted_s: float = 0.0
    """In all, from the breaks of its stream to the next token."""
    continued_tokens: int = 0
    """Tokens that another router has passed on."""
    early_tokens: int = 0
    """Of the prompt, those that were sent to the text instance before all items were encoded."""
    prefill_instance: str = ""
    """The text instance that computed the prompt and handed the answer over."""
    handover_s: float = 0.0
    """In all, from the hand-overs to the next token."""
    kv: KvReport | None = None
    """How the keys and values arrived that were handed over last."""
    _broke_s: float | None = None
    """When its stream broke, until it goes on."""
    _handed_over_s: float | None = None
    """When it was handed over, until it goes on."""
    _handed_prefill_s: float = 0.0
    """Of the first instance that handed over."""

    def text_is_ready(self, ready: Ready) -> None:
        """A text instance has the embeddings. The one that goes on with an answer says of it only how its keys and values came."""
        if self._handed_over_s is None:
            self.ready = ready
        else:
            self.kv = ready.kv

    def text_failed(self) -> None:
        """Before its first token."""
        if self._handed_over_s is None:
            self.ready = None

    def handed_over(self, now_s: float, prefill_s: float) -> None:
        """The text instance chosen last has ended its part, of which the first token came ``prefill_s`` after its start."""
        if not self.prefill_instance:
            self.prefill_instance = self.instance_id
            self._handed_prefill_s = prefill_s
        if self._handed_over_s is None:
            self._handed_over_s = now_s

    def token_arrived(self, now_s: float) -> None:
        """The first token of an attempt."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        if self._handed_over_s is not None:
            self.handover_s += now_s - self._handed_over_s
            self._handed_over_s = None
        if self._broke_s is not None:
            self.continuations += 1
            self.interrupted_s += now_s - self._broke_s
            self._broke_s = None

    def goes_on(self, now_s: float, tokens: int) -> None:
        """Another router began the answer, and has passed on these tokens: here it is interrupted from the start."""
        self.first_token_s = self._broke_s = now_s
        self.continued_tokens = tokens

    def broke(self, now_s: float) -> None:
        """Its stream has ended before the answer."""
        self._broke_s = now_s

    def timeline(
        self,
        now_s: float,
        outcome: Outcome,
        items: tuple[ItemTimeline, ...],
        *,
        completion_tokens: int,
    ) -> Timeline:
        """The timeline so far. ``completion_tokens`` counts streamed tokens, for a request that is not done."""
        end_s = now_s if self.over_s is None else self.over_s
        prepared_s = end_s if self.prepared_s is None else self.prepared_s
        encoded_s = end_s if self.encoded_s is None else self.encoded_s
        finished_tokens, prefill_s, decode_s = 0, 0.0, 0.0
        preemptions, preempted_s = 0, 0.0
        for one in self.finished.values():
            finished_tokens += one.completion_tokens
            prefill_s, decode_s = max(prefill_s, one.prefill_s), max(decode_s, one.decode_s)
            preemptions, preempted_s = preemptions + one.preemptions, max(preempted_s, one.preempted_s)
        interrupted_s = self.interrupted_s + (0.0 if self._broke_s is None else end_s - self._broke_s)
        handover_s = self.handover_s + (0.0 if self._handed_over_s is None else end_s - self._handed_over_s)
        if self.first_token_s is not None and (interrupted_s or self.prefill_instance):
            decode_s = end_s - self.first_token_s  # the last text instance knows only its own part
        if self.prefill_instance:
            prefill_s = self._handed_prefill_s
        kv = self.kv or _NO_KV
        return Timeline(
            request_id=self.request_id,
            model=self.model,
            outcome=outcome,
            items=items,
            text_instance=self.instance_id,
            text_attempts=self.text_attempts,
            continuations=self.continuations,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=finished_tokens if outcome is Outcome.DONE else completion_tokens,
            prepare_s=prepared_s - self.started_s,
            encode_s=encoded_s - prepared_s if items else 0.0,
            queue_s=self.ready.queue_s if self.ready else 0.0,
            pull_s=self.ready.pull_s if self.ready else 0.0,
            prefill_s=prefill_s,
            decode_s=decode_s,
            ttft_s=0.0 if self.first_token_s is None else self.first_token_s - self.started_s,
            total_s=end_s - self.started_s,
            interrupted_s=interrupted_s,
            continued_tokens=self.continued_tokens,
            preemptions=preemptions,
            preempted_s=preempted_s,
            early_tokens=self.early_tokens,
            prefix_tokens=self.ready.kv.pulled_tokens if self.ready and self.ready.kv else 0,
            prefill_instance=self.prefill_instance,
            handover_s=handover_s,
            kv_pulled_tokens=kv.pulled_tokens,
            kv_cached_tokens=kv.cached_tokens,
            kv_computed_tokens=kv.computed_tokens,
            kv_pull_bytes=kv.nbytes,
            error=self.error,
        )


_NO_KV = KvReport()
