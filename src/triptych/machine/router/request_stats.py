"""Data for a request's timeline that no decision needs."""

from dataclasses import dataclass, field

from triptych.domain.generation import Finished, Ready
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
        finished = self.finished.values()
        if outcome is Outcome.DONE:
            completion_tokens = sum(one.completion_tokens for one in finished)
        return Timeline(
            request_id=self.request_id,
            model=self.model,
            outcome=outcome,
            items=items,
            text_instance=self.instance_id,
            text_attempts=self.text_attempts,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=completion_tokens,
            prepare_s=prepared_s - self.started_s,
            encode_s=encoded_s - prepared_s if items else 0.0,
            queue_s=self.ready.queue_s if self.ready else 0.0,
            pull_s=self.ready.pull_s if self.ready else 0.0,
            prefill_s=max((one.prefill_s for one in finished), default=0.0),
            decode_s=max((one.decode_s for one in finished), default=0.0),
            ttft_s=0.0 if self.first_token_s is None else self.first_token_s - self.started_s,
            total_s=end_s - self.started_s,
            error=self.error,
        )
