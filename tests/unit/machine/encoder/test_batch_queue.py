"""The encoder's queue under any order of events."""

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from triptych.machine.encoder.batch_queue import (
    Arrive,
    BatchLimits,
    BatchQueue,
    Done,
    Drop,
    Effect,
    Encode,
    Leave,
    Prepared,
    Refuse,
    StartPreparing,
    Take,
)
from triptych.policy.iteration import ImageBudget

LIMITS = BatchLimits(
    max_waiting_items=4, max_prepared_bytes=1000, max_batch_items=3, max_batch_tokens=20, max_batch_bytes=600
)


def arrive(name: str, waiter: int = 0, *, nbytes: int = 100, tokens: int = 10, deadline_s: float = 10.0) -> Arrive:
    return Arrive(name.encode(), waiter, tokens, nbytes, deadline_s)


def waiting(*names: str) -> BatchQueue:
    queue = BatchQueue(LIMITS)
    for name in names:
        assert queue.handle(arrive(name), 0.0) == [StartPreparing(name.encode())]
        assert queue.handle(Prepared(name.encode(), 10, 100), 0.0) == []
    return queue


def test_what_waits_goes_in_order_and_within_the_batchs_bounds() -> None:
    queue = waiting("a", "b", "c")
    assert queue.handle(Take(), 0.0) == [Encode((b"a", b"b"))]
    assert queue.handle(Take(), 0.0) == [Encode((b"c",))]
    assert queue.handle(Take(), 0.0) == []
    assert (queue.pending_items, queue.pending_tokens) == (3, 30)
    for name in (b"a", b"b", b"c"):
        queue.handle(Done(name), 0.0)
    assert (queue.pending_items, queue.nbytes) == (0, 0)


def test_a_batch_is_bounded_in_bytes_too() -> None:
    queue = BatchQueue(replace(LIMITS, max_batch_bytes=250, max_batch_tokens=1000))
    for name, nbytes in ((b"a", 300), (b"b", 100), (b"c", 100), (b"d", 100)):
        queue.handle(arrive(name.decode(), nbytes=nbytes), 0.0)
        queue.handle(Prepared(name, 10, nbytes), 0.0)
    assert queue.handle(Take(), 0.0) == [Encode((b"a",))], "too large for any batch, it runs alone"
    assert queue.handle(Take(), 0.0) == [Encode((b"b", b"c"))]
    assert queue.handle(Take(), 0.0) == [Encode((b"d",))]


def test_a_turn_may_have_a_budget_that_is_tighter_than_the_bounds_and_never_looser() -> None:
    queue = waiting("a", "b", "c", "d")
    assert queue.handle(Take(ImageBudget(tokens=10, nbytes=600)), 0.0) == [Encode((b"a",))]
    assert queue.handle(Take(ImageBudget(tokens=20, nbytes=199)), 0.0) == [Encode((b"b",))]
    assert queue.handle(Take(ImageBudget(tokens=1, nbytes=1)), 0.0) == [Encode((b"c",))], "too large, it goes alone"
    queue = waiting("a", "b", "c", "d")
    assert queue.handle(Take(ImageBudget(tokens=999, nbytes=9999)), 0.0) == [Encode((b"a", b"b"))]


def test_it_is_known_since_when_the_first_has_waited_for_the_tower() -> None:
    queue = BatchQueue(LIMITS)
    seen = [queue.waiting_since_s]
    for now_s, name in enumerate((b"a", b"b", b"c"), 1):
        queue.handle(arrive(name.decode()), 0.0)
        seen.append(queue.waiting_since_s)  # one that is being prepared does not wait yet
        queue.handle(Prepared(name, 10, 100), float(now_s))
    assert seen == [None, None, 1.0, 1.0]
    queue.handle(Take(), 4.0)
    seen = [queue.waiting_since_s]
    queue.handle(Leave(b"c", 0), 5.0)
    assert [*seen, queue.waiting_since_s] == [3.0, None]


def test_equal_items_are_one_entry() -> None:
    queue = waiting("a")
    assert queue.handle(arrive("a", 1), 0.0) == []
    assert queue.pending_items == 1
    assert queue.handle(Leave(b"a", 0), 0.0) == []
    assert queue.pending_items == 1
    [drop] = queue.handle(Leave(b"a", 1), 0.0)
    assert isinstance(drop, Drop)
    assert not drop.expired
    assert queue.pending_items == 0


def test_a_full_queue_refuses_at_the_door() -> None:
    queue = waiting("a", "b", "c", "d")
    [refused] = queue.handle(arrive("e"), 0.0)
    assert isinstance(refused, Refuse)
    assert refused.fits


def test_bytes_are_bounded_and_what_can_never_fit_is_told_so() -> None:
    queue = waiting("a")
    [now] = queue.handle(arrive("b", nbytes=950), 0.0)
    [never] = queue.handle(arrive("c", nbytes=1001), 0.0)
    assert isinstance(now, Refuse)
    assert isinstance(never, Refuse)
    assert (now.fits, never.fits) == (True, False)


def test_what_fills_the_queue_to_its_last_byte_is_let_in() -> None:
    queue = BatchQueue(LIMITS)
    assert queue.handle(arrive("a", nbytes=1000), 0.0) == [StartPreparing(b"a")]
    queue = waiting("a")
    assert queue.handle(arrive("b", nbytes=900), 0.0) == [StartPreparing(b"b")]
    assert queue.handle(Prepared(b"b", 10, 900), 0.0) == []
    assert queue.nbytes == 1000


def test_an_item_that_turns_out_too_large_is_dropped() -> None:
    queue = waiting("a")
    queue.handle(arrive("b"), 0.0)
    [drop] = queue.handle(Prepared(b"b", 10, 950), 0.0)
    assert isinstance(drop, Drop)
    assert not drop.expired
    assert "950" in drop.reason
    assert queue.nbytes == 100


def test_an_item_that_nobody_waits_for_any_longer_in_time_is_not_encoded() -> None:
    queue = waiting("a", "b")
    queue.handle(arrive("a", 1, deadline_s=3.0), 0.0)
    queue.handle(Leave(b"a", 0), 0.0)
    drop, encode = queue.handle(Take(), 3.0)
    assert isinstance(drop, Drop)
    assert drop.expired
    assert encode == Encode((b"b",))


def test_an_item_left_while_a_thread_prepares_it_goes_with_that_thread_unless_someone_comes() -> None:
    queue = BatchQueue(LIMITS)
    queue.handle(arrive("a"), 0.0)
    assert queue.handle(Leave(b"a", 0), 0.0) == []
    assert queue.nbytes == 100
    assert queue.handle(arrive("a", 1), 0.0) == []
    assert queue.handle(Prepared(b"a", 10, 100), 0.0) == []
    queue.handle(arrive("b"), 0.0)
    queue.handle(Leave(b"b", 0), 0.0)
    [drop] = queue.handle(Prepared(b"b", 10, 100), 0.0)
    assert isinstance(drop, Drop)
    assert not drop.expired


class AnyOrder(RuleBasedStateMachine):
    """Every entry ends in exactly one of: encoded and done, or dropped; and the invariants hold all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = BatchQueue(LIMITS)
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
            arrive(name, self.waiter, nbytes=nbytes, deadline_s=self.now_s + lasts_s), self.now_s
        )
        if any(isinstance(effect, Refuse) for effect in effects):
            assert key not in self.here
            return
        assert (effects == [StartPreparing(key)]) == (key not in self.here)
        if effects:
            self.preparing.add(key)
        self.here.setdefault(key, set()).add(self.waiter)

    @rule(data=st.data(), nbytes=st.integers(1, 600), tokens=st.integers(1, 30))
    def prepared(self, data: st.DataObject, nbytes: int, tokens: int) -> None:
        if self.preparing:
            key = data.draw(st.sampled_from(sorted(self.preparing)))
            self.preparing.discard(key)
            self.dropped(self.queue.handle(Prepared(key, tokens, nbytes), self.now_s))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        pairs = sorted((key, waiter) for key, waiters in self.here.items() for waiter in waiters)
        if pairs:
            key, waiter = data.draw(st.sampled_from(pairs))
            self.here[key].discard(waiter)
            self.dropped(self.queue.handle(Leave(key, waiter), self.now_s))

    @rule()
    def take(self) -> None:
        effects = self.queue.handle(Take(), self.now_s)
        self.dropped(effects)
        for effect in effects:
            if isinstance(effect, Encode):
                assert 1 <= len(effect.keys) <= LIMITS.max_batch_items
                assert self.encoding.isdisjoint(effect.keys)
                assert self.preparing.isdisjoint(effect.keys)
                self.encoding.update(effect.keys)

    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        if self.encoding:
            key = data.draw(st.sampled_from(sorted(self.encoding)))
            self.encoding.discard(key)
            self.queue.handle(Done(key), self.now_s)
            del self.here[key]

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    def dropped(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Drop):
                assert effect.key not in self.encoding
                del self.here[effect.key]

    @invariant()
    def consistent(self) -> None:
        self.queue.validate()
        assert self.queue.pending_items == len(self.here)


TestAnyOrder = AnyOrder.TestCase
