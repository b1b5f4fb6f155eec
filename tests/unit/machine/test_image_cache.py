from collections import Counter
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triptych.domain.embedding import DType, TensorSpec, Ticket
from triptych.errors import InvalidRequest, LeaseLost, Overloaded, TransferFailed
from triptych.machine.image_cache import (
    Acquire,
    Acquired,
    Effect,
    Evicted,
    ImageCacheMachine,
    Leave,
    Pulled,
    PullFailed,
    Refused,
    ReleaseLease,
    StartPull,
    Tick,
    Waiting,
)

_leases = iter(range(1, 1 << 60))


def ticket(key: bytes, slot_nbytes: int = 1024, holder: str = "e0") -> Ticket:
    spec = TensorSpec("t", DType.U8, (slot_nbytes - 16,))
    lease_id = next(_leases).to_bytes(16, "big")
    return Ticket(key, holder, 1, 4096, slot_nbytes - 16, 5, 9, (spec,), 3, lease_id, 10.0)


def cache(nbytes: int = 4096, max_waiting: int = 4) -> ImageCacheMachine:
    return ImageCacheMachine(start=0, end=nbytes, max_waiting=max_waiting)


def acquire(machine: ImageCacheMachine, request_id: str, *tickets: Ticket) -> list[Effect]:
    return machine.handle(Acquire(request_id, tickets), 0.0)


def pulls(effects: list[Effect]) -> list[StartPull]:
    return [effect for effect in effects if isinstance(effect, StartPull)]


def fill(machine: ImageCacheMachine, request_id: str, *tickets: Ticket) -> list[Effect]:
    done: list[Effect] = []
    for pull in pulls(acquire(machine, request_id, *tickets)):
        done += machine.handle(Pulled(pull.pull_id), 0.0)
    return done


def test_one_pull_serves_all_who_want_it() -> None:
    machine = cache()
    [pull] = pulls(acquire(machine, "a", ticket(b"k")))
    assert acquire(machine, "b", ticket(b"k")) == []
    effects = machine.handle(Pulled(pull.pull_id), 0.0)
    acquired = [effect for effect in effects if isinstance(effect, Acquired)]
    assert [(got.request_id, got.hits) for got in acquired] == [("a", (False,)), ("b", (True,))]
    assert sum(isinstance(effect, ReleaseLease) for effect in effects) == 2
    [released, hit] = acquire(machine, "c", ticket(b"k"))
    assert isinstance(released, ReleaseLease)
    assert isinstance(hit, Acquired)


def test_a_request_without_room_waits_holding_nothing_and_is_let_in_later() -> None:
    machine = cache(2048)
    fill(machine, "a", ticket(b"k"))
    [waiting] = acquire(machine, "b", ticket(b"x"), ticket(b"y"))
    assert isinstance(waiting, Waiting)
    assert machine.pinned_bytes == 1024
    effects = machine.handle(Leave("a"), 0.0)
    assert [effect.key for effect in effects if isinstance(effect, Evicted)] == [b"k"]
    assert len(pulls(effects)) == 2


def test_what_can_never_fit_is_refused_and_its_leases_go_back() -> None:
    refused, *released = acquire(cache(2048), "a", ticket(b"x", 1024), ticket(b"y", 1088))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, InvalidRequest)
    assert len(released) == 2


def test_the_line_is_bounded() -> None:
    machine = cache(1024, max_waiting=1)
    acquire(machine, "a", ticket(b"a"))
    acquire(machine, "b", ticket(b"b"))
    refused = acquire(machine, "c", ticket(b"c"))[0]
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, Overloaded)


def test_a_hit_with_other_tensors_is_no_hit() -> None:
    machine = cache()
    fill(machine, "a", ticket(b"k", 1024))
    refused = acquire(machine, "b", ticket(b"x"), ticket(b"k", 512))[0]
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, TransferFailed)
    assert refused.error.items == (1,)
    machine.handle(Leave("a"), 0.0)
    effects = acquire(machine, "c", replace(ticket(b"k", 1024), tokens=4))
    assert isinstance(effects[0], Evicted)
    assert len(pulls(effects)) == 1


def test_a_failed_pull_names_the_items_and_is_forgotten() -> None:
    machine = cache()
    first, second = pulls(acquire(machine, "a", ticket(b"x"), ticket(b"y"), ticket(b"y")))
    effects = machine.handle(PullFailed(second.pull_id, TransferFailed("broken")), 0.0)
    [refused] = [effect for effect in effects if isinstance(effect, Refused)]
    assert isinstance(refused.error, TransferFailed)
    assert refused.error.items == (1, 2)
    machine.handle(Pulled(first.pull_id), 0.0)
    assert (machine.cached, machine.pinned_bytes) == (1, 0)


def test_another_requests_ticket_is_used_when_a_pull_fails() -> None:
    machine = cache()
    [pull] = pulls(acquire(machine, "a", ticket(b"k", holder="dead")))
    acquire(machine, "b", ticket(b"k", holder="alive"))
    effects = machine.handle(PullFailed(pull.pull_id, TransferFailed("broken")), 0.0)
    assert [effect.request_id for effect in effects if isinstance(effect, Refused)] == ["a"]
    assert [again.ticket.holder for again in pulls(effects)] == ["alive"]


def test_a_lost_lease_costs_only_the_request_whose_lease_it_was() -> None:
    machine = cache()
    [pull] = pulls(acquire(machine, "a", ticket(b"k")))
    acquire(machine, "b", ticket(b"k"))
    effects = machine.handle(PullFailed(pull.pull_id, LeaseLost("gone")), 0.0)
    assert [effect.request_id for effect in effects if isinstance(effect, Refused)] == ["a"]
    assert len(pulls(effects)) == 1


def test_quarantined_memory_is_used_again_only_when_it_is_over() -> None:
    machine = cache(1024)
    [pull] = pulls(acquire(machine, "a", ticket(b"k")))
    quarantined = ((pull.offset, 1024),)
    machine.handle(PullFailed(pull.pull_id, TransferFailed("late"), quarantined), 0.0)
    [waiting] = acquire(machine, "b", ticket(b"k"))
    assert isinstance(waiting, Waiting)
    assert machine.handle(Tick(quarantined), 0.0) == []
    assert len(pulls(machine.handle(Tick(()), 0.0))) == 1


class CacheModel(RuleBasedStateMachine):
    """Any order of events: invariants hold, and every ticket comes back exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = cache(2048, max_waiting=3)
        self.inside: dict[str, None] = {}
        self.pulling: dict[int, StartPull] = {}
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
                case Refused(request_id, _):
                    self.inside.pop(request_id, None)
                case ReleaseLease():
                    self.back[effect.ticket.lease_id] += 1
                case _:
                    pass

    @rule(
        wanted=st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c", b"d"]), st.sampled_from("xy")), max_size=4),
        other_size=st.integers(0, 9),
    )
    def acquire(self, wanted: list[tuple[bytes, str]], other_size: int) -> None:
        self.count += 1
        extra = 64 if other_size == 0 else 0
        tickets = [ticket(key, 256 * (key[0] - 95) + extra, holder) for key, holder in wanted]
        self.given.update(t.lease_id for t in tickets)
        self.inside[str(self.count)] = None
        self.apply(acquire(self.machine, str(self.count), *tickets))

    @precondition(lambda self: self.pulling)
    @rule(data=st.data(), outcome=st.sampled_from(["ok", "ok", "failed", "lost", "late"]))
    def end_pull(self, data: st.DataObject, outcome: str) -> None:
        pull = self.pulling.pop(data.draw(st.sampled_from(sorted(self.pulling))))
        if outcome == "ok":
            self.apply(self.machine.handle(Pulled(pull.pull_id), 0.0))
            return
        if outcome == "late":
            self.quarantined.append((pull.offset, pull.ticket.slot_nbytes))
        error = LeaseLost("gone") if outcome == "lost" else TransferFailed("broken")
        self.apply(self.machine.handle(PullFailed(pull.pull_id, error, tuple(self.quarantined)), 0.0))

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.inside)))
        del self.inside[request_id]
        self.apply(self.machine.handle(Leave(request_id), 0.0))

    @rule()
    def terminal(self) -> None:
        self.quarantined.clear()
        self.apply(self.machine.handle(Tick(()), 0.0))

    @invariant()
    def holds(self) -> None:
        self.machine.validate()
        assert all(count == 1 for count in self.back.values())

    def teardown(self) -> None:
        """Once everybody has left and every pull has ended, nothing is held and every lease is back."""
        for request_id in list(self.inside):
            self.apply(self.machine.handle(Leave(request_id), 0.0))
        self.quarantined.clear()
        while self.pulling:
            pull_id, _ = self.pulling.popitem()
            self.apply(self.machine.handle(Pulled(pull_id), 0.0))
        self.apply(self.machine.handle(Tick(()), 0.0))
        assert self.machine.pinned_bytes == 0
        assert self.machine.waiting == 0
        assert self.back == self.given


TestCacheModel = CacheModel.TestCase
