from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from triptych.domain.media import Modality
from triptych.domain.queue_position import RelativeQueuePosition
from triptych.machine.encoder.batch_queue import (
    Arrive,
    BatchLimits,
    BatchQueue,
    CallerLeft,
    Done,
    Drop,
    Effect,
    EncodeBatch,
    ItemPrepared,
    RefuseCaller,
    StartPreparing,
    Take,
)
from triptych.policy.iteration import ImageBudget

MOST = 3
"""Prepared at a time."""
LIMITS = BatchLimits(
    max_waiting_items=4, max_prepared_bytes=1000, max_batch_items=3, max_batch_tokens=20, max_batch_bytes=600
)


def arrive(
    name: str,
    waiter: int = 0,
    *,
    nbytes: int = 100,
    tokens: int = 10,
    deadline_s: float = 10.0,
    priority: int = 0,
    modality: Modality = Modality.IMAGE,
) -> Arrive:
    return Arrive(name.encode(), waiter, tokens, nbytes, deadline_s, priority, modality)


def waiting(*names: str) -> BatchQueue:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    for name in names:
        assert queue.handle(arrive(name), 0.0) == [StartPreparing(name.encode())]
        assert queue.handle(ItemPrepared(name.encode(), 10, 100), 0.0) == []
    return queue


def test_batches_follow_the_order_within_their_bounds() -> None:
    queue = waiting("a", "b", "c")
    assert queue.handle(Take(), 0.0) == [EncodeBatch((b"a", b"b"))]
    assert queue.handle(Take(), 0.0) == [EncodeBatch((b"c",))]
    assert queue.handle(Take(), 0.0) == []
    assert (queue.pending_items, queue.pending_tokens) == (3, 30)
    for name in (b"a", b"b", b"c"):
        queue.handle(Done(name), 0.0)
    assert (queue.pending_items, queue.nbytes) == (0, 0)


def test_a_batch_is_bounded_in_bytes_too() -> None:
    queue = BatchQueue(replace(LIMITS, max_batch_bytes=250, max_batch_tokens=1000), max_preparing=MOST)
    for name, nbytes in ((b"a", 300), (b"b", 100), (b"c", 100), (b"d", 100)):
        queue.handle(arrive(name.decode(), nbytes=nbytes), 0.0)
        queue.handle(ItemPrepared(name, 10, nbytes), 0.0)
    assert queue.handle(Take(), 0.0) == [EncodeBatch((b"a",))], "an item too large for any batch runs alone"
    assert queue.handle(Take(), 0.0) == [EncodeBatch((b"b", b"c"))]
    assert queue.handle(Take(), 0.0) == [EncodeBatch((b"d",))]


def test_by_default_an_item_waits_for_no_more_than_2048_tokens_before_it_and_shares_its_pass_with_as_many() -> None:
    """With 8192 an item of 4 tokens was done only with those of 900 ms, and what came waited for them as long."""
    queue = BatchQueue(BatchLimits(), max_preparing=MOST)
    for name, tokens in (("small", 4), ("b", 1024), ("c", 1020), ("d", 1024), ("large", 5000)):
        queue.handle(arrive(name), 0.0)
        queue.handle(ItemPrepared(name.encode(), tokens, 100), 0.0)
    assert queue.handle(Take(), 0.0) == [EncodeBatch((b"small", b"b", b"c"))]
    assert queue.handle(Take(), 0.0) == [EncodeBatch((b"d",))]
    assert queue.handle(Take(), 0.0) == [EncodeBatch((b"large",))]


def test_a_budget_can_only_tighten_the_bounds_of_a_batch() -> None:
    queue = waiting("a", "b", "c", "d")
    assert queue.handle(Take(ImageBudget(tokens=10, nbytes=600)), 0.0) == [EncodeBatch((b"a",))]
    assert queue.handle(Take(ImageBudget(tokens=20, nbytes=199)), 0.0) == [EncodeBatch((b"b",))]
    assert queue.handle(Take(ImageBudget(tokens=1, nbytes=1)), 0.0) == [EncodeBatch((b"c",))], (
        "an item above the budget runs alone"
    )
    queue = waiting("a", "b", "c", "d")
    assert queue.handle(Take(ImageBudget(tokens=999, nbytes=9999)), 0.0) == [EncodeBatch((b"a", b"b"))]


def test_the_first_turn_is_that_of_the_item_that_is_taken_next() -> None:
    queue = BatchQueue(replace(LIMITS, max_batch_items=1), max_preparing=MOST)
    assert queue.first_queue_position(0.0) is None
    queue.handle(arrive("a", deadline_s=9.0), 0.0)
    assert queue.first_queue_position(0.0) is None, "it is being prepared"
    queue.handle(ItemPrepared(b"a", 10, 100), 0.0)
    late = queue.first_queue_position(0.0)
    queue.handle(arrive("b", deadline_s=5.0), 0.0)
    queue.handle(ItemPrepared(b"b", 10, 100), 0.0)
    early = queue.first_queue_position(0.0)
    assert late is not None
    assert early is not None
    assert early < late
    assert queue.handle(Take(), 0.0) == [EncodeBatch((b"b",))]
    assert queue.first_queue_position(0.0) == late


def test_the_queue_knows_since_when_an_item_has_been_ready() -> None:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    seen = [queue.waiting_since_s]
    for now_s, name in enumerate((b"a", b"b", b"c"), 1):
        queue.handle(arrive(name.decode()), 0.0)
        seen.append(queue.waiting_since_s)  # an item in preprocessing does not wait yet
        queue.handle(ItemPrepared(name, 10, 100), float(now_s))
    assert seen == [None, None, 1.0, 1.0]
    queue.handle(Take(), 4.0)
    seen = [queue.waiting_since_s]
    queue.handle(CallerLeft(b"c", 0), 5.0)
    assert [*seen, queue.waiting_since_s] == [3.0, None]


def test_what_is_in_no_batch_has_not_begun() -> None:
    queue = waiting("a", "b", "c")
    assert isinstance(queue.handle(Take(), 0.0)[0], EncodeBatch)
    queue.handle(arrive("d"), 0.0)
    assert queue.unbegun == [b"c", b"d"]


def test_equal_items_are_one_entry() -> None:
    queue = waiting("a")
    assert queue.handle(arrive("a", 1), 0.0) == []
    assert queue.pending_items == 1
    assert queue.handle(CallerLeft(b"a", 0), 0.0) == []
    assert queue.pending_items == 1
    [drop] = queue.handle(CallerLeft(b"a", 1), 0.0)
    assert isinstance(drop, Drop)
    assert not drop.expired
    assert queue.pending_items == 0


def test_a_full_queue_refuses_on_arrival() -> None:
    queue = waiting("a", "b", "c", "d")
    [refused] = queue.handle(arrive("e"), 0.0)
    assert isinstance(refused, RefuseCaller)
    assert refused.fits


def test_bytes_are_bounded_and_an_item_above_the_bound_is_refused_for_good() -> None:
    queue = waiting("a")
    [now] = queue.handle(arrive("b", nbytes=950), 0.0)
    [never] = queue.handle(arrive("c", nbytes=1001), 0.0)
    assert isinstance(now, RefuseCaller)
    assert isinstance(never, RefuseCaller)
    assert (now.fits, never.fits) == (True, False)


def test_an_item_that_fills_the_queue_exactly_is_accepted() -> None:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    assert queue.handle(arrive("a", nbytes=1000), 0.0) == [StartPreparing(b"a")]
    queue = waiting("a")
    assert queue.handle(arrive("b", nbytes=900), 0.0) == [StartPreparing(b"b")]
    assert queue.handle(ItemPrepared(b"b", 10, 900), 0.0) == []
    assert queue.nbytes == 1000


def test_an_item_that_turns_out_too_large_is_dropped() -> None:
    queue = waiting("a")
    queue.handle(arrive("b"), 0.0)
    [drop] = queue.handle(ItemPrepared(b"b", 10, 950), 0.0)
    assert isinstance(drop, Drop)
    assert not drop.expired
    assert "950" in drop.reason
    assert queue.nbytes == 100


def test_an_item_past_all_its_deadlines_is_not_encoded() -> None:
    queue = waiting("a", "b")
    queue.handle(arrive("a", 1, deadline_s=3.0), 0.0)
    queue.handle(CallerLeft(b"a", 0), 0.0)
    drop, encode = queue.handle(Take(), 3.0)
    assert isinstance(drop, Drop)
    assert drop.expired
    assert encode == EncodeBatch((b"b",))


def test_an_abandoned_item_is_dropped_after_preprocessing_unless_a_new_caller_comes() -> None:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    queue.handle(arrive("a"), 0.0)
    assert queue.handle(CallerLeft(b"a", 0), 0.0) == []
    assert queue.nbytes == 100
    assert queue.handle(arrive("a", 1), 0.0) == []
    assert queue.handle(ItemPrepared(b"a", 10, 100), 0.0) == []
    queue.handle(arrive("b"), 0.0)
    queue.handle(CallerLeft(b"b", 0), 0.0)
    [drop] = queue.handle(ItemPrepared(b"b", 10, 100), 0.0)
    assert isinstance(drop, Drop)
    assert not drop.expired


def test_items_are_preprocessed_in_order_with_bounded_concurrency() -> None:
    queue = BatchQueue(replace(LIMITS, max_waiting_items=9), max_preparing=1)
    assert queue.handle(arrive("first", 0), 0.0) == [StartPreparing(b"first")]
    for waiter, (name, deadline_s, priority) in enumerate(
        [("low", 1.0, 1), ("late", 9.0, 0), ("soon", 2.0, 0), ("high", 20.0, -1)], 1
    ):
        assert queue.handle(arrive(name, waiter, deadline_s=deadline_s, priority=priority), 0.0) == []
    begun = [b"first"]
    while len(begun) < 5:
        [start] = queue.handle(ItemPrepared(begun[-1], 10, 100), 0.0)
        assert isinstance(start, StartPreparing)
        queue.validate()
        begun.append(start.key)
    assert begun == [b"first", b"high", b"soon", b"late", b"low"]


def test_items_are_taken_by_what_is_due_and_what_is_lost_goes_last() -> None:
    queue = BatchQueue(replace(LIMITS, max_batch_items=1), max_preparing=MOST)
    for waiter, (name, due_in_s, lost_in_s) in enumerate([("long", 5.5, 5.0), ("lost", 1.0, 0.5), ("short", 3.0, 2.5)]):
        queue.handle(
            replace(arrive(name, waiter, deadline_s=99.0), position=RelativeQueuePosition(due_in_s, lost_in_s)), 0.0
        )
        queue.handle(ItemPrepared(name.encode(), 10, 100), 0.0)
    order = [queue.handle(Take(), 1.0) for _ in range(3)]
    assert order == [[EncodeBatch((b"short",))], [EncodeBatch((b"long",))], [EncodeBatch((b"lost",))]]


def test_an_item_is_not_lost_while_one_of_its_callers_can_still_be_served_in_time() -> None:
    queue = BatchQueue(replace(LIMITS, max_batch_items=1), max_preparing=MOST)
    for waiter, (name, due_in_s, lost_in_s) in enumerate([("other", 8.0, 7.0), ("both", 1.0, 0.5), ("both", 6.0, 5.0)]):
        queue.handle(
            replace(arrive(name, waiter, deadline_s=99.0), position=RelativeQueuePosition(due_in_s, lost_in_s)), 0.0
        )
    for key in (b"other", b"both"):
        queue.handle(ItemPrepared(key, 10, 100), 0.0)
    assert queue.handle(Take(), 1.0) == [EncodeBatch((b"both",))]


def test_the_preparing_of_what_is_lost_waits_for_that_of_the_others() -> None:
    queue = BatchQueue(LIMITS, max_preparing=1)
    queue.handle(arrive("first"), 0.0)
    for waiter, (name, due_in_s, lost_in_s) in enumerate([("lost", 1.0, 0.5), ("short", 3.0, 2.5)], 1):
        queue.handle(
            replace(arrive(name, waiter, deadline_s=99.0), position=RelativeQueuePosition(due_in_s, lost_in_s)), 0.0
        )
    assert queue.handle(ItemPrepared(b"first", 10, 100), 1.0) == [StartPreparing(b"short")]


def test_an_item_is_batched_in_the_order_of_its_most_urgent_caller() -> None:
    queue = BatchQueue(replace(LIMITS, max_batch_items=1), max_preparing=MOST)
    for waiter, (name, priority) in enumerate([("a", 1), ("b", 0), ("c", 1)]):
        queue.handle(arrive(name, waiter, priority=priority), 0.0)
        queue.handle(ItemPrepared(name.encode(), 10, 100), 0.0)
    queue.handle(arrive("c", 9, priority=-1), 0.0)
    order = [queue.handle(Take(), 0.0) for _ in range(3)]
    assert order == [[EncodeBatch((b"c",))], [EncodeBatch((b"b",))], [EncodeBatch((b"a",))]]


def test_abandoned_and_failed_preparations_free_their_place() -> None:
    queue = BatchQueue(LIMITS, max_preparing=1)
    for waiter, name in enumerate("abc"):
        queue.handle(arrive(name, waiter), 0.0)
    [drop] = queue.handle(CallerLeft(b"b", 1), 0.0)
    assert isinstance(drop, Drop)
    assert queue.handle(Done(b"a"), 0.0) == [StartPreparing(b"c")]
    queue.validate()


def test_the_longest_wait_is_reported_by_priority_until_the_item_is_encoded() -> None:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    for waiter, (name, priority) in enumerate([("a", 0), ("b", 7), ("c", 700)]):
        queue.handle(arrive(name, waiter, priority=priority), float(waiter))
    assert queue.longest_waits_s(5.0) == {0: 5.0, 7: 4.0, 8: 3.0}
    queue.handle(ItemPrepared(b"b", 10, 100), 5.0)
    queue.handle(Take(), 5.0)
    assert queue.longest_waits_s(6.0) == {0: 6.0, 8: 4.0}


@pytest.mark.parametrize("modality", [Modality.VIDEO, Modality.AUDIO])
def test_videos_and_audio_leave_a_thread_to_images(modality: Modality) -> None:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    started = [queue.handle(arrive(name, modality=modality), 0.0) for name in "abc"]
    assert started == [[StartPreparing(b"a")], [StartPreparing(b"b")], []]
    assert queue.handle(arrive("image", priority=5), 0.0) == [StartPreparing(b"image")]
    assert queue.handle(Done(b"image"), 0.0) == []
    assert queue.handle(ItemPrepared(b"a", 10, 100), 0.0) == [StartPreparing(b"c")]


def test_images_that_are_prepared_take_no_thread_that_is_kept_for_videos() -> None:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    for name, modality in (("image", Modality.IMAGE), ("a", Modality.VIDEO), ("b", Modality.VIDEO)):
        assert queue.handle(arrive(name, modality=modality), 0.0) == [StartPreparing(name.encode())]


def test_a_single_thread_prepares_videos_too() -> None:
    queue = BatchQueue(LIMITS, max_preparing=1)
    assert queue.handle(arrive("a", modality=Modality.VIDEO), 0.0) == [StartPreparing(b"a")]


def test_videos_and_audio_leave_room_in_the_queue_to_images() -> None:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    for name in "abc":
        queue.handle(arrive(name, modality=Modality.VIDEO), 0.0)
    [many] = queue.handle(arrive("d", modality=Modality.AUDIO), 0.0)
    assert isinstance(many, RefuseCaller)
    assert (many.fits, many.reason) == (True, "3 videos and audio clips are waiting, which is the limit")
    assert queue.handle(arrive("image"), 0.0) == [StartPreparing(b"image")]


def test_videos_and_audio_leave_bytes_to_images() -> None:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    queue.handle(arrive("a", nbytes=500, modality=Modality.VIDEO), 0.0)
    [now] = queue.handle(arrive("b", nbytes=251, modality=Modality.VIDEO), 0.0)
    [never] = queue.handle(arrive("b", nbytes=751, modality=Modality.VIDEO), 0.0)
    assert isinstance(now, RefuseCaller)
    assert isinstance(never, RefuseCaller)
    assert (now.fits, now.reason) == (
        True,
        "waiting videos and audio clips take 500 of 750 bytes, this one takes 251",
    )
    assert (never.fits, never.reason) == (False, "the item takes 751 bytes to prepare, the limit is 750")
    assert queue.handle(arrive("image", nbytes=500), 0.0) == [StartPreparing(b"image")]


def test_without_a_reserve_videos_may_take_everything() -> None:
    queue = BatchQueue(replace(LIMITS, reserved_image_share=0.0), max_preparing=MOST)
    started = [queue.handle(arrive(name, nbytes=333, modality=Modality.VIDEO), 0.0) for name in "abc"]
    assert started == [[StartPreparing(b"a")], [StartPreparing(b"b")], [StartPreparing(b"c")]]


class AnyOrder(RuleBasedStateMachine):
    """Any order of events: every entry is either encoded or dropped, once, and invariants hold."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = BatchQueue(LIMITS, max_preparing=MOST)
        self.now_s = 0.0
        self.waiter = 0
        self.preparing: set[bytes] = set()
        self.encoding: set[bytes] = set()
        self.here: dict[bytes, set[int]] = {}

    @rule(name=st.sampled_from("abcdefg"), nbytes=st.integers(1, 400), lasts_s=st.integers(0, 5))
    def arrive(self, name: str, nbytes: int, lasts_s: int) -> None:
        self.waiter += 1
        key = name.encode()
        effects = self.queue.handle(
            arrive(
                name,
                self.waiter,
                nbytes=nbytes,
                deadline_s=self.now_s + lasts_s,
                modality=Modality.VIDEO if name in "abcd" else Modality.IMAGE,
            ),
            self.now_s,
        )
        if any(isinstance(effect, RefuseCaller) for effect in effects):
            assert key not in self.here
            return
        self.here.setdefault(key, set()).add(self.waiter)
        self.note(effects)

    @rule(data=st.data(), nbytes=st.integers(1, 600), tokens=st.integers(1, 30))
    def prepared(self, data: st.DataObject, nbytes: int, tokens: int) -> None:
        if self.preparing:
            key = data.draw(st.sampled_from(sorted(self.preparing)))
            self.preparing.discard(key)
            self.note(self.queue.handle(ItemPrepared(key, tokens, nbytes), self.now_s))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        pairs = sorted((key, waiter) for key, waiters in self.here.items() for waiter in waiters)
        if pairs:
            key, waiter = data.draw(st.sampled_from(pairs))
            self.here[key].discard(waiter)
            self.note(self.queue.handle(CallerLeft(key, waiter), self.now_s))

    @rule()
    def take(self) -> None:
        effects = self.queue.handle(Take(), self.now_s)
        self.note(effects)
        for effect in effects:
            if isinstance(effect, EncodeBatch):
                assert 1 <= len(effect.keys) <= LIMITS.max_batch_items
                assert self.encoding.isdisjoint(effect.keys)
                assert self.preparing.isdisjoint(effect.keys)
                self.encoding.update(effect.keys)

    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        if self.encoding:
            key = data.draw(st.sampled_from(sorted(self.encoding)))
            self.encoding.discard(key)
            del self.here[key]
            self.note(self.queue.handle(Done(key), self.now_s))

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    def note(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Drop):
                assert effect.key not in self.encoding
                assert effect.key not in self.preparing
                del self.here[effect.key]
            elif isinstance(effect, StartPreparing):
                assert effect.key not in self.preparing
                self.preparing.add(effect.key)
                assert len(self.preparing) <= MOST

    @invariant()
    def consistent(self) -> None:
        self.queue.validate()
        assert self.queue.pending_items == len(self.here)


TestAnyOrder = AnyOrder.TestCase
