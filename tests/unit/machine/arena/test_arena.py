import random
from contextlib import suppress
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triptych.domain.embedding import DType, TensorSpec
from triptych.errors import ArenaFull, InternalError, InvalidMedia, LeaseLost, TriptychError
from triptych.machine.arena.arena import ArenaMachine
from triptych.machine.arena.leases import LeaseLimits
from triptych.machine.arena.slots import Slot

LIMITS = LeaseLimits(max_leases=8)
MAX_PULL_S = 5.0
MAX_GIVEN_BACK = 32
LEASE_S = 10.0


def arena(nbytes: int = 4096, evicted: list[bytes] | None = None) -> ArenaMachine:
    """``evicted`` gets the keys of what is evicted."""

    def note(slot: Slot, _: str) -> None:
        if evicted is not None:
            evicted.append(slot.key)

    return ArenaMachine(
        start=0,
        end=nbytes,
        holder="e0",
        epoch=7,
        max_pull_s=MAX_PULL_S,
        limits=LIMITS,
        max_released=MAX_GIVEN_BACK,
        on_evicted=note,
    )


def specs(slot_nbytes: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec("t", DType.U8, (slot_nbytes - 16,)),)


def reserve(machine: ArenaMachine, key: bytes, slot_nbytes: int, now_s: float = 0.0) -> Slot:
    return machine.reserve(key, specs(slot_nbytes), 3, now_s)


def put(machine: ArenaMachine, key: bytes, slot_nbytes: int, now_s: float = 0.0) -> Slot:
    slot = reserve(machine, key, slot_nbytes, now_s)
    return machine.commit(key, slot.generation, checksum=99)


def test_a_granted_ticket_locates_the_embedding() -> None:
    machine = arena()
    slot = put(machine, b"k", 1000)
    ticket = machine.grant(b"k", b"l", LEASE_S, 0.0)
    assert (ticket.holder, ticket.epoch, ticket.offset, ticket.generation) == ("e0", 7, slot.offset, slot.generation)
    assert (ticket.checksum, ticket.tensors, ticket.tokens, ticket.lease_s) == (99, specs(1000), 3, LEASE_S)


def test_a_key_has_one_slot() -> None:
    machine = arena()
    slot = reserve(machine, b"k", 100)
    with pytest.raises(InternalError):
        reserve(machine, b"k", 100)
    assert machine.commit(b"k", slot.generation, 1) == slot
    with pytest.raises(InternalError):
        reserve(machine, b"k", 100)
    machine.validate()


def test_a_slot_gets_its_name_when_it_is_committed() -> None:
    machine = arena()
    first, second = reserve(machine, b"r1", 512), reserve(machine, b"r2", 512)
    named = replace(first, key=b"a")
    assert machine.commit(b"r1", first.generation, 99, named=b"a") == named
    assert machine.find(b"r1") is None
    assert machine.find(b"a") == named
    machine.validate()
    assert machine.commit(b"r2", second.generation, 99, named=b"a") == named
    assert (machine.leased_bytes, machine.cached, machine.cached_bytes) == (0, 1, 512)
    machine.validate()


def test_a_refusal_says_whether_it_is_permanent() -> None:
    machine = arena(4096)
    with pytest.raises(InvalidMedia):
        reserve(machine, b"big", 4097)
    reserve(machine, b"a", 4096)
    with pytest.raises(ArenaFull):
        reserve(machine, b"b", 64)


def test_the_least_recently_used_slot_is_evicted_and_leased_slots_stay() -> None:
    evicted: list[bytes] = []
    machine = arena(3 * 1024, evicted)
    for key in (b"a", b"b", b"c"):
        put(machine, key, 1024)
    machine.grant(b"a", b"la", LEASE_S, 0.0)
    reserve(machine, b"d", 1024)
    assert evicted == [b"b"]
    assert machine.find(b"a") is not None


def test_nothing_is_evicted_when_the_embedding_cannot_fit_anyway() -> None:
    machine = arena(3 * 1024)
    put(machine, b"a", 1024)
    middle = put(machine, b"b", 1024)
    put(machine, b"c", 1024)
    machine.grant(middle.key, b"l", LEASE_S, 0.0)
    with pytest.raises(ArenaFull):
        reserve(machine, b"d", 2048)
    assert machine.cached == 3


def test_nothing_is_evicted_when_no_contiguous_gap_would_result() -> None:
    machine = arena(4 * 1024)
    for key in (b"a", b"b", b"c", b"d"):
        put(machine, key, 1024)
    for key in (b"a", b"c"):
        machine.grant(key, key, LEASE_S, 0.0)
    for slot_nbytes in (2048, 3072):
        with pytest.raises(ArenaFull):
            reserve(machine, b"x", slot_nbytes)
    assert machine.cached == 4


def test_eviction_can_free_a_gap_of_the_exact_size() -> None:
    evicted: list[bytes] = []
    machine = arena(2 * 1024, evicted)
    put(machine, b"a", 1024)
    put(machine, b"b", 1024)
    machine.grant(b"b", b"l", LEASE_S, 0.0)
    reserve(machine, b"c", 1024)
    assert evicted == [b"a"]


def test_bytes_are_leased_cached_or_free() -> None:
    machine = arena(4096)
    for key in (b"a", b"b"):
        put(machine, key, 1024)
    machine.grant(b"a", b"l", LEASE_S, 0.0)
    assert (machine.leased_bytes, machine.cached_bytes, machine.available_bytes) == (1024, 1024, 3072)


def test_granting_a_lease_on_an_evicted_embedding_is_a_lost_lease() -> None:
    machine = arena(1024)
    old = put(machine, b"a", 1024)
    put(machine, b"b", 1024)
    for key in (b"a", b"b"):
        with pytest.raises(LeaseLost):
            machine.grant(key, b"l", LEASE_S, 0.0, generation=old.generation)
    writing = arena()
    reserve(writing, b"a", 64)
    with pytest.raises(LeaseLost):
        writing.grant(b"a", b"l", LEASE_S, 0.0)


def test_an_abandoned_slot_is_free_and_cannot_end_twice() -> None:
    machine = arena(1024)
    slot = reserve(machine, b"a", 1024)
    machine.abandon(b"a", slot.generation)
    assert machine.available_bytes == 1024
    with pytest.raises(ValueError, match="not being written"):
        machine.commit(b"a", slot.generation, 1)


def test_only_the_writer_of_a_slot_can_commit_or_abandon_it() -> None:
    machine = arena()
    slot = reserve(machine, b"a", 64)
    for generation in (slot.generation + 1, slot.generation):
        with pytest.raises(ValueError, match="not being written"):
            machine.commit(b"a", generation, 1)
        with pytest.raises(ValueError, match="not being written"):
            machine.abandon(b"a", generation)
        if generation != slot.generation:
            machine.commit(b"a", slot.generation, 1)
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
        try:
            slot = reserve(machine, key, nbytes + 16)
        except ArenaFull:
            leased_at_refusal.append(machine.leased_bytes / machine.capacity_bytes)
            released = [leases.pop(rng.randrange(len(leases))) for _ in range(min(len(leases), rng.randint(1, 3)))]
            machine.release(released)
        else:
            machine.commit(key, slot.generation, checksum=1)
            machine.grant(key, key, 600.0, 0.0)
            leases.append(key)
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
        with suppress(TriptychError):
            slot = reserve(self.machine, key, nbytes, self.now_s)
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
        if commit:
            self.machine.commit(key, generation, 1)
        else:
            self.machine.abandon(key, generation)

    @rule(key=st.binary(min_size=1, max_size=1), lease_s=st.floats(0, 20))
    def grant(self, key: bytes, lease_s: float) -> None:
        self.count += 1
        lease_id = self.count.to_bytes(16, "big")
        with suppress(TriptychError):
            self.machine.grant(key, lease_id, lease_s, self.now_s)
            slot = self.machine.find(key)
            assert slot is not None
            self.leases[lease_id] = (slot, self.now_s + lease_s)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), lease_s=st.floats(0, 20))
    def extend(self, data: st.DataObject, lease_s: float) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        slot, until_s = self.leases[lease_id]
        try:
            self.machine.grant(slot.key, lease_id, lease_s, self.now_s, generation=slot.generation)
        except TriptychError:
            assert self.now_s >= until_s, "it may have been swept already"
        else:
            self.leases[lease_id] = (slot, max(until_s, self.now_s + lease_s))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[lease_id]
        self.machine.release((lease_id,))

    @rule(seconds=st.floats(0, 12))
    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.machine.sweep(self.now_s)

    @invariant()
    def holds(self) -> None:
        self.machine.validate()
        for lease_id, (slot, until_s) in self.leases.items():
            assert self.machine.may_read(lease_id, slot.offset, slot.slot_nbytes, self.now_s) == (self.now_s < until_s)


TestArenaModel = ArenaModel.TestCase
