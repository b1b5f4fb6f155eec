from triptych.domain.generation import Finished, FinishReason, Ready
from triptych.domain.timeline import ItemTimeline, Outcome
from triptych.machine.router.request_stats import RequestStats

ITEM = ItemTimeline(item=0, modality="image", width=28, height=14, tokens=4)


def test_the_current_stage_of_a_running_request_lasts_until_now() -> None:
    stats = RequestStats("r", "m", started_s=10.0)
    line = stats.timeline(11.0, Outcome.RUNNING, (), completion_tokens=0)
    assert (line.prepare_s, line.encode_s, line.ttft_s, line.total_s) == (1.0, 0.0, 0.0, 1.0)
    stats.prepared_s = 11.0
    line = stats.timeline(14.0, Outcome.RUNNING, (ITEM,), completion_tokens=0)
    assert (line.prepare_s, line.encode_s, line.total_s) == (1.0, 3.0, 4.0)
    stats.encoded_s, stats.first_token_s, stats.text_attempts = 13.0, 15.0, 1
    line = stats.timeline(16.0, Outcome.RUNNING, (ITEM,), completion_tokens=5)
    assert (line.encode_s, line.ttft_s, line.completion_tokens, line.text_attempts) == (2.0, 5.0, 5, 1)


def test_a_request_without_items_has_no_encode_time() -> None:
    stats = RequestStats("r", "m", started_s=0.0, prepared_s=1.0, encoded_s=4.0)
    assert stats.timeline(5.0, Outcome.RUNNING, (), completion_tokens=0).encode_s == 0.0


def test_a_finished_timeline_is_constant_and_sums_up_the_choices() -> None:
    stats = RequestStats(
        "r", "m", started_s=0.0, prepared_s=1.0, encoded_s=2.0, first_token_s=3.0, over_s=9.0, prompt_tokens=7
    )
    stats.ready = Ready((), queue_s=0.25, pull_s=0.5)
    stats.finished = {0: Finished(FinishReason.STOP, 4, 0.1, 0.7), 1: Finished(FinishReason.LENGTH, 6, 0.3, 0.2, 1)}
    done = stats.timeline(100.0, Outcome.DONE, (), completion_tokens=3)
    assert (done.completion_tokens, done.prompt_tokens, done.total_s) == (10, 7, 9.0)
    assert (done.queue_s, done.pull_s, done.prefill_s, done.decode_s) == (0.25, 0.5, 0.3, 0.7)
    failed = stats.timeline(100.0, Outcome.FAILED, (), completion_tokens=3)
    assert failed.completion_tokens == 3
