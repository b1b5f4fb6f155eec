"""Load and attainment in windows, as requests begin, answer and end."""

from dataclasses import dataclass, replace

import pytest

from triptych.domain.mix import MAX_FORMS, Form
from triptych.domain.slo import NOTHING_EXPECTED, Expected, Isolated, Slo
from triptych.domain.timeline import ItemTimeline, Outcome, Timeline
from triptych.domain.windows import ClassWindow, Judged, Refusals, WindowReport, merged
from triptych.machine.router.attainment import AttainmentRecorder, Gaps, WindowLimits

ALONE = Isolated(prepare_s=0.0, encode_s=0.1, prefill_s=0.1, tbt_s=0.02)


@dataclass(frozen=True)
class Shape:
    class_name: str
    counts: ClassWindow
    isolated: Isolated | None = None


IMAGE = Shape("image-256", ClassWindow(arrivals=1, items=1, media_tokens=200, prompt_tokens=230), isolated=ALONE)
TEXT = Shape("text", ClassWindow(arrivals=1, prompt_tokens=30))
ITEM = ItemTimeline(0, "image", 28, 28, 200, "e1", encode_s=0.1)


def timeline(*, encode_s: float = 0.1, rest_s: float = 0.1, queue_s: float = 0.0, items: int = 1) -> Timeline:
    ttft_s = encode_s + rest_s
    return Timeline(
        "r",
        "m",
        Outcome.DONE,
        (ITEM,) * items,
        "t1",
        prompt_tokens=230,
        completion_tokens=11,
        encode_s=encode_s,
        queue_s=queue_s,
        ttft_s=ttft_s,
        total_s=ttft_s + 0.2,
    )


class Router:
    """A recorder with a clock."""

    def __init__(self, *slo: str, samples: int = 20) -> None:
        limits = WindowLimits(isolated_samples=samples)
        self.recorder = AttainmentRecorder(slo=Slo.parse(slo), limits=limits, epoch=7, now_s=0.0)
        self.now_s = 0.0
        self.number = 0
        self.gaps: Gaps

    @property
    def reports(self) -> list[WindowReport]:
        return self.recorder.reports(0, self.now_s)

    def arrives(self, shape: Shape, form: Form | None = None) -> int:
        self.number += 1
        self.gaps = self.recorder.prepared(
            self.number, shape.class_name, shape.counts, shape.isolated, waited_s=0.0, now_s=self.now_s, form=form
        )
        return self.number

    def is_over(self, number: int, what: Timeline) -> None:
        self.recorder.ended(number, what, self.now_s)
        self.recorder.validate()

    def serves(self, shape: Shape, what: Timeline) -> None:
        number = self.arrives(shape)
        self.recorder.dispatched(number, "t1", self.now_s)
        self.recorder.answering(number, what.beginning, self.now_s)
        self.recorder.validate()
        self.is_over(number, what)

    def window(self, name: str = "image-256") -> ClassWindow:
        """Everything so far."""
        self.now_s += 1.0
        self.recorder.roll(self.now_s)
        return merged(self.reports).get(name, ClassWindow())


def test_a_window_has_the_load_at_arrival_and_the_outcome_at_the_end() -> None:
    router = Router("ttft=5x")
    number = router.arrives(IMAGE)
    begun = router.window()
    assert (begun.arrivals, begun.items, begun.media_tokens, begun.prompt_tokens) == (1, 1, 200, 230)
    assert (begun.done, begun.ttft) == (0, Judged())
    assert (router.reports[0].waiting, router.reports[0].waiting_media_tokens) == (1, 200)
    router.is_over(number, timeline())
    window = router.window()
    assert (window.arrivals, window.done, window.output_tokens, window.ttft) == (1, 1, 11, Judged(1, 0))
    assert router.reports[1].waiting == 0


def test_a_report_has_the_forms_of_the_requests_that_came_and_were_answered_in_its_window() -> None:
    router = Router()
    came = Form("text", 1, 0, prompt_tokens=30)
    for outcome in (Outcome.DONE, Outcome.DONE, Outcome.FAILED):
        router.is_over(router.arrives(TEXT, came), replace(timeline(items=0), outcome=outcome))
    router.window()
    assert set(router.reports[0].forms) == {
        Form("text", 3, 0, prompt_tokens=90),
        Form("text", 0, 2, prompt_tokens=60, output_tokens=22),
    }
    router.window()
    assert router.reports[1].forms == ()


def test_a_window_has_a_bounded_number_of_forms() -> None:
    router = Router()
    for number in range(500):
        router.arrives(TEXT, Form("image", 1, 0, number % 40, 2 ** (number % 13), 1, 0.0, 2 ** (number % 17)))
    router.window()
    assert len(router.reports[0].forms) == MAX_FORMS


def test_what_is_expected_of_a_request_is_what_it_is_judged_by() -> None:
    router = Router("ttft=5x", "text:ttft=300ms", samples=20)
    assert router.recorder.expected(router.arrives(IMAGE)) == Expected(1.0, ALONE)
    assert router.recorder.expected(router.arrives(TEXT)) == Expected(0.3)
    assert router.recorder.expected(99) == NOTHING_EXPECTED


def test_an_objective_relative_to_a_latency_is_expected_once_that_has_been_estimated() -> None:
    router = Router("ttft=5x", samples=20)
    assert router.recorder.expected(router.arrives(TEXT)) == NOTHING_EXPECTED
    for _ in range(20):
        router.serves(TEXT, timeline(encode_s=0.0, rest_s=0.2, items=0))
    found = router.recorder.expected(router.arrives(TEXT))
    assert found.isolated is not None
    assert found.isolated.ttft_s == pytest.approx(0.2, rel=0.1)
    assert found.ttft_limit_s == pytest.approx(5 * found.isolated.ttft_s)


def test_reports_are_numbered_and_say_how_long_they_are() -> None:
    router = Router()
    router.window()
    router.now_s += 0.5
    router.recorder.roll(router.now_s)
    router.window()
    assert [(report.epoch, report.sequence, report.duration_s) for report in router.reports] == [
        (7, 1, 1.0),
        (7, 2, 1.5),
    ]


@pytest.mark.parametrize(
    ("encode_s", "rest_s", "met", "encode", "prefill"),
    [(0.4, 0.5, 1, 0, 0), (0.8, 0.3, 0, 1, 0), (0.2, 0.9, 0, 0, 1), (0.6, 0.6, 0, 1, 1)],
)
def test_a_missed_ttft_is_charged_to_the_stages_beyond_their_share(
    encode_s: float, rest_s: float, met: int, encode: int, prefill: int
) -> None:
    router = Router("ttft=5x")
    router.serves(IMAGE, timeline(encode_s=encode_s, rest_s=rest_s))
    window = router.window()
    assert window.ttft == Judged(met, 1 - met)
    assert (window.missed_encode, window.missed_prefill, window.missed_uncharged) == (encode, prefill, 0)


def test_a_request_that_waits_beyond_its_objective_is_a_miss_before_it_ends() -> None:
    router = Router("ttft=5x")
    router.arrives(IMAGE)
    assert router.window().ttft == Judged()
    window = router.window()
    assert (window.ttft, window.missed_encode, window.missed_prefill) == (Judged(0, 1), 1, 0)


def test_a_request_that_waits_for_its_first_token_is_charged_to_prefill() -> None:
    router = Router("ttft=5x")
    number = router.arrives(IMAGE)
    router.now_s = 0.3
    router.recorder.dispatched(number, "t1", router.now_s)
    router.now_s = 0.9
    router.window()
    window = router.window()
    assert (window.ttft, window.missed_encode, window.missed_prefill) == (Judged(0, 1), 0, 1)
    assert router.reports[-2].instances[0].judged == Judged(0, 1)


def test_a_late_answer_is_judged_once() -> None:
    router = Router("ttft=5x")
    number = router.arrives(IMAGE)
    router.window()
    router.window()
    router.recorder.answering(number, timeline(encode_s=3.0).beginning, router.now_s)
    router.is_over(number, timeline(encode_s=3.0))
    assert router.window().ttft == Judged(0, 1)


def test_a_client_that_leaves_before_its_objective_has_passed_is_not_judged() -> None:
    router = Router("ttft=5x")
    for outcome, error in ((Outcome.CANCELLED, ""), (Outcome.FAILED, "deadline_exceeded")):
        left = replace(timeline(), outcome=outcome, error=error, ttft_s=0.0, total_s=0.9)
        router.is_over(router.arrives(IMAGE), left)
    window = router.window()
    assert (window.impatient, window.cancelled, window.failed, window.ttft) == (2, 1, 1, Judged())


def test_a_client_that_leaves_after_its_objective_has_passed_is_a_miss() -> None:
    router = Router("ttft=5x")
    left = replace(timeline(), outcome=Outcome.CANCELLED, ttft_s=0.0, total_s=1.1)
    router.is_over(router.arrives(IMAGE), left)
    window = router.window()
    assert (window.impatient, window.cancelled, window.ttft) == (0, 1, Judged(0, 1))


def test_a_failure_is_counted_and_not_judged() -> None:
    router = Router("ttft=5x")
    failed = replace(timeline(), outcome=Outcome.FAILED, error="instance_lost", ttft_s=0.0, total_s=9.0)
    router.is_over(router.arrives(IMAGE), failed)
    window = router.window()
    assert (window.failed, window.impatient, window.ttft) == (1, 0, Judged())


def test_without_a_profile_the_limit_comes_from_the_fastest_requests() -> None:
    router = Router("ttft=5x", samples=3)
    quiet, busy = timeline(encode_s=0.0, rest_s=0.1, items=0), timeline(encode_s=0.0, rest_s=0.9, items=0)
    for _ in range(3):
        router.serves(TEXT, quiet)
    assert router.window("text").not_judged == 3
    router.serves(TEXT, quiet)
    router.serves(TEXT, busy)
    window = router.window("text")
    assert (window.not_judged, window.ttft, window.missed_prefill) == (3, Judged(1, 1), 1)
    limits = {(name, metric.value): limit for (name, metric), limit in router.recorder.limits_s().items()}
    assert limits["text", "ttft"] == pytest.approx(0.5, rel=0.1)


def test_a_larger_request_of_a_class_is_expected_to_be_encoded_for_longer() -> None:
    """By media tokens, and no smaller one for less than the fastest of its class."""
    router = Router("ttft=5x", samples=20)

    def shape(tokens: int) -> Shape:
        return Shape("image-1024", ClassWindow(arrivals=1, items=1, media_tokens=tokens, prompt_tokens=tokens + 30))

    for tokens in (300, 400) * 10:
        router.serves(shape(tokens), timeline(encode_s=0.001 * tokens, rest_s=0.1))
    found = [router.recorder.expected(router.arrives(shape(tokens))).isolated for tokens in (270, 300, 600, 1000)]
    assert [None if expected is None else expected.encode_s for expected in found] == pytest.approx(
        [0.3, 0.3, 0.6, 1.0], rel=0.1
    )


def test_the_wait_for_the_engine_is_no_part_of_an_estimated_latency() -> None:
    router = Router("ttft=5x", samples=1)
    router.serves(TEXT, timeline(encode_s=0.0, rest_s=1.1, queue_s=1.0, items=0))
    limits = {(name, metric.value): limit for (name, metric), limit in router.recorder.limits_s().items()}
    assert limits["text", "ttft"] == pytest.approx(0.5, rel=0.1)


def test_an_absolute_limit_needs_no_isolated_latency_but_charges_nobody_without_one() -> None:
    router = Router("ttft=0.5s")
    router.serves(TEXT, timeline(encode_s=0.0, rest_s=0.9, items=0))
    window = router.window("text")
    assert (window.ttft, window.missed_uncharged, window.missed_prefill) == (Judged(0, 1), 1, 0)


def test_the_99th_percentile_of_the_gaps_is_judged() -> None:
    router = Router("tbt=0.1s")
    for slow in (0, 1, 2):
        number = router.arrives(TEXT)
        gaps = router.gaps
        gaps.tokens(0, 1, at_s := 0.0)
        for index in range(100):
            gaps.tokens(0, 1, at_s := at_s + (0.2 if index < slow else 0.05))
        router.is_over(number, timeline(items=0))
    window = router.window("text")
    assert (window.tbt, window.gaps, window.gaps_over) == (Judged(2, 1), 300, 3)
    assert window.tbt_s.quantile_s(0.5) == pytest.approx(0.05, rel=0.1)


def test_choices_have_gaps_of_their_own_and_tokens_that_come_together_share_one() -> None:
    router = Router("tbt=0.1s")
    router.arrives(TEXT)
    gaps = router.gaps
    gaps.tokens(0, 1, 0.0)
    gaps.tokens(1, 1, 0.15)
    gaps.tokens(0, 4, 0.2)
    assert (gaps.count, gaps.over_limit) == (4, 0)
    gaps.tokens(1, 1, 0.3)
    assert (gaps.count, gaps.over_limit) == (5, 1)


def test_an_end_to_end_limit_grows_with_the_answer() -> None:
    router = Router("e2e=2x")
    shape = replace(IMAGE, isolated=replace(ALONE, tbt_s=0.1))
    for tokens, total_s in ((1, 0.39), (1, 0.41), (11, 2.39), (11, 2.41)):
        router.serves(shape, replace(timeline(), completion_tokens=tokens, total_s=total_s))
    assert router.window().e2e == Judged(2, 2)


def test_a_sick_instance_has_the_misses() -> None:
    router = Router("ttft=5x")
    router.serves(IMAGE, timeline(rest_s=2.0))
    router.serves(IMAGE, timeline())
    router.window()
    judged = {instance.instance_id: instance.judged for instance in router.reports[0].instances}
    assert judged == {"t1": Judged(1, 1), "e1": Judged(2, 0)}


def test_refusals_are_counted_by_whether_more_instances_would_help() -> None:
    router = Router()
    for overloaded in (True, False, True):
        router.recorder.refused(overloaded=overloaded, now_s=router.now_s)
    router.window()
    assert router.reports[0].refusals == Refusals(2, 1)


def test_embeddings_from_a_cache_are_told_apart() -> None:
    router = Router()
    hit = replace(timeline(), items=(ITEM, replace(ITEM, item=1, encoder_cached=True)))
    router.serves(replace(IMAGE, counts=replace(IMAGE.counts, items=2, media_tokens=400)), hit)
    window = router.window()
    assert (window.cached_tokens, window.finished_media_tokens) == (200, 400)


def test_the_sliding_window_forgets() -> None:
    router = Router("ttft=5x")
    router.serves(IMAGE, timeline())
    router.window()
    assert router.recorder.window["image-256"].ttft == Judged(1, 0)
    for _ in range(60):
        router.window()
    assert router.recorder.window == {}


def test_steps_of_an_unknown_request_change_nothing() -> None:
    router = Router("ttft=5x")
    router.recorder.dispatched(9, "t1", router.now_s)
    router.recorder.answering(9, timeline().beginning, router.now_s)
    router.is_over(9, timeline())
    assert router.window() == ClassWindow()
