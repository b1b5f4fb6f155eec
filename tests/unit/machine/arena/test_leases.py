"""Leases on the slots of an arena, through the arena's machine."""

from dataclasses import replace

import pytest

from tests.unit.machine.arena.test_arena import (
    LEASE_S,
    LIMITS,
    MAX_GIVEN_BACK,
    MAX_PULL_S,
    arena,
    put,
    reserve,
)
from triptych.errors import ArenaFull, InvalidRequest, LeaseLost, Overloaded
from triptych.machine.arena.arena import ArenaMachine


def test_an_expired_lease_keeps_its_slot_for_the_longest_pull() -> None:
    evicted: list[bytes] = []
    machine = arena(1024, evicted)
    slot = put(machine, b"a", 1024)
    machine.grant(b"a", b"l", LEASE_S, 0.0)
    assert machine.may_read(b"l", slot.offset, 1024, 9.9)
    assert not machine.may_read(b"l", slot.offset, 1024, 10.0)
    with pytest.raises(ArenaFull):
        reserve(machine, b"b", 64, 14.9)
    assert (machine.lapsed, evicted) == (0, [])
    assert reserve(machine, b"b", 64, 15.0).generation > slot.generation
    assert (machine.lapsed, evicted) == (1, [b"a"])


def test_a_release_frees_at_once_and_is_idempotent() -> None:
    machine = arena(1024)
    put(machine, b"a", 1024)
    machine.grant(b"a", b"l", LEASE_S, 0.0)
    assert machine.leased_bytes == 1024
    machine.release((b"l", b"unknown"))
    machine.release((b"l",))
    assert (machine.leased_bytes, machine.available_bytes) == (0, 1024)
    reserve(machine, b"b", 1024, 1.0)


def test_a_lease_covers_its_own_slot_only() -> None:
    machine = arena()
    slot = put(machine, b"a", 256)
    put(machine, b"b", 256)
    machine.grant(b"a", b"l", LEASE_S, 0.0)
    assert machine.may_read(b"l", slot.offset + 64, 64, 0.0)
    assert machine.may_read(b"l", slot.offset, 0, 0.0)
    for offset, nbytes in ((slot.offset, 257), (slot.offset - 1, 64), (slot.offset + 256, 1), (slot.offset, -1)):
        assert not machine.may_read(b"l", offset, nbytes, 0.0)


def test_leases_are_bounded() -> None:
    machine = arena()
    put(machine, b"a", 64)
    for index in range(LIMITS.max_leases):
        machine.grant(b"a", bytes([index]), LEASE_S, 0.0)
    with pytest.raises(Overloaded):
        machine.grant(b"a", b"more", LEASE_S, 0.0)


def test_the_leases_of_a_reader_and_its_router_are_granted_together_or_not_at_all() -> None:
    machine = arena()
    slot = put(machine, b"a", 64)
    assert machine.grant(b"a", b"reader", LEASE_S, 0.0, router_lease=b"router").lease_id == b"reader"
    machine.release((b"reader",))
    assert machine.may_read(b"router", slot.offset, 64, 0.0)
    assert machine.leased_bytes == 64, "the router's lease holds the slot"
    with pytest.raises(LeaseLost, match="released"):
        machine.grant(b"a", b"other", LEASE_S, 0.0, router_lease=b"reader")
    assert machine.leases == 1
    for index in range(LIMITS.max_leases - 2):
        machine.grant(b"a", bytes([index]), LEASE_S, 0.0)
    with pytest.raises(Overloaded):
        machine.grant(b"a", b"other", LEASE_S, 0.0, router_lease=b"second")
    machine.grant(b"a", b"other", LEASE_S, 0.0)  # there is room for one
    machine.validate()


@pytest.mark.parametrize(("asked_s", "granted_s"), [(-5.0, 0.0), (0.5, 0.5), (20.0, 20.0), (20.1, 20.0)])
def test_a_lease_has_the_requested_duration_within_the_limit(asked_s: float, granted_s: float) -> None:
    limits = replace(LIMITS, max_lease_s=20.0)
    machine = ArenaMachine(start=0, end=4096, holder="e0", epoch=7, max_pull_s=MAX_PULL_S, limits=limits)
    slot = put(machine, b"a", 64)
    assert machine.grant(b"a", b"l", asked_s, 0.0).lease_s == granted_s
    assert not machine.may_read(b"l", slot.offset, 1, granted_s)


def test_extending_leases_does_not_delay_the_expiry_of_others() -> None:
    ends_s = {b"a": 40.0, b"b": 10.0, b"c": 30.0, b"d": 20.0, b"e": 15.0}
    expected = sorted((end_s + MAX_PULL_S, key) for key, end_s in ends_s.items())
    for times in range(100):
        machine = arena()
        for key, end_s in ends_s.items():
            put(machine, key, 64)
            machine.grant(key, key, end_s, 0.0)
        for _ in range(times):
            machine.grant(b"b", b"b", ends_s[b"b"], 0.0)
        gone: list[tuple[float, bytes]] = []
        for now_s in range(0, 50, 5):
            gone += [(now_s, key) for key in machine.sweep(now_s)]
        machine.validate()
        assert gone == expected


def test_granting_a_lease_again_extends_it_and_counts_once() -> None:
    machine = arena()
    slot = put(machine, b"a", 64)
    for granted_s, lease_s, ends_s in (
        (0.0, LEASE_S, LEASE_S),
        (5.0, LEASE_S, 5.0 + LEASE_S),
        (6.0, 0.1, 5.0 + LEASE_S),
    ):
        machine.grant(b"a", b"l", lease_s, granted_s)
        assert machine.leases == 1
        assert machine.may_read(b"l", slot.offset, slot.slot_nbytes, ends_s - 0.01)
        assert not machine.may_read(b"l", slot.offset, slot.slot_nbytes, ends_s)
        machine.validate()
    put(machine, b"b", 64)
    with pytest.raises(InvalidRequest):
        machine.grant(b"b", b"l", LEASE_S, 0.0)
    assert machine.sweep(5.0 + LEASE_S + MAX_PULL_S - 0.1) == []
    assert machine.sweep(5.0 + LEASE_S + MAX_PULL_S) == [b"a"]


def test_a_released_lease_is_not_granted_again_in_either_order() -> None:
    machine = arena()
    put(machine, b"a", 64)
    machine.release((b"early",))
    with pytest.raises(LeaseLost):
        machine.grant(b"a", b"early", LEASE_S, 0.0)
    machine.grant(b"a", b"l", LEASE_S, 0.0)
    machine.release((b"l",))
    with pytest.raises(LeaseLost):
        machine.grant(b"a", b"l", LEASE_S, 0.0)
    assert machine.leases == 0
    for number in range(MAX_GIVEN_BACK - 1):
        machine.release((number.to_bytes(4, "big"),))
    with pytest.raises(LeaseLost):
        machine.grant(b"a", b"l", LEASE_S, 0.0)
    machine.release((b"one more",))
    machine.validate()
    machine.grant(b"a", b"l", LEASE_S, 0.0)  # its memory is bounded
