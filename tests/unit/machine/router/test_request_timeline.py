"""What the timeline of a request tells of its times and attempts."""

from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.generation import Finished, FinishReason, Ready
from triptych.domain.item_plan import ItemPlan
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.timeline import Beginning, Outcome, Timeline
from triptych.machine.router.attempts import Ending, TextAttempt, TextAttempts
from triptych.machine.router.request_events import AttemptKind
from triptych.machine.router.request_items import RequestItem, RequestItems
from triptych.machine.router.request_timeline import RequestTimes
from triptych.machine.router.shared_events import Grant

INFO = MediaInfo(Modality.IMAGE, "png", 28, 14, 100, bytes(32))
TENSORS = (TensorSpec("t", DType.F32, (4, 8)),)
ITEM = RequestItem(0, ItemPlan(0, "messages", b"", INFO, (b"0", b""), 0, 4, TENSORS, 128, (4,)))


def answering(first_token_s: float, ready: Ready | None = None) -> TextAttempts:
    texts = TextAttempts(3)
    attempt = TextAttempt(AttemptKind.WHOLE, Grant(1, None, "t", "i-t"), 0.0, ready=ready, first_token_s=first_token_s)
    texts.sent.append(attempt)
    return texts


def running(times: RequestTimes, now_s: float, *items: RequestItem, texts: TextAttempts | None = None) -> Timeline:
    return times.timeline(now_s, Outcome.RUNNING, items, texts or TextAttempts(3), prompt_tokens=0, completion_tokens=5)


def test_the_current_stage_of_a_running_request_lasts_until_now() -> None:
    times = RequestTimes("r", "m", started_s=10.0)
    line = running(times, 11.0)
    assert (line.prepare_s, line.encode_s, line.ttft_s, line.total_s) == (1.0, 0.0, 0.0, 1.0)
    times.prepared_s = 11.0
    line = running(times, 14.0, ITEM)
    assert (line.prepare_s, line.encode_s, line.total_s) == (1.0, 3.0, 4.0)
    times.encoded_s = 13.0
    line = running(times, 16.0, ITEM, texts=answering(15.0))
    assert (line.encode_s, line.ttft_s, line.completion_tokens, line.text_attempts) == (2.0, 5.0, 5, 1)


def test_a_request_without_items_has_no_encode_time() -> None:
    assert running(RequestTimes("r", "m", started_s=0.0, prepared_s=1.0, encoded_s=4.0), 5.0).encode_s == 0.0


def test_a_finished_timeline_is_constant_and_sums_up_the_choices() -> None:
    times = RequestTimes("r", "m", started_s=0.0, prepared_s=1.0, encoded_s=2.0, over_s=9.0)
    texts = answering(3.0, Ready((), queue_s=0.25, pull_s=0.5))
    times.finished = {0: Finished(FinishReason.STOP, 4, 0.1, 0.7), 1: Finished(FinishReason.LENGTH, 6, 0.3, 0.2, 1)}
    done = times.timeline(100.0, Outcome.DONE, (), texts, prompt_tokens=7, completion_tokens=3)
    assert (done.completion_tokens, done.prompt_tokens, done.total_s) == (10, 7, 9.0)
    assert (done.queue_s, done.pull_s, done.prefill_s, done.decode_s) == (0.25, 0.5, 0.3, 0.7)
    failed = times.timeline(100.0, Outcome.FAILED, (), texts, prompt_tokens=7, completion_tokens=3)
    assert failed.completion_tokens == 3


def attempt(
    texts: TextAttempts,
    name: str,
    first_token_s: float | None = None,
    ended_s: float | None = None,
    how: Ending = Ending.FAILED,
    kind: AttemptKind = AttemptKind.WHOLE,
    ready: Ready | None = None,
) -> None:
    """An attempt at this text instance, with 5 tokens of an early prefill."""
    texts.begin(kind, Grant(1, None, name, f"i-{name}"), 0.0, 5 * (kind is AttemptKind.EARLY_PREFILL))
    assert texts.current is not None
    texts.current.first_token_s, texts.current.ready = first_token_s, ready
    if ended_s is not None:
        texts.end(how, ended_s)


def test_an_answer_that_broke_goes_on_at_another_instance() -> None:
    texts, times = TextAttempts(3), RequestTimes("r", "m", started_s=0.0, prepared_s=1.0, encoded_s=1.0)
    attempt(texts, "t", 3.0, 4.0)
    line = running(times, 5.5, texts=texts)
    assert (line.continuations, line.interrupted_s, line.text_instance) == (0, 1.5, "i-t")
    attempt(texts, "u", 6.0)
    line = running(times, 8.0, texts=texts)
    assert (line.continuations, line.interrupted_s, line.text_instance) == (1, 2.0, "i-u")
    assert (line.ttft_s, line.decode_s) == (3.0, 5.0)


def test_an_answer_that_ends_with_its_last_attempt_is_not_interrupted() -> None:
    texts = TextAttempts(3)
    attempt(texts, "t", 3.0, 4.0)
    attempt(texts, "u", 6.0, 9.0)
    times = RequestTimes("r", "m", started_s=0.0, prepared_s=1.0, encoded_s=1.0, over_s=9.0)
    assert running(times, 20.0, texts=texts).interrupted_s == 2.0
    times.over_s = 11.0
    assert running(times, 20.0, texts=texts).interrupted_s == 4.0, "another attempt was to follow"


def test_an_attempt_that_fails_before_its_first_token_has_no_queue() -> None:
    texts, times = TextAttempts(3), RequestTimes("r", "m", started_s=0.0, prepared_s=1.0, encoded_s=1.0)
    attempt(texts, "t", ready=Ready((), queue_s=0.25, pull_s=0.5))
    assert running(times, 2.0, texts=texts).queue_s == 0.25
    texts.end(Ending.FAILED, 3.0)
    line = running(times, 3.0, texts=texts)
    assert (line.queue_s, line.pull_s) == (0.0, 0.0), "it is reported again"


def test_an_early_prefill_counts_unless_it_failed() -> None:
    texts, times = TextAttempts(3), RequestTimes("r", "m", started_s=0.0)
    assert running(times, 1.0, texts=texts).early_tokens == 0
    attempt(texts, "t", kind=AttemptKind.EARLY_PREFILL)
    assert running(times, 1.0, texts=texts).early_tokens == 5
    texts.end(Ending.FAILED, 2.0)
    assert running(times, 3.0, texts=texts).early_tokens == 0


def test_a_beginning_is_known_from_the_first_token_on() -> None:
    times = RequestTimes("r", "m", started_s=10.0)
    (begun,) = answering(15.0, Ready((), queue_s=0.25, pull_s=0.5)).sent
    items = RequestItems()
    assert times.beginning(items, begun) is None, "another router began it"
    times.prepared_s = 11.0
    assert times.beginning(items, begun) is None
    times.encoded_s = 13.0
    assert times.beginning(items, begun) == Beginning(5.0, 1.0, 0.0, 0.25, ""), "without items nothing is encoded"
    items.add([ITEM.plan])
    (unreported,) = answering(15.0).sent
    assert times.beginning(items, unreported) == Beginning(5.0, 1.0, 2.0, 0.0, "")
    unreported.first_token_s = None
    assert times.beginning(items, unreported) is None


def test_an_answer_that_is_handed_over_waits_from_its_prefill_to_its_next_token() -> None:
    texts, times = TextAttempts(3), RequestTimes("r", "m", started_s=0.0, prepared_s=1.0, encoded_s=1.0)
    attempt(texts, "t", 3.0, 3.5, Ending.KV_TRANSFERRED, AttemptKind.PREFILL)
    line = running(times, 5.0, texts=texts)
    assert (line.kv_transfer_s, line.prefill_instance) == (1.5, "i-t")
    attempt(texts, "u", 6.0, kind=AttemptKind.DECODE)
    line = running(times, 9.0, texts=texts)
    assert (line.kv_transfer_s, line.prefill_instance, line.text_instance) == (2.5, "i-t", "i-u")
    assert (line.ttft_s, line.decode_s, line.interrupted_s) == (3.0, 6.0, 0.0)


def test_the_first_token_of_a_finished_answer_has_come_with_its_end_at_the_latest() -> None:
    texts = TextAttempts(3)
    attempt(texts, "t", ended_s=4.0, how=Ending.RELEASED)
    times = RequestTimes("r", "m", started_s=1.0, prepared_s=1.0, encoded_s=1.0, over_s=4.0)
    done = times.timeline(9.0, Outcome.DONE, (), texts, prompt_tokens=7, completion_tokens=3)
    assert (done.ttft_s, done.prefill_s, done.decode_s) == (3.0, 0.0, 0.0)
