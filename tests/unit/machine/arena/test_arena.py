import random
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triptych.domain.embedding import DType, TensorSpec
from triptych.errors import ArenaFull, InvalidMedia, LeaseLost
from triptych.machine.arena.arena import ArenaMachine
from triptych.machine.arena.arena_events import (
    Abandon,
    ArenaTick,
    Commit,
    GrantLease,
    LeaseGranted,
    Present,
    ReleaseLeases,
    ReservationRefused,
    Reserve,
    Reserved,
    Slot,
    SlotEvicted,
    SlotState,
)
from triptych.machine.arena.leases import LeaseLimits

LIMITS = LeaseLimits(max_leases=8)
MAX_PULL_S = 5.0
MAX_GIVEN_BACK = 32
LEASE_S = 10.0


def arena(nbytes: int = 4096) -> ArenaMachine:
    return ArenaMachine(
        start=0,
        end=nbytes,
        holder="e0",
        epoch=7,
        max_pull_s=MAX_PULL_S,
        limits=LIMITS,
        max_released=MAX_GIVEN_BACK,
    )


def specs(slot_nbytes: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec("t", DType.U8, (slot_nbytes - 16,)),)


def reserve(machine: ArenaMachine, key: bytes, slot_nbytes: int, now_s: float = 0.0) -> Slot:
    effect = machine.handle(Reserve(key, specs(slot_nbytes), 3), now_s)[-1]
    assert isinstance(effect, Reserved)
    return effect.slot


def put(machine: ArenaMachine, key: bytes, slot_nbytes: int, now_s: float = 0.0) -> Slot:
    slot = reserve(machine, key, slot_nbytes, now_s)
    machine.handle(Commit(key, slot.generation, checksum=99), now_s)
    return slot


def refusal(machine: ArenaMachine, event: Reserve | GrantLease, now_s: float = 0.0) -> Exception:
    effect = machine.handle(event, now_s)[-1]
    assert isinstance(effect, ReservationRefused)
    return effect.error


def test_a_granted_ticket_locates_the_embedding() -> None:
    machine = arena()
    slot = put(machine, b"k", 1000)
    [granted] = machine.handle(GrantLease(b"k", b"l", LEASE_S), 0.0)
    assert isinstance(granted, LeaseGranted)
    ticket = granted.ticket
    assert (ticket.holder, ticket.epoch, ticket.offset, ticket.generation) == ("e0", 7, slot.offset, slot.generation)
    assert (ticket.checksum, ticket.tensors, ticket.tokens, ticket.lease_s) == (99, specs(1000), 3, LEASE_S)


def test_a_second_reserve_returns_the_existing_slot() -> None:
    machine = arena()
    slot = reserve(machine, b"k", 100)
    assert machine.handle(Reserve(b"k", specs(100), 3), 0.0) == [Present(slot, SlotState.WRITING)]
    machine.handle(Commit(b"k", slot.generation, 1), 0.0)
    assert machine.handle(Reserve(b"k", specs(100), 3), 0.0) == [Present(slot, SlotState.READY)]


def test_a_slot_gets_its_name_when_it_is_committed() -> None:
    machine = arena()
    first, second = reserve(machine, b"r1", 512), reserve(machine, b"r2", 512)
    assert machine.handle(Commit(b"r1", first.generation, 99, named=b"a"), 0.0) == []
    assert machine.find(b"r1") is None
    assert machine.find(b"a") == replace(first, key=b"a")
    machine.validate()
    present = machine.handle(Commit(b"r2", second.generation, 99, named=b"a"), 0.0)
    assert present == [Present(replace(first, key=b"a"), SlotState.READY)]
    assert (machine.leased_bytes, machine.cached, machine.cached_bytes) == (0, 1, 512)
    machine.validate()


def test_a_refusal_says_whether_it_is_permanent() -> None:
    machine = arena(4096)
    assert isinstance(refusal(machine, Reserve(b"big", specs(4097), 3)), InvalidMedia)
    reserve(machine, b"a", 4096)
    assert isinstance(refusal(machine, Reserve(b"b", specs(64), 3)), ArenaFull)


def test_the_least_recently_used_slot_is_evicted_and_leased_slots_stay() -> None:
    machine = arena(3 * 1024)
    for key in (b"a", b"b", b"c"):
        put(machine, key, 1024)
    machine.handle(GrantLease(b"a", b"la", LEASE_S), 0.0)
    effects = machine.handle(Reserve(b"d", specs(1024), 3), 0.0)
    assert [effect.slot.key for effect in effects if isinstance(effect, SlotEvicted)] == [b"b"]
    assert machine.find(b"a") is not None


def test_nothing_is_evicted_when_the_embedding_cannot_fit_anyway() -> None:
    machine = arena(3 * 1024)
    put(machine, b"a", 1024)
    middle = put(machine, b"b", 1024)
    put(machine, b"c", 1024)
    machine.handle(GrantLease(middle.key, b"l", LEASE_S), 0.0)
    assert isinstance(refusal(machine, Reserve(b"d", specs(2048), 3)), ArenaFull)
    assert machine.cached == 3


def test_nothing_is_evicted_when_no_contiguous_gap_would_result() -> None:
    machine = arena(4 * 1024)
    for key in (b"a", b"b", b"c", b"d"):
        put(machine, key, 1024)
    for key in (b"a", b"c"):
        machine.handle(GrantLease(key, key, LEASE_S), 0.0)
    assert isinstance(refusal(machine, Reserve(b"x", specs(2048), 3)), ArenaFull)
    assert isinstance(refusal(machine, Reserve(b"x", specs(3072), 3)), ArenaFull)
    assert machine.cached == 4


def test_eviction_can_free_a_gap_of_the_exact_size() -> None:
    machine = arena(2 * 1024)
    put(machine, b"a", 1024)
    put(machine, b"b", 1024)
    machine.handle(GrantLease(b"b", b"l", LEASE_S), 0.0)
    effects = machine.handle(Reserve(b"c", specs(1024), 3), 0.0)
    assert [effect.slot.key for effect in effects if isinstance(effect, SlotEvicted)] == [b"a"]


def test_bytes_are_leased_cached_or_free() -> None:
    machine = arena(4096)
    for key in (b"a", b"b"):
        put(machine, key, 1024)
    machine.handle(GrantLease(b"a", b"l", LEASE_S), 0.0)
    assert (machine.leased_bytes, machine.cached_bytes, machine.available_bytes) == (1024, 1024, 3072)


def test_granting_a_lease_on_an_evicted_embedding_is_a_lost_lease() -> None:
    machine = arena(1024)
    old = put(machine, b"a", 1024)
    put(machine, b"b", 1024)
    assert isinstance(refusal(machine, GrantLease(b"a", b"l", LEASE_S, old.generation)), LeaseLost)
    assert isinstance(refusal(machine, GrantLease(b"b", b"l", LEASE_S, old.generation)), LeaseLost)
    writing = arena()
    reserve(writing, b"a", 64)
    assert isinstance(refusal(writing, GrantLease(b"a", b"l", LEASE_S)), LeaseLost)


def test_an_abandoned_slot_is_free_and_cannot_end_twice() -> None:
    machine = arena(1024)
    slot = reserve(machine, b"a", 1024)
    machine.handle(Abandon(b"a", slot.generation), 0.0)
    assert machine.available_bytes == 1024
    with pytest.raises(ValueError, match="not being written"):
        machine.handle(Commit(b"a", slot.generation, 1), 0.0)


def test_only_the_writer_of_a_slot_can_commit_or_abandon_it() -> None:
    machine = arena()
    slot = reserve(machine, b"a", 64)
    for event in (Commit(b"a", slot.generation + 1, 1), Abandon(b"a", slot.generation + 1)):
        with pytest.raises(ValueError, match="not being written"):
            machine.handle(event, 0.0)
    machine.handle(Commit(b"a", slot.generation, 1), 0.0)
    for event in (Commit(b"a", slot.generation, 1), Abandon(b"a", slot.generation)):
        with pytest.raises(ValueError, match="not being written"):
            machine.handle(event, 0.0)
    machine.validate()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", ["any", "classes"])
def test_mixed_sizes_use_at_least_seven_tenths_of_an_arena_before_one_is_refused(sizes: str, seed: int) -> None:
    """1 KB to 100 MB in 1 GB, released in random order: 70 % is leased at any refusal, 90 % on average."""
    rng = random.Random(seed)
    machine = ArenaMachine(start=4096, end=1 << 30, holder="e0", epoch=1, max_pull_s=1.0)
    leases: list[bytes] = []
    leased_at_refusal: list[float] = []
    for number in range(3000):
        key = number.to_bytes(16, "big")
        any_size = int(1024 * 10 ** (rng.random() * 5))
        nbytes = any_size if sizes == "any" else rng.choice((1 << 10, 1 << 20, 5 << 20, 100 << 20))
        effect = machine.handle(Reserve(key, specs(nbytes + 16), 3), 0.0)[-1]
        if isinstance(effect, Reserved):
            machine.handle(Commit(key, effect.slot.generation, checksum=1), 0.0)
            machine.handle(GrantLease(key, key, 600.0), 0.0)
            leases.append(key)
        else:
            leased_at_refusal.append(machine.leased_bytes / machine.capacity_bytes)
            released = [leases.pop(rng.randrange(len(leases))) for _ in range(min(len(leases), rng.randint(1, 3)))]
            machine.handle(ReleaseLeases(tuple(released)), 0.0)
    machine.validate()
    assert len(leased_at_refusal) > 100
    assert min(leased_at_refusal) > 0.7
    assert mean(leased_at_refusal) > 0.9


class ArenaModel(RuleBasedStateMachine):
    """Any order of events: invariants hold, and leased memory is not reused."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = arena(2048)
        self.now_s = 0.0
        self.writing: dict[bytes, int] = {}
        self.leases: dict[bytes, tuple[Slot, float]] = {}
        self.count = 0
        self.last_generation = 0

    @rule(key=st.binary(min_size=1, max_size=1), nbytes=st.integers(16, 2200))
    def reserve(self, key: bytes, nbytes: int) -> None:
        effect = self.machine.handle(Reserve(key, specs(nbytes), 3), self.now_s)[-1]
        if isinstance(effect, Reserved):
            slot = effect.slot
            assert slot.generation > self.last_generation
            self.last_generation = slot.generation
            self.writing[key] = slot.generation
            for held, until_s in self.leases.values():
                apart = held.offset + held.slot_nbytes <= slot.offset or slot.offset + nbytes <= held.offset
                assert apart or self.now_s >= until_s + MAX_PULL_S

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), commit=st.booleans())
    def finish(self, data: st.DataObject, commit: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.writing)))
        generation = self.writing.pop(key)
        self.machine.handle(Commit(key, generation, 1) if commit else Abandon(key, generation), self.now_s)

    @rule(key=st.binary(min_size=1, max_size=1), lease_s=st.floats(0, 20))
    def grant(self, key: bytes, lease_s: float) -> None:
        self.count += 1
        lease_id = self.count.to_bytes(16, "big")
        [effect] = self.machine.handle(GrantLease(key, lease_id, lease_s), self.now_s)
        slot = self.machine.find(key)
        if isinstance(effect, LeaseGranted) and slot is not None:
            self.leases[lease_id] = (slot, self.now_s + lease_s)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), lease_s=st.floats(0, 20))
    def extend(self, data: st.DataObject, lease_s: float) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        slot, until_s = self.leases[lease_id]
        [effect] = self.machine.handle(GrantLease(slot.key, lease_id, lease_s, slot.generation), self.now_s)
        gone = self.now_s >= until_s  # it may have been swept already
        assert gone or isinstance(effect, LeaseGranted)
        if isinstance(effect, LeaseGranted):
            self.leases[lease_id] = (slot, max(until_s, self.now_s + lease_s))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[lease_id]
        self.machine.handle(ReleaseLeases((lease_id,)), self.now_s)

    @rule(seconds=st.floats(0, 12))
    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.machine.handle(ArenaTick(), self.now_s)

    @invariant()
    def holds(self) -> None:
        self.machine.validate()
        for lease_id, (slot, until_s) in self.leases.items():
            assert self.machine.may_read(lease_id, slot.offset, slot.slot_nbytes, self.now_s) == (self.now_s < until_s)


TestArenaModel = ArenaModel.TestCase
