from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.policy.backlog import (
    NO_WORK,
    Alone,
    Backlog,
    EncodeBacklog,
    Held,
    Price,
    Prices,
    TextBacklog,
    Work,
    ends_s,
)
from triptych.policy.placement.affinity import Holding
from triptych.policy.placement.items import Shortage, Why, place_items
from triptych.policy.placement.policy import PLACEMENTS
from triptych.policy.placement.pool import Candidate, Pool
from triptych.policy.placement.requests import RequestPlace, place_request
from triptych.policy.placement.wants import RequestWant, Want

CAT = (b"cat", b"")
PREDICTED = PLACEMENTS["predicted"]


@dataclass(eq=False)
class Fixed:
    """A ``Speed`` of one second per token and per byte from another host, half of that from the same one."""

    cores: int = 1
    priced: int = 0

    def alone(self, work: Work) -> Alone:
        self.priced += 1
        ready_s = work.pixels / 1000
        return Alone(work.tokens, 0.5 * work.tokens, work.answer_tokens, ready_s=ready_s, core_s=ready_s / self.cores)

    def pull_s(self, near_nbytes: int, far_nbytes: int) -> float:
        return 0.5 * near_nbytes + far_nbytes


SPEED = Fixed()


def end_s(backlog: Backlog, work: Work) -> float:
    found = ends_s([backlog], Prices(work))
    assert found is not None
    return found[0]


def candidate(name: str, backlog: Backlog | None = None, tokens: int = 0) -> Candidate:
    return Candidate(name, True, tokens, 1 if tokens else 0, 1000, 1000, instance_id=f"i-{name}", backlog=backlog)


def placed(*encoders: Candidate, want: Want, held: Holding | None = None) -> tuple[str, Why]:
    pool = Pool(encoders, held=lambda _: () if held is None else (held,))
    choices = place_items(pool, [want], PREDICTED, Random(7))
    assert not isinstance(choices, Shortage)
    return choices[0].encoder, choices[0].why


def text_chosen(pool: Pool, tokens: int, holders: Mapping[str, int] = MappingProxyType({})) -> str:
    chosen = place_request(pool, RequestWant(tokens, holders=holders), PREDICTED, None, Random(7))
    assert isinstance(chosen, RequestPlace)
    return chosen.name


@pytest.mark.parametrize(
    ("backlog", "work", "expected_s"),
    [
        (EncodeBacklog(SPEED), Work(10), 10.0),
        (EncodeBacklog(SPEED, 7.0), Work(10), 7.0 + 5.0),
        (EncodeBacklog(SPEED, 2.0), Work(10), 10.0),
        (EncodeBacklog(SPEED, 7.0, 4.0), Work(10, pixels=20_000), 24.0 + 10.0),
        (EncodeBacklog(SPEED, slowness=3.0), Work(10, nbytes=2), 30.0 + 2.0),
        (EncodeBacklog(SPEED, near_text=True), Work(10, nbytes=2), 10.0 + 1.0),
        (EncodeBacklog(SPEED, text_wait_s=0.0), Work(10, nbytes=2), 10.0),
        (EncodeBacklog(SPEED, text_wait_s=9.0), Work(10, nbytes=2), 10.0 + 2.0),
        (TextBacklog(SPEED, 3.0, 0.1), Work(10), 13.0),
        (TextBacklog(SPEED, 3.0, 0.1), Work(10, answer_tokens=20), 13.0 + 2.0),
        (TextBacklog(SPEED, 3.0, 0.1, slowness=2.0), Work(10, answer_tokens=20), 26.0 + 2.0),
    ],
)
def test_an_end_is_what_comes_before_and_what_the_work_takes(backlog: Backlog, work: Work, expected_s: float) -> None:
    """Preprocessing overlaps with what the engine has, and a pull is only for those that must pull."""
    assert end_s(backlog, work) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("instance_id", "host", "pull_s"),
    [("i-a", "h1", 0.5 * 4 + 14), ("i-b", "h1", 0.5 * 8 + 14), ("i-c", "h2", 0.5 * 10 + 12), ("i-d", "", 22)],
)
def test_embeddings_that_an_instance_or_its_host_holds_are_pulled_sooner(
    instance_id: str, host: str, pull_s: float
) -> None:
    held = Held.of({"i-a": 4, "i-e": 4, "i-f": 10, "i-x": 4}, {"i-a": "h1", "i-e": "h1", "i-f": "h2", "i-c": "h2"})
    backlog = TextBacklog(SPEED, instance_id=instance_id, host=host)
    assert end_s(backlog, Work(1, held=held)) == pytest.approx(1 + pull_s)
    behind = TextBacklog(SPEED, 100.0, instance_id=instance_id, host=host)
    assert end_s(behind, Work(1, held=held)) == pytest.approx(101.0), "it pulls while it waits"


def test_work_is_priced_once_for_instances_of_one_speed_and_unknown_if_one_is() -> None:
    speed, other = Fixed(), Fixed()
    backlogs = [EncodeBacklog(speed), EncodeBacklog(other), EncodeBacklog(speed)]
    assert ends_s(backlogs, Prices(Work(5))) == [5.0, 5.0, 5.0]
    assert (speed.priced, other.priced) == (1, 1)
    assert ends_s([*backlogs, None], Prices(NO_WORK)) is None


@given(st.floats(0, 100), st.floats(0, 100), st.integers(1, 50), st.integers(0, 50_000))
def test_a_further_item_never_ends_before_those_that_were_there(
    wait_s: float, prepared_s: float, tokens: int, pixels: int
) -> None:
    backlog = EncodeBacklog(SPEED, wait_s, prepared_s)
    work = Work(tokens, pixels=pixels)
    after = backlog.with_item(Price(SPEED, work))
    assert after.wait_s > backlog.wait_s
    assert after.prepared_s >= backlog.prepared_s
    assert end_s(after, work) >= end_s(backlog, work)


def test_the_first_predicted_end_wins_whatever_the_tokens() -> None:
    soon, late = EncodeBacklog(SPEED, 1.0), EncodeBacklog(SPEED, 90.0)
    want = Want(0, 5, 1, CAT)
    assert placed(candidate("a", late, 10), candidate("b", soon, 900), want=want) == ("b", Why.ROUTED)
    assert placed(candidate("a", None, 10), candidate("b", soon, 900), want=want) == ("a", Why.ROUTED), (
        "not known of all"
    )
    texts = Pool((candidate("a", TextBacklog(SPEED, 9.0), 10), candidate("b", TextBacklog(SPEED, 1.0), 900)))
    assert text_chosen(texts, tokens=5) == "b"


def test_a_holder_is_preferred_by_at_most_what_encoding_the_item_takes() -> None:
    want = Want(0, 5, 0, CAT)
    free, busy = (
        candidate("a", EncodeBacklog(SPEED)),
        [candidate("b", EncodeBacklog(SPEED, wait)) for wait in (7.5, 7.6)],
    )
    assert placed(free, busy[0], want=want, held=Holding("b")) == ("b", Why.HOLDS_EMBEDDING)
    assert placed(free, busy[1], want=want, held=Holding("b")) == ("a", Why.ROUTED)


@pytest.mark.parametrize(
    ("holding", "most_s", "why"),
    [
        (Holding("b", published=True), 47.5, Why.HOLDS_EMBEDDING),
        (Holding("b", encoding=True), 17.5, Why.ENCODES_ALREADY),
    ],
)
def test_what_is_held_or_being_encoded_is_weighed_in_seconds(holding: Holding, most_s: float, why: Why) -> None:
    want = Want(0, 5, 0, CAT)
    for wait_s, expected in ((most_s, ("b", why)), (most_s + 0.1, ("a", Why.ROUTED))):
        assert (
            placed(
                candidate("a", EncodeBacklog(SPEED)),
                candidate("b", EncodeBacklog(SPEED, wait_s)),
                want=want,
                held=holding,
            )
            == expected
        )


def test_items_of_a_request_spread_by_the_time_of_those_before_them() -> None:
    """Tokens are equal, but a scan takes a hundred times as long to preprocess."""
    encoders = [candidate(name, EncodeBacklog(Fixed())) for name in "ab"]
    sizes = (100_000, 1000, 1000, 1000)
    wants = [Want(at, 10, 1, (b"%d" % at, b""), pixels=pixels) for at, pixels in enumerate(sizes)]
    choices = place_items(Pool(encoders), wants, PREDICTED, Random(7))
    assert not isinstance(choices, Shortage)
    scan, *small = [choice.encoder for choice in choices]
    assert scan not in small


def test_content_decides_between_encoders_that_end_at_the_same_time() -> None:
    pool = Pool(tuple(candidate(name, EncodeBacklog(SPEED)) for name in "abcd"))

    def chosen(turn: int, content: bytes) -> str:
        choices = place_items(Pool(pool.candidates, turn), [Want(0, 5, 1, (content, b""))], PREDICTED, Random(turn))
        assert not isinstance(choices, Shortage)
        return choices[0].encoder

    assert len({chosen(turn, b"cat") for turn in range(8)}) == 1
    assert len({chosen(0, b"%d" % number) for number in range(40)}) == 4


def test_an_instance_that_does_both_takes_an_item_if_that_saves_more_than_it_costs() -> None:
    """Where to encode: the pull against the wait for the prompts of the text instance."""
    apart, want = candidate("a", EncodeBacklog(SPEED)), Want(0, 5, 3, CAT)
    assert placed(apart, candidate("b", EncodeBacklog(SPEED, text_wait_s=0.0)), want=want)[0] == "b"
    assert placed(apart, candidate("b", EncodeBacklog(SPEED, 5.4, text_wait_s=0.0)), want=want)[0] == "b"
    assert placed(apart, candidate("b", EncodeBacklog(SPEED, 5.6, text_wait_s=0.0)), want=want)[0] == "a"
    assert placed(apart, candidate("b", EncodeBacklog(SPEED, 2.6, text_wait_s=9.0)), want=want)[0] == "a"


def test_of_text_instances_that_end_at_the_same_time_a_holder_is_chosen() -> None:
    texts = tuple(candidate(name, TextBacklog(SPEED, 100.0, instance_id=f"i-{name}")) for name in "abc")
    for turn in range(3):
        assert text_chosen(Pool(texts, turn), tokens=3, holders={"i-b": 5}) == "b"
