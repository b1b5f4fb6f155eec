"""Waits that are predicted from what waits and how fast a queue is served."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.examples import examples
from triptych.domain.tenant import Tenant
from triptych.machine.router.wait_predictor import SHOWN_TENANTS, WaitPredictor


class Router:
    """An predictor with a clock; requests of one class, in order of arrival."""

    def __init__(self) -> None:
        self.predictor = WaitPredictor()
        self.now_s = 0.0
        self.number = 0
        self.served = 0

    def arrive(self, count: int = 1, *, priority: int = 0, media: int = 0, prompt: int = 10) -> None:
        for _ in range(count):
            self.number += 1
            self.predictor.prepared(
                self.number, "text", priority=priority, media_work=media, prompt_tokens=prompt, now_s=self.now_s
            )
        self.predictor.validate()

    def serve(self, count: int, *, every_s: float) -> None:
        """The oldest, one after the other."""
        for _ in range(count):
            self.now_s += every_s
            self.served += 1
            self.predictor.answering(self.served, self.now_s)
            self.predictor.ended(self.served, 0.0, self.now_s)
        self.predictor.validate()

    def expire(self, count: int) -> None:
        """The oldest, at once."""
        for _ in range(count):
            self.served += 1
            self.predictor.ended(self.served, None, self.now_s)
        self.predictor.validate()

    def wait_s(self, priority: int = 0, *, media: bool = False) -> float:
        return self.predictor.wait_s(priority, self.now_s, media=media)


def test_the_wait_is_what_is_ahead_over_the_rate_at_which_the_queue_is_served() -> None:
    router = Router()
    router.arrive(30)
    router.serve(10, every_s=0.2)
    assert router.wait_s() == pytest.approx(20 * 0.2)
    router.arrive(5, prompt=100)
    assert router.wait_s() == pytest.approx((200 + 500) / 50), "work is tokens"


@pytest.mark.parametrize(("count", "every_s"), [(3, 1.0), (9, 0.1)])
def test_nothing_is_predicted_before_there_are_observations(count: int, every_s: float) -> None:
    router = Router()
    router.arrive(30)
    assert router.wait_s() == 0.0
    router.serve(count, every_s=every_s)
    assert router.wait_s() == 0.0


@pytest.mark.parametrize("per_s", [60, 250, 5000])
def test_the_wait_is_predicted_however_fast_requests_are_served(per_s: int) -> None:
    router = Router()
    router.arrive(8 * per_s)
    router.serve(2 * per_s, every_s=1 / per_s)
    assert router.wait_s() == pytest.approx(6.0, rel=0.02)
    router.serve(2 * per_s, every_s=2 / per_s)
    assert router.wait_s() == pytest.approx(8.0, rel=0.02), "it follows a queue that is served more slowly"


def test_no_rate_is_measured_without_a_queue() -> None:
    """A slow stream of requests would else look like a slow stage, and a burst like a long wait."""
    router = Router()
    for _ in range(100):
        router.arrive(3)
        router.serve(3, every_s=1.0)
    router.arrive(100)
    assert router.wait_s() == 0.0


def test_the_rate_follows_the_last_requests() -> None:
    router = Router()
    router.arrive(400)
    router.serve(100, every_s=0.1)
    router.serve(64, every_s=0.5)
    assert router.wait_s() == pytest.approx(236 * 0.5)


def test_a_rate_is_remembered_for_a_time_after_its_queue_has_ended() -> None:
    router = Router()
    router.arrive(20)
    router.serve(20, every_s=0.5)
    assert router.wait_s() == 0.0
    router.now_s += 50.0
    router.arrive(3)
    assert router.wait_s() == pytest.approx(1.5, rel=0.1)
    router.now_s += 20.0
    assert router.wait_s() == 0.0


def test_a_queue_of_which_most_end_by_their_deadlines_has_a_rate_too() -> None:
    """Else nothing would be refused, and nothing be served."""
    router = Router()
    router.arrive(20)
    router.serve(1, every_s=0.5)
    router.expire(10)
    assert router.wait_s() == 0.0, "it is too early to tell"
    router.now_s += 1.5
    router.expire(1)
    assert router.wait_s() == pytest.approx(8 * 2.0 / 2), "two of 20 in two seconds, at most"


def test_a_rate_that_was_measured_during_an_outage_does_not_stay() -> None:
    router = Router()
    router.arrive(10)
    router.now_s += 30.0
    router.serve(10, every_s=0.1)
    router.arrive(2)
    assert router.wait_s() > 5.0
    router.serve(2, every_s=0.1)
    for _ in range(20):
        router.arrive(1)
        router.serve(1, every_s=0.1)
    router.arrive(2)
    assert router.wait_s() == pytest.approx(0.2, rel=0.2), "as fast as requests are served without a queue"


def test_only_what_goes_before_a_request_counts() -> None:
    router = Router()
    router.arrive(10)
    router.arrive(20, priority=1)
    router.serve(5, every_s=0.5)
    assert (router.wait_s(-1), router.wait_s(0), router.wait_s(1)) == pytest.approx((0.0, 2.5, 12.5))


def test_images_wait_for_the_encoders_and_then_for_the_text_instances() -> None:
    router = Router()
    router.arrive(20, media=100)
    for number in range(1, 11):
        router.now_s += 0.5
        router.predictor.encoded(number, router.now_s)
        router.predictor.encoded(number, router.now_s)
    assert (router.wait_s(), router.wait_s(media=True)) == pytest.approx((0.0, 10 * 0.5))
    router.serve(4, every_s=0.5)
    text_s = 60 / (40 / 5.0)
    assert router.wait_s() == pytest.approx(text_s), "the queue for text instances began 5 s ago"
    assert router.wait_s(media=True) == pytest.approx(text_s + 10 * 0.5)


def test_what_ends_unserved_frees_its_place_and_is_no_service() -> None:
    router = Router()
    router.arrive(30)
    router.serve(10, every_s=0.2)
    for number in range(11, 21):
        router.predictor.ended(number, None, router.now_s)
    router.predictor.validate()
    assert router.wait_s() == pytest.approx(10 * 0.2)


def test_the_time_of_an_answer_is_a_mean_by_class() -> None:
    router = Router()
    assert router.predictor.answer_s("text") == 0.0
    for answer_s in (1.0, 2.0):
        router.arrive()
        router.predictor.ended(router.number, answer_s, 0.0)
    assert router.predictor.answer_s("text") == pytest.approx(1.1)
    assert router.predictor.answer_s("image-256") == 0.0


def test_what_is_unknown_has_no_effect() -> None:
    router = Router()
    for number in (1, 2):
        router.predictor.encoded(number, 0.0)
        router.predictor.answering(number, 0.0)
        router.predictor.ended(number, 1.0, 0.0)
    router.predictor.validate()
    assert router.predictor.answer_s("text") == 0.0


class Steps(RuleBasedStateMachine):
    """Any order of steps keeps the sums right, and nothing is left once all are over."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor = WaitPredictor()
        self.now_s = 0.0
        self.number = 0
        self.running: set[int] = set()

    @rule(media=st.sampled_from([0, 7]), prompt=st.integers(0, 9), priority=st.integers(-1, 1))
    def arrive(self, media: int, prompt: int, priority: int) -> None:
        self.number += 1
        self.running.add(self.number)
        self.predictor.prepared(
            self.number, "text", priority=priority, media_work=media, prompt_tokens=prompt, now_s=self.now_s
        )

    @precondition(lambda self: self.running)
    @rule(data=st.data(), step=st.sampled_from(["dispatched", "answering", "done", "failed"]))
    def step(self, data: st.DataObject, step: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        self.now_s += 0.3
        if step == "dispatched":
            self.predictor.encoded(number, self.now_s)
        elif step == "answering":
            self.predictor.answering(number, self.now_s)
        else:
            self.running.discard(number)
            self.predictor.ended(number, 1.0 if step == "done" else None, self.now_s)

    @invariant()
    def adds_up(self) -> None:
        self.predictor.validate()
        waits = [self.predictor.wait_s(priority, self.now_s, media=True) for priority in (-1, 0, 1)]
        assert waits == sorted(waits)
        assert self.running or waits[-1] == 0.0


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=examples(50), stateful_step_count=60, deadline=None)


def test_a_tenant_waits_for_its_own_work_at_its_part_of_the_rate() -> None:
    predictor, hog, other = WaitPredictor(), Tenant("hog"), Tenant("other")
    for number in range(40):
        predictor.prepared(number, "text", priority=0, media_work=0, prompt_tokens=10, now_s=0.0, tenant=hog)
    for number in range(10):
        predictor.answering(number, 0.2 * (number + 1))
    assert predictor.wait_s(0, 2.0, media=False, tenant=hog) == pytest.approx(6.0)
    assert predictor.see(other, 2.0)
    assert predictor.wait_s(0, 2.0, media=False, tenant=other) == 0.0
    predictor.prepared(100, "text", priority=0, media_work=0, prompt_tokens=10, now_s=2.0, tenant=other)
    assert predictor.wait_s(0, 2.0, media=False, tenant=other) == pytest.approx(0.4), "half of the rate"
    assert predictor.wait_s(0, 2.0, media=False, tenant=hog) == pytest.approx(6.2), "and not more than all there is"
    assert predictor.takes_s(2.0, media=False, tenant=other) == pytest.approx(0.4)
    predictor.validate()


def test_without_fairness_tenants_are_not_told_apart() -> None:
    predictor = WaitPredictor(None)
    assert not predictor.see(Tenant("a"), 0.0)
    assert not predictor.see(Tenant("b"), 0.0)


def test_a_tenant_is_known_for_ten_minutes() -> None:
    predictor = WaitPredictor()
    predictor.see(Tenant("a"), 0.0)
    assert predictor.see(Tenant("b"), 599.0)
    assert not predictor.see(Tenant("b"), 601.0)


def test_the_work_of_many_tenants_is_counted_under_few_names() -> None:
    predictor = WaitPredictor()
    for number in range(3 * SHOWN_TENANTS):
        tenant = Tenant(str(number))
        predictor.prepared(number, "text", priority=0, media_work=0, prompt_tokens=10, now_s=0.0, tenant=tenant)
        predictor.answering(number, 1.0)
    assert len(predictor.served) == SHOWN_TENANTS + 1
    assert sum(predictor.served.values()) == 30 * SHOWN_TENANTS
