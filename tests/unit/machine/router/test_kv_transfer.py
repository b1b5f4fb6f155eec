"""A request that one text instance prefills and another one goes on with: when, with what, and what is held meanwhile."""

from dataclasses import replace

import pytest

from tests.unit.machine.router.test_request import World, failed, finished
from triptych.domain.generation import KvReport, Ready
from triptych.errors import EngineFailure, InstanceLost, LeaseLost, Overloaded, TransferFailed, Unavailable
from triptych.machine.router.attempts import MOST_EXCUSED
from triptych.machine.router.leases import leases_of
from triptych.machine.router.request import RequestPhase
from triptych.machine.router.request_events import (
    AnswerTransferred,
    AttemptKind,
    Generate,
    Renew,
    Renewed,
    Signal,
    TextReported,
)
from triptych.machine.router.shared_events import (
    CreditsAbandoned,
    CreditsWanted,
    FirstToken,
    Granted,
    LeasesTaken,
    Release,
    TextPoolLost,
    TextWanted,
)

READY = Ready((), 0.1, 0.2)


def prefilled(count: int = 2) -> tuple[World, Generate]:
    """The first token of a prompt has come, and its embeddings are leased for the next reader."""
    world = World(count)
    first = world.up_to_text(transfers_kv=True)
    assert first.kind is AttemptKind.PREFILL
    world.feed(TextReported(first.credit, READY))
    world.renew_all()
    world.now_s = 1.0
    world.feed(FirstToken(first.credit))
    return world, first


def kv_transferred(count: int = 2, segments: int = 2) -> tuple[World, Generate]:
    """Another instance has got it, and has not begun."""
    world, first = prefilled(count)
    world.transfer_kv(first, segments)
    return world, world.dispatched()


def test_an_answer_goes_on_at_once_with_all_that_the_next_one_may_need() -> None:
    world, first = prefilled()
    before = {place.ticket.lease_id for place in first.placements}
    world.transfer_kv(first)
    (wanted,) = world.take(TextWanted)
    assert isinstance(wanted, TextWanted)
    assert (wanted.continues, wanted.sender, wanted.covered_tokens) == (True, first.name, 20)
    assert wanted.holders[f"i-{first.name}"] == 2 * 128
    assert wanted.avoid == frozenset()
    second = world.place_text(wanted)
    assert second.kind is AttemptKind.DECODE
    assert [(segment.first, segment.ticket.address) for segment in second.kv_segments] == [
        (0, first.name),
        (10, first.name),
    ]
    assert len(second.placements) == 2
    assert not before & {place.ticket.lease_id for place in second.placements}, "leases of its own"


def test_what_is_held_is_held_until_the_next_ones_first_token() -> None:
    world, second = kv_transferred()
    (taken,) = [effect for effect in world.effects if isinstance(effect, LeasesTaken)]
    assert taken.name == "t1", "it is not forgotten before they are released"
    assert set(taken.lease_ids) <= world.leases.keys()
    assert len(taken.lease_ids) == 4
    assert len(world.leases) == 2 * 3 + 2 * 2
    world.feed(TextReported(second.credit, Ready((), 0.0, 0.0, KvReport(20, 0, 30, 640))))
    assert len(world.credits) == 2
    world.now_s = 1.5
    world.feed(FirstToken(second.credit))
    assert not world.leases
    assert not world.credits
    world.now_s = 3.0
    world.feed(TextReported(second.credit, finished()))
    world.assert_over(RequestPhase.DONE)
    timeline = world.machine.timeline(9.0, 0)
    assert (timeline.prefill_instance, timeline.text_instance) == ("i-t1", "i-t2")
    assert (timeline.ttft_s, timeline.kv_transfer_s, timeline.decode_s) == (1.0, 0.5, 2.0)
    assert (timeline.kv_pulled_tokens, timeline.kv_computed_tokens, timeline.kv_pull_bytes) == (20, 30, 640)
    assert (timeline.queue_s, timeline.pull_s) == (0.1, 0.2), "of the one that prefilled"
    assert (timeline.text_attempts, timeline.continuations) == (1, 0)


def test_what_is_kv_transferred_to_nobody_is_released() -> None:
    """The answer is over, as the router needs no more of it; or it is transferred twice."""
    for ends in (True, False):
        world, first = prefilled()
        if ends:
            world.feed(TextReported(first.credit, finished()))
        else:
            world.transfer_kv(first)
        segments = world.sealed(first, 2)
        (released,) = world.feed(AnswerTransferred(first.credit, first.name, segments))
        assert released == Release(first.name, None, leases_of(segments), "came too late")


def test_an_answer_that_ends_with_the_prefill_is_done() -> None:
    world, first = prefilled()
    world.feed(TextReported(first.credit, finished()))
    world.assert_over(RequestPhase.DONE)
    assert world.machine.timeline(9.0, 0).prefill_instance == ""


def test_leases_that_are_still_being_renewed_are_waited_for() -> None:
    world = World(2)
    first = world.up_to_text(transfers_kv=True)
    world.feed(TextReported(first.credit, READY))
    world.feed(FirstToken(first.credit))
    assert not world.take(TextWanted)
    world.transfer_kv(first)
    assert not world.take(TextWanted)
    world.renew_all()
    assert len(world.dispatched().placements) == 2


@pytest.mark.parametrize("error", [LeaseLost("gone"), Unavailable("gone")])
def test_an_item_that_is_lost_meanwhile_is_placed_again_when_the_answer_is_kv_transferred(
    error: LeaseLost | Unavailable,
) -> None:
    world = World(2)
    first = world.up_to_text(transfers_kv=True)
    world.feed(TextReported(first.credit, READY))
    (lost, kept) = world.take(Renew)
    assert isinstance(lost, Renew)
    assert isinstance(kept, Renew)
    world.feed(failed(lost, error))
    world.renewed(kept)
    assert world.machine.phase is RequestPhase.DISPATCHING, "the prompt is computed without it"
    world.feed(FirstToken(first.credit))
    world.transfer_kv(first)
    (again,) = world.take(CreditsWanted)
    assert isinstance(again, CreditsWanted)
    assert [want.item for want in again.wants] == [0]
    world.place(again)
    world.encode_all()
    second = world.dispatched()
    assert (len(second.placements), len(second.kv_segments)) == (2, 2)


def test_nothing_sealed_leaves_everything_to_be_computed() -> None:
    world, first = prefilled()
    world.transfer_kv(first, 0)
    second = world.dispatched()
    assert (second.kind, second.kv_segments) == (AttemptKind.DECODE, ())


@pytest.mark.parametrize(
    "error", [Unavailable("gone"), Overloaded("full"), EngineFailure("broke"), TransferFailed("x")]
)
def test_a_further_attempt_has_the_same_segments_with_new_leases(
    error: Unavailable | Overloaded | EngineFailure | TransferFailed,
) -> None:
    world, second = kv_transferred(count=0)
    before = {segment.ticket.lease_id for segment in second.kv_segments}
    world.feed(failed(second, error))
    (renew,) = world.take_of_segments()
    assert not world.take(TextWanted)
    world.renew_segments(renew)
    third = world.dispatched()
    assert world.avoided == (frozenset() if isinstance(error, TransferFailed) else {second.name})
    assert [segment.first for segment in third.kv_segments] == [0, 10]
    assert not before & {segment.ticket.lease_id for segment in third.kv_segments}
    world.feed(FirstToken(third.credit))
    assert not world.leases


@pytest.mark.parametrize(("kept", "sent"), [(0, []), (1, [0]), (2, [0, 10])])
def test_segments_up_to_the_first_that_is_gone_are_sent_again(kept: int, sent: list[int]) -> None:
    world, second = kv_transferred(count=0)
    world.feed(failed(second, InstanceLost("gone")))
    (renew,) = world.take_of_segments()
    world.renew_segments(renew, kept)
    assert [segment.first for segment in world.dispatched().kv_segments] == sent


def test_segments_that_end_soon_are_leased_anew_before_they_are_sent() -> None:
    world, first = prefilled()
    world.transfer_kv(first, lease_s=1.5)
    assert not world.take(TextWanted)
    (renew,) = world.take_of_segments()
    world.renew_segments(renew)
    assert len(world.dispatched().kv_segments) == 2


def test_a_segment_of_another_holder_or_place_is_not_used() -> None:
    world, first = prefilled(0)
    start, middle, end = world.sealed(first, 3)
    gap = replace(middle, placement=replace(middle.placement, first=11))
    world.feed(AnswerTransferred(first.credit, first.name, (start, gap, end)))
    second = world.dispatched()
    assert [place.first for place in second.kv_segments] == [0]
    world.feed(FirstToken(second.credit))
    assert not world.leases, "leases of what is not used are returned too"


def test_a_stream_that_breaks_before_the_kv_transfer_goes_on_with_the_items_that_are_held() -> None:
    world, first = prefilled()
    world.feed(failed(first, InstanceLost("gone")))
    assert not world.take(CreditsWanted)
    second = world.dispatched()
    assert (second.kind, second.kv_segments, len(second.placements)) == (AttemptKind.DECODE, (), 2)
    assert world.machine.timeline(9.0, 0).interrupted_s == 8.0


def test_a_decode_instance_that_dies_in_mid_answer_leaves_a_continuation_without_segments() -> None:
    world, second = kv_transferred()
    world.feed(FirstToken(second.credit))
    world.feed(failed(second, InstanceLost("gone")))
    (wanted,) = world.take(CreditsWanted)
    assert isinstance(wanted, CreditsWanted)
    assert wanted.wait
    world.place(wanted)
    world.encode_all()
    assert world.dispatched().kv_segments == ()


@pytest.mark.parametrize("count", [0, 2])
def test_a_kv_transfer_in_mid_answer_costs_no_attempt(count: int) -> None:
    world = World(count)
    dispatch = world.up_to_text()
    for number in range(MOST_EXCUSED):
        world.feed(FirstToken(dispatch.credit))
        world.transfer_kv(dispatch)
        dispatch = world.up_to_text()
        assert len(dispatch.kv_segments) == 2, f"KV transfer {number}"
    timeline = world.machine.timeline(9.0, 0)
    assert (timeline.text_attempts, timeline.prefill_instance) == (1, "i-t1")


def test_kv_transfers_without_end_fail() -> None:
    world = World(0)
    for _ in range(MOST_EXCUSED + 4):
        if world.ends:
            break
        dispatch = world.dispatched()
        world.feed(FirstToken(dispatch.credit))
        world.transfer_kv(dispatch)
    world.assert_over(RequestPhase.FAILED)


def test_one_that_drains_before_its_first_token_leaves_what_there_was() -> None:
    world, second = kv_transferred(count=0)
    world.transfer_kv(second, 0)
    (renew,) = world.take_of_segments()
    world.renew_segments(renew)
    assert len(world.dispatched().kv_segments) == 2


@pytest.mark.parametrize("signal", [Signal.CALLER_LEFT, Signal.DEADLINE_PASSED])
def test_an_end_returns_everything(signal: Signal) -> None:
    world, first = prefilled()
    world.transfer_kv(first)
    world.feed(signal)
    assert not world.leases
    assert not world.credits
    late = world.sealed(first, 1)
    (release,) = world.feed(AnswerTransferred(first.credit, first.name, late))
    assert isinstance(release, Release)
    assert len(release.lease_ids) == 2
    assert not world.leases


def test_leases_of_segments_that_come_after_the_end_are_returned() -> None:
    world, second = kv_transferred(count=0)
    world.feed(failed(second, Overloaded("full")))
    (renew,) = world.take_of_segments()
    world.feed(Signal.CALLER_LEFT)
    world.renew_segments(renew)
    assert not world.leases
    assert world.feed(Renewed(renew, 9.0, (), LeaseLost("gone"))) == []


def test_a_request_that_waits_for_memory_elsewhere_says_that_it_no_longer_does() -> None:
    world = World(0)
    assert world.take(TextWanted)
    assert CreditsAbandoned(1, "failed") in world.feed(Signal.DEADLINE_PASSED)


@pytest.mark.parametrize(("begun", "phase"), [(False, RequestPhase.ENCODING), (True, RequestPhase.FAILED)])
def test_the_loss_of_all_that_prefill_ends_no_answer_that_can_go_on(begun: bool, phase: RequestPhase) -> None:
    world, second = kv_transferred(count=0)
    world.feed(failed(second, Overloaded("full")))
    world.feed(TextPoolLost(Unavailable("none"), begun=begun))
    assert world.machine.phase is phase


def test_a_place_that_comes_too_late_is_returned() -> None:
    world = World(0)
    (wanted,) = world.take(TextWanted)
    assert isinstance(wanted, TextWanted)
    world.feed(Signal.CALLER_LEFT)
    grant = world.text_grant(wanted, transfers_kv=True)
    (release,) = world.feed(Granted(1, (grant,)))
    assert isinstance(release, Release)
    assert release.credit == grant.credit


def test_segments_that_are_kv_transferred_replace_those_that_are_held() -> None:
    world, second = kv_transferred(count=0)
    held = {lease_id for lease_id, name in world.leases.items() if name == "t1"}
    effects = world.transfer_kv(second, 1)
    (released,) = [effect for effect in effects if isinstance(effect, Release)]
    assert (released.name, released.credit, set(released.lease_ids)) == ("t1", None, held)
    (wanted,) = world.take(TextWanted)
    assert isinstance(wanted, TextWanted)
    assert (wanted.sender, wanted.covered_tokens) == (second.name, 10)


def test_an_answer_to_another_renewal_is_not_taken() -> None:
    world, second = kv_transferred(count=0)
    world.feed(failed(second, Overloaded("full")))
    (renew,) = world.take_of_segments()
    stray = replace(renew, lease_ids=(b"x" * 16, b"y" * 16))
    tickets = tuple(replace(ticket, lease_id=b"x" * 16) for ticket in renew.tickets[:1])
    (released,) = world.feed(Renewed(stray, 1.0, tickets))
    assert isinstance(released, Release)
    assert released.lease_ids == (b"x" * 16,)
    world.renew_segments(renew)
    assert len(world.dispatched().kv_segments) == 2
