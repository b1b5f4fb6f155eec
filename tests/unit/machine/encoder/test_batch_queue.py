from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from triptych.domain.media import Modality
from triptych.domain.queue_position import BY_TIME_LIMIT, RelativeQueuePosition
from triptych.errors import InvalidMedia, Overloaded
from triptych.machine.encoder.batch_queue import BatchLimits, BatchQueue
from triptych.policy.iteration import ImageBudget

MOST = 3
"""Prepared at a time."""
LIMITS = BatchLimits(
    max_waiting_items=4, max_prepared_bytes=1000, max_batch_items=3, max_batch_tokens=20, max_batch_bytes=600
)


def arrive(
    queue: BatchQueue,
    name: str,
    waiter: int = 0,
    *,
    now_s: float = 0.0,
    nbytes: int = 100,
    tokens: int = 10,
    deadline_s: float = 10.0,
    priority: int = 0,
    modality: Modality = Modality.IMAGE,
    position: RelativeQueuePosition = BY_TIME_LIMIT,
) -> list[bytes]:
    return queue.arrive(
        name.encode(),
        waiter,
        tokens=tokens,
        nbytes=nbytes,
        deadline_s=deadline_s,
        now_s=now_s,
        priority=priority,
        modality=modality,
        position=position,
    )


def waiting(*names: str) -> BatchQueue:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    for name in names:
        assert arrive(queue, name) == [name.encode()]
        assert queue.prepared(name.encode(), 10, 100, 0.0) == []
    return queue


def test_batches_follow_the_order_within_their_bounds() -> None:
    queue = waiting("a", "b", "c")
    assert queue.take(0.0) == [b"a", b"b"]
    assert queue.take(0.0) == [b"c"]
    assert queue.take(0.0) == []
    assert (queue.pending_items, queue.pending_tokens) == (3, 30)
    for name in (b"a", b"b", b"c"):
        queue.done(name, 0.0)
    assert (queue.pending_items, queue.nbytes) == (0, 0)


def test_a_batch_is_bounded_in_bytes_too() -> None:
    queue = BatchQueue(replace(LIMITS, max_batch_bytes=250, max_batch_tokens=1000), max_preparing=MOST)
    for name, nbytes in ((b"a", 300), (b"b", 100), (b"c", 100), (b"d", 100)):
        arrive(queue, name.decode(), nbytes=nbytes)
        queue.prepared(name, 10, nbytes, 0.0)
    assert queue.take(0.0) == [b"a"], "an item too large for any batch runs alone"
    assert queue.take(0.0) == [b"b", b"c"]
    assert queue.take(0.0) == [b"d"]


def test_by_default_an_item_waits_for_no_more_than_2048_tokens_before_it_and_shares_its_pass_with_as_many() -> None:
    """With 8192 an item of 4 tokens was done only with those of 900 ms, and what came waited for them as long."""
    queue = BatchQueue(BatchLimits(), max_preparing=MOST)
    for name, tokens in (("small", 4), ("b", 1024), ("c", 1020), ("d", 1024), ("large", 5000)):
        arrive(queue, name)
        queue.prepared(name.encode(), tokens, 100, 0.0)
    assert queue.take(0.0) == [b"small", b"b", b"c"]
    assert queue.take(0.0) == [b"d"]
    assert queue.take(0.0) == [b"large"]


def test_a_budget_can_only_tighten_the_bounds_of_a_batch() -> None:
    queue = waiting("a", "b", "c", "d")
    assert queue.take(0.0, ImageBudget(tokens=10, nbytes=600)) == [b"a"]
    assert queue.take(0.0, ImageBudget(tokens=20, nbytes=199)) == [b"b"]
    assert queue.take(0.0, ImageBudget(tokens=1, nbytes=1)) == [b"c"], "an item above the budget runs alone"
    queue = waiting("a", "b", "c", "d")
    assert queue.take(0.0, ImageBudget(tokens=999, nbytes=9999)) == [b"a", b"b"]


def test_the_first_turn_is_that_of_the_item_that_is_taken_next() -> None:
    queue = BatchQueue(replace(LIMITS, max_batch_items=1), max_preparing=MOST)
    assert queue.first_queue_position(0.0) is None
    arrive(queue, "a", deadline_s=9.0)
    assert queue.first_queue_position(0.0) is None, "it is being prepared"
    queue.prepared(b"a", 10, 100, 0.0)
    late = queue.first_queue_position(0.0)
    arrive(queue, "b", deadline_s=5.0)
    queue.prepared(b"b", 10, 100, 0.0)
    early = queue.first_queue_position(0.0)
    assert late is not None
    assert early is not None
    assert early < late
    assert queue.take(0.0) == [b"b"]
    assert queue.first_queue_position(0.0) == late


def test_the_queue_knows_since_when_an_item_has_been_ready() -> None:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    seen = [queue.waiting_since_s]
    for now_s, name in enumerate((b"a", b"b", b"c"), 1):
        arrive(queue, name.decode())
        seen.append(queue.waiting_since_s)  # an item in preprocessing does not wait yet
        queue.prepared(name, 10, 100, float(now_s))
    assert seen == [None, None, 1.0, 1.0]
    queue.take(4.0)
    seen = [queue.waiting_since_s]
    queue.leave(b"c", 0)
    assert [*seen, queue.waiting_since_s] == [3.0, None]


def test_what_is_in_no_batch_has_not_begun() -> None:
    queue = waiting("a", "b", "c")
    assert queue.take(0.0) == [b"a", b"b"]
    arrive(queue, "d")
    assert queue.unbegun == [b"c", b"d"]


def test_equal_items_are_one_entry() -> None:
    queue = waiting("a")
    assert arrive(queue, "a", 1) == []
    assert queue.pending_items == 1
    assert not queue.leave(b"a", 0)
    assert queue.pending_items == 1
    assert queue.leave(b"a", 1)
    assert queue.pending_items == 0


def test_a_full_queue_refuses_on_arrival() -> None:
    queue = waiting("a", "b", "c", "d")
    with pytest.raises(Overloaded, match="4 items are waiting, which is the limit"):
        arrive(queue, "e")


def test_bytes_are_bounded_and_an_item_above_the_bound_is_refused_for_good() -> None:
    queue = waiting("a")
    with pytest.raises(Overloaded):
        arrive(queue, "b", nbytes=950)
    with pytest.raises(InvalidMedia):
        arrive(queue, "c", nbytes=1001)
    assert queue.pending_items == 1


def test_an_item_that_fills_the_queue_exactly_is_accepted() -> None:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    assert arrive(queue, "a", nbytes=1000) == [b"a"]
    queue = waiting("a")
    assert arrive(queue, "b", nbytes=900) == [b"b"]
    assert queue.prepared(b"b", 10, 900, 0.0) == []
    assert queue.nbytes == 1000


def test_an_item_that_turns_out_too_large_is_refused() -> None:
    queue = waiting("a")
    arrive(queue, "b")
    with pytest.raises(Overloaded, match="950"):
        queue.prepared(b"b", 10, 950, 0.0)
    queue.done(b"b", 0.0)
    assert queue.nbytes == 100


def test_an_item_past_all_its_deadlines_is_to_be_ended_before_a_batch_is_taken() -> None:
    queue = waiting("a", "b")
    arrive(queue, "a", 1, deadline_s=3.0)
    assert queue.expired(9.9) == []
    queue.leave(b"a", 0)
    assert queue.expired(2.9) == []
    assert queue.expired(3.0) == [b"a"]
    queue.done(b"a", 3.0)
    assert queue.take(3.0) == [b"b"]


def test_an_abandoned_item_ends_after_preprocessing_unless_a_new_caller_comes() -> None:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    arrive(queue, "a")
    assert not queue.leave(b"a", 0)
    assert queue.nbytes == 100
    assert arrive(queue, "a", 1) == []
    assert queue.prepared(b"a", 10, 100, 0.0) == []
    arrive(queue, "b")
    queue.leave(b"b", 0)
    with pytest.raises(Overloaded, match="no waiters"):
        queue.prepared(b"b", 10, 100, 0.0)


def test_items_are_preprocessed_in_order_with_bounded_concurrency() -> None:
    queue = BatchQueue(replace(LIMITS, max_waiting_items=9), max_preparing=1)
    assert arrive(queue, "first", 0) == [b"first"]
    for waiter, (name, deadline_s, priority) in enumerate(
        [("low", 1.0, 1), ("late", 9.0, 0), ("soon", 2.0, 0), ("high", 20.0, -1)], 1
    ):
        assert arrive(queue, name, waiter, deadline_s=deadline_s, priority=priority) == []
    begun = [b"first"]
    while len(begun) < 5:
        begun += queue.prepared(begun[-1], 10, 100, 0.0)
        queue.validate()
    assert begun == [b"first", b"high", b"soon", b"late", b"low"]


def test_items_are_taken_by_what_is_due_and_what_is_lost_goes_last() -> None:
    queue = BatchQueue(replace(LIMITS, max_batch_items=1), max_preparing=MOST)
    for waiter, (name, due_in_s, lost_in_s) in enumerate([("long", 5.5, 5.0), ("lost", 1.0, 0.5), ("short", 3.0, 2.5)]):
        arrive(queue, name, waiter, deadline_s=99.0, position=RelativeQueuePosition(due_in_s, lost_in_s))
        queue.prepared(name.encode(), 10, 100, 0.0)
    order = [queue.take(1.0) for _ in range(3)]
    assert order == [[b"short"], [b"long"], [b"lost"]]


def test_an_item_is_not_lost_while_one_of_its_callers_can_still_be_served_in_time() -> None:
    queue = BatchQueue(replace(LIMITS, max_batch_items=1), max_preparing=MOST)
    for waiter, (name, due_in_s, lost_in_s) in enumerate([("other", 8.0, 7.0), ("both", 1.0, 0.5), ("both", 6.0, 5.0)]):
        arrive(queue, name, waiter, deadline_s=99.0, position=RelativeQueuePosition(due_in_s, lost_in_s))
    for key in (b"other", b"both"):
        queue.prepared(key, 10, 100, 0.0)
    assert queue.take(1.0) == [b"both"]


def test_the_preparing_of_what_is_lost_waits_for_that_of_the_others() -> None:
    queue = BatchQueue(LIMITS, max_preparing=1)
    arrive(queue, "first")
    for waiter, (name, due_in_s, lost_in_s) in enumerate([("lost", 1.0, 0.5), ("short", 3.0, 2.5)], 1):
        arrive(queue, name, waiter, deadline_s=99.0, position=RelativeQueuePosition(due_in_s, lost_in_s))
    assert queue.prepared(b"first", 10, 100, 1.0) == [b"short"]


def test_an_item_is_batched_in_the_order_of_its_most_urgent_caller() -> None:
    queue = BatchQueue(replace(LIMITS, max_batch_items=1), max_preparing=MOST)
    for waiter, (name, priority) in enumerate([("a", 1), ("b", 0), ("c", 1)]):
        arrive(queue, name, waiter, priority=priority)
        queue.prepared(name.encode(), 10, 100, 0.0)
    arrive(queue, "c", 9, priority=-1)
    order = [queue.take(0.0) for _ in range(3)]
    assert order == [[b"c"], [b"b"], [b"a"]]


def test_abandoned_and_failed_preparations_free_their_place() -> None:
    queue = BatchQueue(LIMITS, max_preparing=1)
    for waiter, name in enumerate("abc"):
        arrive(queue, name, waiter)
    assert queue.leave(b"b", 1)
    assert queue.done(b"a", 0.0) == [b"c"]
    queue.validate()


def test_the_longest_wait_is_reported_by_priority_until_the_item_is_encoded() -> None:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    for waiter, (name, priority) in enumerate([("a", 0), ("b", 7), ("c", 700)]):
        arrive(queue, name, waiter, priority=priority, now_s=float(waiter))
    assert queue.longest_waits_s(5.0) == {0: 5.0, 7: 4.0, 8: 3.0}
    queue.prepared(b"b", 10, 100, 5.0)
    queue.take(5.0)
    assert queue.longest_waits_s(6.0) == {0: 6.0, 8: 4.0}


@pytest.mark.parametrize("modality", [Modality.VIDEO, Modality.AUDIO])
def test_videos_and_audio_leave_a_thread_to_images(modality: Modality) -> None:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    started = [arrive(queue, name, modality=modality) for name in "abc"]
    assert started == [[b"a"], [b"b"], []]
    assert arrive(queue, "image", priority=5) == [b"image"]
    assert queue.done(b"image", 0.0) == []
    assert queue.prepared(b"a", 10, 100, 0.0) == [b"c"]


def test_images_that_are_prepared_take_no_thread_that_is_kept_for_videos() -> None:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    for name, modality in (("image", Modality.IMAGE), ("a", Modality.VIDEO), ("b", Modality.VIDEO)):
        assert arrive(queue, name, modality=modality) == [name.encode()]


def test_a_single_thread_prepares_videos_too() -> None:
    queue = BatchQueue(LIMITS, max_preparing=1)
    assert arrive(queue, "a", modality=Modality.VIDEO) == [b"a"]


def test_videos_and_audio_leave_room_in_the_queue_to_images() -> None:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    for name in "abc":
        arrive(queue, name, modality=Modality.VIDEO)
    with pytest.raises(Overloaded, match="3 videos and audio clips are waiting, which is the limit"):
        arrive(queue, "d", modality=Modality.AUDIO)
    assert arrive(queue, "image") == [b"image"]


def test_videos_and_audio_leave_bytes_to_images() -> None:
    queue = BatchQueue(LIMITS, max_preparing=MOST)
    arrive(queue, "a", nbytes=500, modality=Modality.VIDEO)
    with pytest.raises(Overloaded, match="waiting videos and audio clips take 500 of 750 bytes, this one takes 251"):
        arrive(queue, "b", nbytes=251, modality=Modality.VIDEO)
    with pytest.raises(InvalidMedia, match="the item takes 751 bytes to prepare, the limit is 750"):
        arrive(queue, "b", nbytes=751, modality=Modality.VIDEO)
    assert arrive(queue, "image", nbytes=500) == [b"image"]


def test_without_a_reserve_videos_may_take_everything() -> None:
    queue = BatchQueue(replace(LIMITS, reserved_image_share=0.0), max_preparing=MOST)
    started = [arrive(queue, name, nbytes=333, modality=Modality.VIDEO) for name in "abc"]
    assert started == [[b"a"], [b"b"], [b"c"]]


class AnyOrder(RuleBasedStateMachine):
    """Any order of calls: every entry is either encoded or ended, once, and invariants hold."""

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
        try:
            started = arrive(
                self.queue,
                name,
                self.waiter,
                nbytes=nbytes,
                deadline_s=self.now_s + lasts_s,
                modality=Modality.VIDEO if name in "abcd" else Modality.IMAGE,
                now_s=self.now_s,
            )
        except Overloaded:
            assert key not in self.here
            return
        self.here.setdefault(key, set()).add(self.waiter)
        self.start(started)

    @rule(data=st.data(), nbytes=st.integers(1, 600), tokens=st.integers(1, 30))
    def prepared(self, data: st.DataObject, nbytes: int, tokens: int) -> None:
        if self.preparing:
            key = data.draw(st.sampled_from(sorted(self.preparing)))
            self.preparing.discard(key)
            try:
                started = self.queue.prepared(key, tokens, nbytes, self.now_s)
            except Overloaded:
                self.end(key)
            else:
                self.start(started)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        pairs = sorted((key, waiter) for key, waiters in self.here.items() for waiter in waiters)
        if pairs:
            key, waiter = data.draw(st.sampled_from(pairs))
            self.here[key].discard(waiter)
            if self.queue.leave(key, waiter):
                assert key not in self.encoding | self.preparing
                del self.here[key]

    @rule()
    def take(self) -> None:
        for key in self.queue.expired(self.now_s):
            assert key not in self.encoding | self.preparing
            self.end(key)
        batch = self.queue.take(self.now_s)
        assert len(batch) <= LIMITS.max_batch_items
        assert self.encoding.isdisjoint(batch)
        assert self.preparing.isdisjoint(batch)
        self.encoding.update(batch)

    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        if self.encoding:
            key = data.draw(st.sampled_from(sorted(self.encoding)))
            self.encoding.discard(key)
            self.end(key)

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    def end(self, key: bytes) -> None:
        del self.here[key]
        self.start(self.queue.done(key, self.now_s))

    def start(self, keys: list[bytes]) -> None:
        assert self.preparing.isdisjoint(keys)
        self.preparing.update(keys)
        assert len(self.preparing) <= MOST

    @invariant()
    def consistent(self) -> None:
        self.queue.validate()
        assert self.queue.pending_items == len(self.here)


TestAnyOrder = AnyOrder.TestCase


def test_a_batch_has_as_many_items_as_are_allowed_when_it_is_taken() -> None:
    queue = waiting("a", "b", "c")
    queue.limit_items(1)
    assert queue.take(0.0) == [b"a"]
    queue.limit_items(3)
    assert queue.take(0.0) == [b"b", b"c"]
