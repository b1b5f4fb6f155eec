from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triptych.domain.embedding import DType, TensorSpec, Ticket
from triptych.domain.queue_position import QueuePosition
from triptych.errors import InvalidRequest, LeaseLost, Overloaded, TransferFailed
from triptych.machine.text.pull_queue import PullLimits
from triptych.machine.text.tensor_cache import CacheLimits, TensorCache
from triptych.machine.text.tensor_effects import (
    Acquired,
    Effect,
    StartPull,
    StopPull,
    TensorEvicted,
    TensorsRefused,
    WaitsForRoom,
    WakeAt,
)

PULL = ("memory", 0.1)
"""Backend and duration of every pull."""
MANY = PullLimits(1 << 30, 1.0, 64)
ONE = PullLimits(1 << 30, 1.0, 1)

_leases = iter(range(1, 1 << 60))
_arrivals = iter(range(1, 1 << 60))


def ticket(key: bytes, slot_nbytes: int = 1024, holder: str = "e0") -> Ticket:
    spec = TensorSpec("t", DType.U8, (slot_nbytes - 16,))
    lease_id = next(_leases).to_bytes(16, "big")
    return Ticket(key, holder, 1, 4096, slot_nbytes - 16, 5, 9, (spec,), 3, lease_id, 10.0)


def cache(
    nbytes: int = 4096,
    max_waiting: int = 4,
    *,
    held_nbytes: int = 1 << 30,
    pulls: PullLimits = MANY,
    grace_s: float = 0.0,
) -> TensorCache:
    return TensorCache(CacheLimits(max_waiting, held_nbytes, grace_s), pulls, start=0, end=nbytes)


def acquire(
    machine: TensorCache, request_id: str, *tickets: Ticket, deadline_s: float = 0.0, transient: bool = False
) -> list[Effect]:
    queue_position = QueuePosition(0, deadline_s, next(_arrivals))
    effects = machine.acquire(request_id, tickets, queue_position, 0.0, transient=transient)
    machine.validate()
    return effects


def pulls(effects: list[Effect]) -> list[StartPull]:
    return [effect for effect in effects if isinstance(effect, StartPull)]


def fill(machine: TensorCache, request_id: str, *tickets: Ticket) -> list[Effect]:
    done: list[Effect] = []
    for pull in pulls(acquire(machine, request_id, *tickets)):
        done += machine.pulled(pull.pull_id, *PULL, 0.0)
    return done


def test_one_pull_serves_all_requests_for_an_embedding() -> None:
    machine = cache()
    [pull] = pulls(acquire(machine, "a", ticket(b"k")))
    assert acquire(machine, "b", ticket(b"k")) == []
    effects = machine.pulled(pull.pull_id, *PULL, 0.0)
    acquired = [effect for effect in effects if isinstance(effect, Acquired)]
    assert [(got.request_id, got.slots[0].backend, got.slots[0].pulled_nbytes) for got in acquired] == [
        ("a", "memory", 1024),
        ("b", "", 0),
    ]
    assert sum(isinstance(effect, Ticket) for effect in effects) == 2
    [released, hit] = acquire(machine, "c", ticket(b"k"))
    assert isinstance(released, Ticket)
    assert isinstance(hit, Acquired)


def test_a_request_without_room_waits_without_holding_memory_and_is_admitted_later() -> None:
    machine = cache(2048)
    fill(machine, "a", ticket(b"k"))
    [waiting] = acquire(machine, "b", ticket(b"x"), ticket(b"y"))
    assert isinstance(waiting, WaitsForRoom)
    assert machine.pinned_bytes == 1024
    effects = machine.leave("a", 0.0)
    assert [effect.key for effect in effects if isinstance(effect, TensorEvicted)] == [b"k"]
    assert len(pulls(effects)) == 2


def test_bytes_are_pinned_cached_or_free() -> None:
    machine = cache(4096)
    fill(machine, "a", ticket(b"k"))
    fill(machine, "b", ticket(b"x", 2048))
    machine.leave("a", 0.0)
    assert (machine.pinned_bytes, machine.cached_bytes, machine.cached) == (2048, 1024, 2)


def test_nothing_is_evicted_for_a_request_that_must_wait_anyway() -> None:
    machine = cache(3072)
    fill(machine, "a", ticket(b"idle"))
    machine.leave("a", 0.0)
    fill(machine, "b", ticket(b"pinned"))
    [waiting] = acquire(machine, "c", ticket(b"x"), ticket(b"y"), ticket(b"z"))
    assert isinstance(waiting, WaitsForRoom)
    assert machine.cached == 2


def test_tensors_that_a_waiting_request_needs_are_not_evicted_for_it() -> None:
    machine = cache(2048)
    fill(machine, "a", ticket(b"mine"))
    machine.leave("a", 0.0)
    fill(machine, "b", ticket(b"other"))
    machine.leave("b", 0.0)
    effects = acquire(machine, "c", ticket(b"mine"), ticket(b"new"))
    assert [effect.key for effect in effects if isinstance(effect, TensorEvicted)] == [b"other"]
    assert [pull.ticket.key for pull in pulls(effects)] == [b"new"]


def test_cached_tensors_of_a_request_do_not_count_as_room_for_its_missing_ones() -> None:
    machine = cache(3072)
    for key in (b"mine", b"other"):
        fill(machine, key.decode(), ticket(key))
        machine.leave(key.decode(), 0.0)
    fill(machine, "b", ticket(b"pinned"))
    [waiting] = acquire(machine, "c", ticket(b"mine"), ticket(b"x"), ticket(b"y"))
    assert isinstance(waiting, WaitsForRoom)
    assert machine.cached == 3


def test_a_request_id_is_accepted_once() -> None:
    machine = cache(1024)
    acquire(machine, "a", ticket(b"a"))
    acquire(machine, "b", ticket(b"b"))
    for request_id in ("a", "b"):
        with pytest.raises(ValueError, match="here already"):
            acquire(machine, request_id, ticket(b"a"))


def test_a_request_refused_while_waiting_does_not_block_later_ones() -> None:
    machine = cache(2048)
    fill(machine, "a", ticket(b"k"))
    fill(machine, "z", ticket(b"z"))
    acquire(machine, "first", ticket(b"x"), deadline_s=1.0)
    acquire(machine, "contradicts", ticket(b"k", 512), deadline_s=2.0)
    acquire(machine, "behind", ticket(b"k"), deadline_s=3.0)
    assert machine.waiting == 3
    effects = machine.leave("z", 0.0)
    assert [effect.request_id for effect in effects if isinstance(effect, TensorsRefused)] == ["contradicts"]
    assert [effect.request_id for effect in effects if isinstance(effect, Acquired)] == ["behind"]
    assert machine.waiting == 0


def test_the_largest_item_of_a_request_is_placed_first() -> None:
    machine = cache(10 * 64)
    [hole] = pulls(acquire(machine, "a", ticket(b"5", 5 * 64)))
    [kept] = pulls(acquire(machine, "b", ticket(b"1", 64)))
    [other] = pulls(acquire(machine, "c", ticket(b"4", 4 * 64)))
    for pull in (hole, other):
        machine.pull_failed(pull.pull_id, TransferFailed("broken"), 0.0)
    machine.pulled(kept.pull_id, *PULL, 0.0)
    wanted = [ticket(b"x", 2 * 64), ticket(b"y", 3 * 64), ticket(b"z", 4 * 64)]
    assert len(pulls(acquire(machine, "d", *wanted))) == 3


def test_the_most_urgent_waiting_request_is_admitted_first_and_not_overtaken() -> None:
    machine = cache(1024)
    fill(machine, "a", ticket(b"a"))
    for request_id, deadline_s, nbytes in (("patient", 9.0, 512), ("urgent", 1.0, 1024), ("next", 2.0, 512)):
        assert isinstance(
            acquire(machine, request_id, ticket(request_id.encode(), nbytes), deadline_s=deadline_s)[-1], WaitsForRoom
        )
    assert [pull.ticket.key for pull in pulls(machine.leave("a", 0.0))] == [b"urgent"]
    assert machine.waiting == 2


def test_a_pull_that_nobody_needs_is_stopped_and_who_comes_meanwhile_gets_another() -> None:
    machine = cache()
    [pull] = pulls(acquire(machine, "a", ticket(b"k")))
    acquire(machine, "b", ticket(b"k"))
    assert not [effect for effect in machine.leave("a", 0.0) if isinstance(effect, StopPull)], "b needs it"
    [stop] = [effect for effect in machine.leave("b", 0.0) if isinstance(effect, StopPull)]
    assert stop.pull_id == pull.pull_id
    assert acquire(machine, "c", ticket(b"k")) == []
    effects = machine.pull_stopped(pull.pull_id, 0.0, ((pull.offset, 1024),))
    [again] = pulls(effects)
    assert again.offset != pull.offset, "a late write may still reach the memory"
    assert not [effect for effect in effects if isinstance(effect, TensorsRefused)]
    machine.validate()


def test_the_end_of_an_abandoned_pull_admits_a_waiting_request() -> None:
    machine = cache(1024)
    [pull] = pulls(acquire(machine, "a", ticket(b"a")))
    machine.leave("a", 0.0)
    assert isinstance(acquire(machine, "b", ticket(b"b"))[-1], WaitsForRoom)
    assert [started.ticket.key for started in pulls(machine.pulled(pull.pull_id, *PULL, 0.0))] == [b"b"]


def test_a_pull_has_the_urgency_of_its_most_urgent_request() -> None:
    machine = cache(pulls=ONE)
    [first] = pulls(acquire(machine, "a", ticket(b"0"), deadline_s=9.0))
    for request_id, key, deadline_s in (("b", b"1", 5.0), ("c", b"2", 6.0), ("d", b"1", 7.0), ("e", b"2", 4.0)):
        assert pulls(acquire(machine, request_id, ticket(key), deadline_s=deadline_s)) == []
    order = []
    for _ in range(2):
        [first] = pulls(machine.pulled(first.pull_id, *PULL, 0.0))
        order.append(first.ticket.key)
    assert order == [b"2", b"1"]


def test_a_lower_priority_number_pulls_first_regardless_of_deadlines() -> None:
    machine = cache(pulls=ONE)
    [first] = pulls(acquire(machine, "a", ticket(b"0")))
    for key, queue_position in ((b"1", QueuePosition(1, 0.5, 2)), (b"2", QueuePosition(0, 9.0, 3))):
        machine.acquire(key.decode(), (ticket(key),), queue_position, 0.0)
    assert [pull.ticket.key for pull in pulls(machine.pulled(first.pull_id, *PULL, 0.0))] == [b"2"]


def test_a_lower_priority_number_is_admitted_first() -> None:
    machine = cache(1024)
    fill(machine, "a", ticket(b"a"))
    for key, queue_position in ((b"1", QueuePosition(1, 0.5, 2)), (b"2", QueuePosition(0, 9.0, 3))):
        machine.acquire(key.decode(), (ticket(key),), queue_position, 0.0)
    assert [pull.ticket.key for pull in pulls(machine.leave("a", 0.0))] == [b"2"]


def test_what_is_lost_is_admitted_last() -> None:
    machine = cache(1024)
    fill(machine, "a", ticket(b"a"))
    lost, short = QueuePosition(0, 1.0, 2, lost_s=0.5, aged_s=30.0), QueuePosition(0, 3.0, 3, lost_s=2.5, aged_s=31.0)
    for key, queue_position in ((b"1", lost), (b"2", short)):
        machine.acquire(key.decode(), (ticket(key),), queue_position, 0.0)
    assert [pull.ticket.key for pull in pulls(machine.leave("a", 1.0))] == [b"2"]


def test_a_queued_pull_is_dropped_when_no_request_needs_it() -> None:
    machine = cache(pulls=ONE)
    [first] = pulls(acquire(machine, "a", ticket(b"0")))
    waiting = ticket(b"1")
    acquire(machine, "b", waiting)
    acquire(machine, "c", ticket(b"1"))
    machine.leave("c", 0.0)
    assert machine.pulls.waiting == 1
    effects = machine.leave("b", 0.0)
    machine.validate()
    assert [effect for effect in effects if isinstance(effect, Ticket)] == [waiting]
    assert (machine.pulls.waiting, machine.pinned_bytes) == (0, 1024)
    assert pulls(machine.pulled(first.pull_id, *PULL, 0.0)) == []


def test_memory_of_a_dropped_pull_admits_a_waiting_request() -> None:
    machine = cache(2048, pulls=ONE)
    acquire(machine, "a", ticket(b"0"))
    acquire(machine, "b", ticket(b"1"))
    assert isinstance(acquire(machine, "c", ticket(b"2"))[-1], WaitsForRoom)
    machine.leave("b", 0.0)
    machine.validate()
    assert (machine.waiting, machine.pulls.waiting) == (0, 1)


def test_a_pull_that_arrives_though_it_was_stopped_is_cached() -> None:
    machine = cache()
    [pull] = pulls(acquire(machine, "a", ticket(b"k")))
    [stop] = machine.leave("a", 0.0)
    assert isinstance(stop, StopPull)
    machine.pulled(pull.pull_id, *PULL, 0.0)
    assert machine.cached == 1


def test_failures_of_a_request_are_collected_within_the_grace_period() -> None:
    def failed(effects: list[Effect]) -> list[tuple[int, ...]]:
        errors = [effect.error for effect in effects if isinstance(effect, TensorsRefused)]
        return [error.items for error in errors if isinstance(error, TransferFailed)]

    machine = cache(grace_s=0.5)
    x, y, z = pulls(acquire(machine, "a", ticket(b"x"), ticket(b"y"), ticket(b"z"), ticket(b"x")))
    effects = machine.pull_failed(x.pull_id, TransferFailed("broken"), 1.0)
    assert [effect.at_s for effect in effects if isinstance(effect, WakeAt)] == [1.5]
    assert failed(effects) == []
    assert failed(machine.pull_failed(y.pull_id, TransferFailed("broken"), 1.1)) == []
    assert failed(machine.pulled(z.pull_id, *PULL, 1.2)) == [(0, 1, 3)]
    assert machine.cached == 1, "the tensors that arrived stay cached"

    first, second = pulls(acquire(machine, "b", ticket(b"x"), ticket(b"y")))
    machine.pull_failed(first.pull_id, TransferFailed("broken"), 2.0)
    assert failed(machine.tick((), 2.4)) == []
    assert failed(machine.tick((), 2.5)) == [(0,)]
    assert failed(machine.pull_failed(second.pull_id, TransferFailed("broken"), 3.0)) == []
    machine.validate()


def test_a_request_that_leaves_during_admission_gets_no_result() -> None:
    machine = cache(grace_s=0.5)
    first, second = pulls(acquire(machine, "a", ticket(b"x"), ticket(b"y")))
    machine.pull_failed(first.pull_id, TransferFailed("broken"), 0.0)
    with pytest.raises(ValueError, match="here already"):
        acquire(machine, "a", ticket(b"x"))
    machine.leave("a", 0.1)
    assert not [effect for effect in machine.pulled(second.pull_id, *PULL, 0.2) if isinstance(effect, TensorsRefused)]


def test_copies_of_running_requests_are_bounded_and_a_large_one_may_use_the_bound_alone() -> None:
    machine = cache(8192, max_waiting=9, held_nbytes=2048)
    fill(machine, "a", ticket(b"a"))
    machine.leave("a", 0.0)
    fill(machine, "b", ticket(b"b"))
    assert (machine.held_bytes, machine.pinned_bytes) == (2048, 1024)
    for request_id, nbytes, due_s in (("large", 4096, 1.0), ("small", 512, 2.0)):
        assert pulls(acquire(machine, request_id, ticket(request_id.encode(), nbytes), deadline_s=due_s)) == []
    assert machine.copies_gone("a", 0.0) == []
    machine.leave("b", 0.0)
    assert [pull.ticket.key for pull in pulls(machine.copies_gone("b", 0.0))] == [b"large"]
    machine.validate()
    assert machine.copies_gone("nobody", 0.0) == []
    machine.leave("large", 0.0)
    assert [pull.ticket.key for pull in pulls(machine.copies_gone("large", 0.0))] == [b"small"]
    machine.validate()


def test_what_is_transient_passes_others_and_does_not_wait_for_copies() -> None:
    machine = cache(4096, held_nbytes=1024)
    fill(machine, "running", ticket(b"a", 1024))
    machine.leave("running", 0.0)
    assert pulls(acquire(machine, "waiting", ticket(b"b", 1024))) == []
    [pull] = pulls(acquire(machine, "segment", ticket(b"c", 1024), deadline_s=9.0, transient=True))
    machine.pulled(pull.pull_id, *PULL, 0.0)
    machine.leave("segment", 0.0)
    machine.copies_gone("segment", 0.0)
    assert (machine.held_bytes, machine.waiting, machine.pinned_bytes) == (1024, 1, 0)
    machine.validate()


def test_a_request_larger_than_the_cache_is_refused_and_its_leases_are_released() -> None:
    refused, *released = acquire(cache(2048), "a", ticket(b"x", 1024), ticket(b"y", 1088))
    assert isinstance(refused, TensorsRefused)
    assert isinstance(refused.error, InvalidRequest)
    assert len(released) == 2


def test_the_admission_queue_is_bounded() -> None:
    machine = cache(1024, max_waiting=1)
    acquire(machine, "a", ticket(b"a"))
    acquire(machine, "b", ticket(b"b"))
    refused = acquire(machine, "c", ticket(b"c"))[0]
    assert isinstance(refused, TensorsRefused)
    assert isinstance(refused.error, Overloaded)


def test_a_cached_entry_with_other_tensor_specs_is_a_miss() -> None:
    machine = cache()
    fill(machine, "a", ticket(b"k", 1024))
    refused = acquire(machine, "b", ticket(b"x"), ticket(b"k", 512))[0]
    assert isinstance(refused, TensorsRefused)
    assert isinstance(refused.error, TransferFailed)
    assert refused.error.items == (1,)
    machine.leave("a", 0.0)
    effects = acquire(machine, "c", replace(ticket(b"k", 1024), tokens=4))
    assert isinstance(effects[0], TensorEvicted)
    assert len(pulls(effects)) == 1


def test_a_failed_pull_names_its_items_and_is_not_cached() -> None:
    machine = cache()
    first, second = pulls(acquire(machine, "a", ticket(b"x"), ticket(b"y"), ticket(b"y")))
    effects = machine.pull_failed(second.pull_id, TransferFailed("broken"), 0.0)
    [refused] = [effect for effect in effects if isinstance(effect, TensorsRefused)]
    assert isinstance(refused.error, TransferFailed)
    assert refused.error.items == (1, 2)
    machine.pulled(first.pull_id, *PULL, 0.0)
    assert (machine.cached, machine.pinned_bytes) == (1, 0)


def test_another_requests_ticket_is_used_when_a_pull_fails() -> None:
    machine = cache()
    [pull] = pulls(acquire(machine, "a", ticket(b"k", holder="dead"), deadline_s=1.0))
    acquire(machine, "patient", ticket(b"k", holder="alive too"), deadline_s=9.0)
    acquire(machine, "b", ticket(b"k", holder="alive"), deadline_s=5.0)
    effects = machine.pull_failed(pull.pull_id, TransferFailed("broken"), 0.0)
    assert [effect.request_id for effect in effects if isinstance(effect, TensorsRefused)] == ["a"]
    [again] = pulls(effects)
    assert again.ticket.holder == "alive", "the more urgent of the two"


def test_a_lost_lease_fails_only_its_own_request() -> None:
    machine = cache()
    [pull] = pulls(acquire(machine, "a", ticket(b"k")))
    acquire(machine, "b", ticket(b"k"))
    effects = machine.pull_failed(pull.pull_id, LeaseLost("gone"), 0.0)
    assert [effect.request_id for effect in effects if isinstance(effect, TensorsRefused)] == ["a"]
    assert len(pulls(effects)) == 1


def test_quarantined_memory_is_reused_only_after_the_quarantine() -> None:
    machine = cache(1024)
    [pull] = pulls(acquire(machine, "a", ticket(b"k")))
    quarantined = ((pull.offset, 1024),)
    machine.pull_failed(pull.pull_id, TransferFailed("late"), 0.0, quarantined)
    [waiting] = acquire(machine, "b", ticket(b"k"))
    assert isinstance(waiting, WaitsForRoom)
    assert machine.tick(quarantined, 0.0) == []
    assert len(pulls(machine.tick((), 0.0))) == 1


def test_a_retry_uses_other_memory_or_fails_all_waiting_requests() -> None:
    for nbytes, tries in ((2048, 1), (1024, 0)):
        machine = cache(nbytes)
        [pull] = pulls(acquire(machine, "a", ticket(b"k")))
        acquire(machine, "b", ticket(b"k", holder="another"))
        acquire(machine, "c", ticket(b"k", holder="another"))
        effects = machine.pull_failed(pull.pull_id, TransferFailed("late"), 0.0, ((pull.offset, 1024),))
        machine.validate()
        assert all(again.offset != pull.offset for again in pulls(effects))
        refused = [effect.request_id for effect in effects if isinstance(effect, TensorsRefused)]
        assert (len(pulls(effects)), refused) == (tries, ["a"] if tries else ["a", "b", "c"])


def test_memory_beside_a_quarantined_range_is_free() -> None:
    machine = cache(3072)
    pull = pulls(acquire(machine, "a", ticket(b"1"), ticket(b"2"), ticket(b"3")))[1]
    assert pull.offset == 1024
    machine.pull_failed(pull.pull_id, TransferFailed("late"), 0.0, ((0, 1024), (2048, 1024)))
    machine.validate()
    assert pulls(acquire(machine, "b", ticket(b"4")))[0].offset == 1024


class CacheModel(RuleBasedStateMachine):
    """Any order of calls: invariants hold, and every ticket is returned exactly once."""

    def __init__(self) -> None:
        super().__init__()
        few = PullLimits(1024, 0.5, 2)
        self.machine = cache(2048, max_waiting=3, held_nbytes=3000, pulls=few, grace_s=1.0)
        self.now_s = 0.0
        self.copied: list[str] = []
        self.inside: dict[str, None] = {}
        self.pulling: dict[int, StartPull] = {}
        self.unwanted: set[int] = set()
        self.quarantined: list[tuple[int, int]] = []
        self.given: Counter[bytes] = Counter()
        self.back: Counter[bytes] = Counter()
        self.count = 0

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartPull():
                    end = effect.offset + effect.ticket.slot_nbytes
                    for at, nbytes in self.quarantined:
                        assert end <= at or at + nbytes <= effect.offset
                    self.pulling[effect.pull_id] = effect
                case StopPull(pull_id):
                    assert pull_id in self.pulling
                    self.unwanted.add(pull_id)
                case TensorsRefused(request_id, _):
                    self.inside.pop(request_id, None)
                case Ticket():
                    self.back[effect.lease_id] += 1
                case _:
                    pass

    @rule(
        wanted=st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c", b"d"]), st.sampled_from("xy")), max_size=4),
        other_size=st.integers(0, 9),
        deadline_s=st.integers(0, 9),
        transient=st.booleans(),
    )
    def acquire(self, wanted: list[tuple[bytes, str]], other_size: int, deadline_s: int, transient: bool) -> None:
        self.count += 1
        extra = 64 if other_size == 0 else 0
        tickets = [ticket(key, 256 * (key[0] - 95) + extra, holder) for key, holder in wanted]
        self.given.update(t.lease_id for t in tickets)
        self.inside[str(self.count)] = None
        self.apply(acquire(self.machine, str(self.count), *tickets, deadline_s=deadline_s, transient=transient))

    @precondition(lambda self: self.pulling)
    @rule(data=st.data(), outcome=st.sampled_from(["ok", "ok", "failed", "lost", "late"]))
    def end_pull(self, data: st.DataObject, outcome: str) -> None:
        pull = self.pulling.pop(data.draw(st.sampled_from(sorted(self.pulling))))
        if outcome == "ok":
            self.apply(self.machine.pulled(pull.pull_id, *PULL, self.now_s))
            return
        if outcome == "late":
            self.quarantined.append((pull.offset, pull.ticket.slot_nbytes))
        error = LeaseLost("gone") if outcome == "lost" else TransferFailed("broken")
        self.apply(self.machine.pull_failed(pull.pull_id, error, self.now_s, tuple(self.quarantined)))

    @precondition(lambda self: self.unwanted & self.pulling.keys())
    @rule(data=st.data(), late=st.booleans())
    def stop_pull(self, data: st.DataObject, late: bool) -> None:
        pull = self.pulling.pop(data.draw(st.sampled_from(sorted(self.unwanted & self.pulling.keys()))))
        if late:
            self.quarantined.append((pull.offset, pull.ticket.slot_nbytes))
        self.apply(self.machine.pull_stopped(pull.pull_id, self.now_s, tuple(self.quarantined)))

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.inside)))
        del self.inside[request_id]
        self.apply(self.machine.leave(request_id, self.now_s))
        self.copied.append(request_id)

    @precondition(lambda self: self.copied)
    @rule()
    def copies_gone(self) -> None:
        self.apply(self.machine.copies_gone(self.copied.pop(), self.now_s))

    @rule()
    def terminal(self) -> None:
        self.quarantined.clear()
        self.now_s += 1.0
        self.apply(self.machine.tick((), self.now_s))

    @invariant()
    def holds(self) -> None:
        self.machine.validate()
        assert all(count == 1 for count in self.back.values())

    def teardown(self) -> None:
        """Once all requests have left and all pulls have ended, nothing is held and every lease is returned."""
        for request_id in list(self.inside):
            self.apply(self.machine.leave(request_id, self.now_s))
            self.copied.append(request_id)
        for request_id in self.copied:
            self.apply(self.machine.copies_gone(request_id, self.now_s))
        self.quarantined.clear()
        while self.pulling:
            pull_id, _ = self.pulling.popitem()
            self.apply(self.machine.pulled(pull_id, *PULL, self.now_s))
        self.apply(self.machine.tick((), self.now_s))
        assert self.machine.pinned_bytes == 0
        assert self.machine.waiting == 0
        assert self.machine.held_bytes == 0
        assert self.back == self.given


TestCacheModel = CacheModel.TestCase


def test_a_request_is_placed_although_its_own_cached_tensors_fragment_the_memory() -> None:
    machine = cache(4096, max_waiting=8)
    around = {"x": ticket(b"x", 1536), "a": ticket(b"a", 1024), "y": ticket(b"y", 1536)}
    for request_id, held in around.items():
        fill(machine, request_id, held)
    for request_id in around:
        machine.leave(request_id, 0.0)
        machine.copies_gone(request_id, 0.0)
    started = pulls(acquire(machine, "large", ticket(b"a", 1024), ticket(b"b", 2048)))
    assert sorted(pull.ticket.key for pull in started) == [b"a", b"b"]
    assert machine.waiting == 0
    machine.validate()
