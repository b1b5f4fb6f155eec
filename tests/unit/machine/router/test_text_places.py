"""Where prompts and answers go in clusters of instances that prefill, that decode, or both."""

from dataclasses import replace
from random import Random

import pytest

from tests.unit.machine.router.test_cluster import LIMITS, MODEL, Checked, refused, text_granted
from triptych.domain.generation import Finished, FinishReason
from triptych.domain.instance import InstanceInfo, InstanceLoad, StageLoad, TransportOffer
from triptych.domain.membership import Member
from triptych.domain.queue_position import QueuePosition
from triptych.domain.stage import Role, Stage
from triptych.errors import InstanceLost, Overloaded
from triptych.machine.router.cluster import ClusterMachine
from triptych.machine.router.cluster_events import (
    ClusterTick,
    InstanceSeen,
    InstanceSuspected,
    LoadReported,
    MemberJoined,
    MemberLeft,
)
from triptych.machine.router.request_events import TextReported
from triptych.machine.router.shared_events import (
    CallFailed,
    CreditReturned,
    CreditsAbandoned,
    CreditsWanted,
    FirstToken,
    Grant,
    Granted,
    Moved,
    TextPoolLost,
    TextWanted,
)
from triptych.machine.router.text_places import MOST_TOGETHER
from triptych.policy.placement.wants import Want
from triptych.policy.policies import Policies, PolicyNames

EXPECTED = 16
"""Tokens that an answer of at most 16 is expected to have, at most."""


def seen(
    name: str, role: Role, *, kind: str = "kind", continues: bool = True, kv_tokens: int = 0, host: str = ""
) -> InstanceSeen:
    offers = (TransportOffer("shm", host, b""),) if host else ()
    info = InstanceInfo(
        f"i-{name}",
        1,
        role,
        MODEL,
        100,
        offers,
        kv_tokens=kv_tokens,
        continues=continues,
        prefills_early=True,
        kv_kind=kind,
        transfers_kv=bool(kind),
    )
    return InstanceSeen(name, info)


def cluster(*described: InstanceSeen, kv_transfer: str = "never", max_waiting: int = 3) -> ClusterMachine:
    policies = Policies.named(PolicyNames(kv_transfer=kv_transfer))
    limits = replace(LIMITS, max_waiting_requests=max_waiting)
    machine = Checked(limits, policies, Random(7), arena_retry_s=0.5, retry_after_s=2.0)
    for instance in described:
        machine.handle(MemberJoined(Member(instance.name)), 0)
        machine.handle(instance, 0)
    return machine


def want(machine: ClusterMachine, number: int = 1, tokens: int = 50, **more: object) -> Grant:
    return text_granted(machine.handle(TextWanted(number, tokens, max_tokens=EXPECTED, **more), 0))  # type: ignore[arg-type]


def go_on(machine: ClusterMachine, sender: str, number: int = 1, covered: int = 50, **more: object) -> Grant:
    return want(machine, number, 50, continues=True, sender=sender, covered_tokens=covered, **more)


def decoding(name: str, tokens: int = 0, running: int = 0, free: int | None = None) -> LoadReported:
    return LoadReported(name, InstanceLoad({Stage.DECODE: StageLoad(tokens, running, free_tokens=free)}))


def test_a_prompt_goes_to_an_instance_that_prefills_and_its_answer_to_one_that_decodes() -> None:
    machine = cluster(seen("d", Role.D), seen("p", Role.P))
    assert machine.instances.has_text
    prompt = want(machine)
    assert (prompt.name, prompt.transfers_kv) == ("p", True)
    answer = go_on(machine, "p")
    assert (answer.name, answer.transfers_kv) == ("d", False)


@pytest.mark.parametrize("role", [Role.PD, Role.EPD])
def test_one_that_does_both_keeps_its_answers_by_default(role: Role) -> None:
    machine = cluster(seen("b", role), seen("d", Role.D))
    assert not want(machine).transfers_kv


@pytest.mark.parametrize("end", [MemberLeft("d"), InstanceSuspected("d")])
def test_one_that_only_prefills_gets_nothing_without_one_that_decodes(end: MemberLeft | InstanceSuspected) -> None:
    machine = cluster(seen("d", Role.D), seen("p", Role.P))
    machine.handle(end, 0)
    assert not machine.instances.has_text
    assert "decode" in machine.instances.readiness().missing
    assert isinstance(refused(machine.handle(TextWanted(1, 10), 0)).error, Exception)


def test_one_that_cannot_go_on_with_answers_takes_none() -> None:
    machine = cluster(seen("d", Role.D, continues=False), seen("p", Role.P))
    assert machine.instances.readiness().missing == ("encode", "decode")


def test_answers_go_on_where_no_prompts_are_taken_when_all_that_prefill_are_gone() -> None:
    machine = cluster(seen("d", Role.D), seen("p", Role.P))
    machine.handle(MemberLeft("p"), 0)
    assert want(machine, continues=True).name == "d"
    (lost,) = [effect for effect in machine.handle(ClusterTick(), 60.0) if isinstance(effect, TextPoolLost)]
    assert not lost.begun
    assert want(machine, continues=True).name == "d"
    machine.handle(MemberLeft("d"), 61.0)
    assert refused(machine.handle(TextWanted(1, 10, continues=True), 61.0)).final


def test_the_work_of_a_prompt_is_where_it_is_prefilled_and_that_of_its_answer_where_it_is_decoded() -> None:
    machine = cluster(seen("d", Role.D), seen("p", Role.P))
    prefill, decode = machine.instances.by_name["p"], machine.instances.by_name["d"]
    prompt = want(machine)
    assert (prefill.pending_tokens(Stage.PREFILL), prefill.pending_tokens(Stage.DECODE)) == (50, 0)
    assert decode.requests == 0
    machine.handle(FirstToken(prompt.credit), 0)
    assert prefill.pending_tokens(Stage.PREFILL) == 0
    answer = go_on(machine, "p", covered=48)
    machine.handle(CreditReturned(prompt.credit), 0)
    assert 2 < decode.pending_tokens(Stage.DECODE) <= 2 + EXPECTED
    assert decode.pending_tokens(Stage.PREFILL) == 0, "the rest of the prompt is a step of its answer"
    assert (decode.requests, prefill.requests) == (1, 0)
    assert decode.own_kv_tokens == pytest.approx(50 + EXPECTED, abs=2)
    machine.handle(FirstToken(answer.credit), 0)
    assert 0 < decode.pending_tokens(Stage.DECODE) <= EXPECTED
    machine.handle(CreditReturned(answer.credit), 0)
    assert (decode.pending_tokens(Stage.DECODE), decode.own_kv_tokens, machine.outstanding) == (0, 0, 0)


def test_an_answer_goes_where_least_is_decoded() -> None:
    machine = cluster(seen("d", Role.D), seen("e", Role.D), seen("p", Role.P))
    machine.handle(decoding("d", 1000, 3), 0)
    assert {go_on(machine, "p", number).name for number in range(4)} == {"e"}


def test_an_answer_goes_where_its_keys_and_values_can_be_used() -> None:
    machine = cluster(seen("d", Role.D, kind="other"), seen("e", Role.D), seen("p", Role.P))
    machine.handle(decoding("e", 1000, 3), 0)
    assert go_on(machine, "p").name == "e"
    assert go_on(machine, "p", avoid=frozenset({"e"})).name == "d", "it computes"
    assert want(machine, continues=True).name == "d", "without keys and values the load decides"


def test_of_equals_the_one_on_the_host_of_the_sender_goes_on() -> None:
    machine = cluster(seen("d", Role.D, host="far"), seen("e", Role.D, host="near"), seen("p", Role.P, host="near"))
    for number in range(4):
        grant = go_on(machine, "p", number, holders={"i-p": 1000})
        assert grant.name == "e"
        machine.handle(CreditReturned(grant.credit), 0)


def test_an_answer_goes_where_there_is_kv_memory() -> None:
    machine = cluster(seen("d", Role.D), seen("e", Role.D), seen("p", Role.P))
    machine.handle(decoding("d", 10, 1, free=20), 0)
    machine.handle(decoding("e", 1000, 3, free=1000), 0)
    assert go_on(machine, "p").name == "e"
    machine.handle(decoding("e", 1000, 3, free=0), 0)
    assert go_on(machine, "p").name == "d", "it waits there"


def test_a_prompt_waits_until_an_answer_has_ended() -> None:
    machine = cluster(seen("d", Role.D, kv_tokens=100), seen("p", Role.P))
    first = want(machine, 1)
    assert machine.handle(TextWanted(2, 50, max_tokens=EXPECTED), 0) == []
    assert machine.waiting_for_kv == 1
    answer = go_on(machine, "p", 1)
    assert machine.handle(CreditReturned(first.credit), 0) == [], "its answer has its place"
    (granted,) = machine.handle(CreditReturned(answer.credit), 0)
    assert isinstance(granted, Granted)
    assert (granted.request, granted.grants[0].transfers_kv, machine.waiting_for_kv) == (2, True, 0)


def test_a_report_of_free_memory_wakes_a_prompt() -> None:
    machine = cluster(seen("d", Role.D), seen("p", Role.P))
    machine.handle(decoding("d", 1000, 5, free=10), 0)
    assert machine.handle(TextWanted(1, 50, max_tokens=EXPECTED), 0) == []
    (granted,) = machine.handle(decoding("d", 500, 2, free=500), 0)
    assert isinstance(granted, Granted)


def test_an_idle_instance_takes_what_it_can_hold_whatever_it_reports() -> None:
    machine = cluster(seen("d", Role.D, kv_tokens=60), seen("p", Role.P))
    machine.handle(decoding("d", free=50), 0)
    assert want(machine).transfers_kv, "more than is expected to fit is capped"


def test_prompts_wait_in_their_order() -> None:
    machine = cluster(seen("d", Role.D, kv_tokens=100), seen("p", Role.P))
    first = want(machine, 1)
    for number in (2, 3, 4):
        queue_position = QueuePosition(0, 10.0 - number, number)
        assert machine.handle(TextWanted(number, 50, max_tokens=EXPECTED, queue_position=queue_position), 0) == []
    assert isinstance(refused(machine.handle(TextWanted(5, 50, max_tokens=EXPECTED), 0)).error, Overloaded)
    machine.handle(CreditsAbandoned(4), 0)
    (granted,) = machine.handle(CreditReturned(first.credit), 0)
    assert isinstance(granted, Granted)
    assert granted.request == 3
    assert machine.waiting_for_kv == 1


def test_no_prompt_passes_a_suspect_that_waits_for_memory() -> None:
    machine = cluster(seen("d", Role.D, kv_tokens=100), seen("p", Role.P))
    first = want(machine, 1)
    assert (
        machine.handle(TextWanted(2, 50, max_tokens=EXPECTED, suspect=True, queue_position=QueuePosition(0, 0.0, 2)), 0)
        == []
    )
    assert machine.handle(TextWanted(3, 10, max_tokens=EXPECTED, queue_position=QueuePosition(0, 1.0, 3)), 0) == [], (
        "though it has room"
    )
    granted = machine.handle(CreditReturned(first.credit), 0)
    assert [effect.request for effect in granted if isinstance(effect, Granted)] == [2, 3]


def test_a_suspect_waits_until_another_has_its_first_token_and_holds_up_nobody() -> None:
    machine = cluster(seen("t", Role.PD))
    first = want(machine, 1, suspect=True)
    assert machine.handle(TextWanted(2, 50, max_tokens=EXPECTED, suspect=True), 0) == []
    assert want(machine, 3).name == "t"
    granted = machine.handle(FirstToken(first.credit), 0)
    assert [effect.request for effect in granted if isinstance(effect, Granted)] == [2]


def test_a_few_suspects_go_on_with_their_answers_together() -> None:
    machine = cluster(seen("t", Role.PD), max_waiting=4)
    together = [want(machine, number, suspect=True, continues=True) for number in range(MOST_TOGETHER)]
    prompt = TextWanted(MOST_TOGETHER, 50, max_tokens=EXPECTED, suspect=True)
    assert machine.handle(prompt, 0) == [], "its first token is to come"
    assert machine.handle(replace(prompt, request=MOST_TOGETHER + 1, continues=True), 0) == []
    granted = machine.handle(FirstToken(together[0].credit), 0)
    assert [effect.request for effect in granted if isinstance(effect, Granted)] == [MOST_TOGETHER + 1]


def test_a_prompt_that_waits_is_refused_when_those_that_prefill_are_gone() -> None:
    machine = cluster(seen("d", Role.D, kv_tokens=100), seen("p", Role.P))
    want(machine, 1)
    machine.handle(TextWanted(2, 50, max_tokens=EXPECTED), 0)
    found = refused(machine.handle(MemberLeft("p"), 0))
    assert (found.request, found.final, machine.waiting_for_kv) == (2, False, 0)


def test_no_prompt_waits_where_one_instance_does_both() -> None:
    machine = cluster(seen("b", Role.PD), seen("d", Role.D, kv_tokens=100), seen("p", Role.P))
    machine.handle(LoadReported("b", InstanceLoad({Stage.PREFILL: StageLoad(5000, 9)})), 0)
    first = want(machine, 1)
    assert first.transfers_kv
    machine.handle(decoding("d", 1000, 9, free=0), 0)
    machine.handle(LoadReported("b", InstanceLoad({Stage.DECODE: StageLoad(5000, 9, free_tokens=0)})), 0)
    second = want(machine, 2)
    assert (second.name, second.transfers_kv) == ("b", False)


@pytest.mark.parametrize(
    ("kv_transfer", "here", "there", "transfers_kv"),
    [
        ("never", 5000, 0, False),
        ("by-need", 5000, 0, True),
        ("by-need", 5000, 5000, False),
        ("by-need", 0, 0, False),
        ("always", 0, 5000, True),
    ],
)
def test_one_that_does_both_transfers_kv_by_policy(kv_transfer: str, here: int, there: int, transfers_kv: bool) -> None:
    machine = cluster(seen("b", Role.PD), seen("d", Role.D), kv_transfer=kv_transfer)
    machine.handle(decoding("b", here, 1), 0)
    machine.handle(decoding("d", there, 1), 0)
    grant = text_granted(machine.handle(TextWanted(1, 50, max_tokens=200), 0))
    assert (grant.name, grant.transfers_kv) == ("b", transfers_kv)


@pytest.mark.parametrize(
    "other", [seen("d", Role.D, kind="other"), seen("d", Role.D, continues=False), seen("d", Role.P)]
)
def test_nothing_is_kv_transferred_by_policy_where_it_would_be_computed_again(other: InstanceSeen) -> None:
    machine = cluster(seen("b", Role.PD), other, kv_transfer="always")
    assert not want(machine, avoid=frozenset({"d"})).transfers_kv


def test_beginnings_of_prompts_are_computed_where_the_answer_stays() -> None:
    machine = cluster(seen("b", Role.PD), seen("d", Role.D), seen("p", Role.P), kv_transfer="always")
    assert {want(machine, number, early=True).name for number in range(1)} == {"b"}
    assert machine.handle(TextWanted(9, 50, early=True, avoid=frozenset({"b"})), 0) == []


@pytest.mark.parametrize("kv_transfer", ["never", "always"])
def test_an_answer_leaves_a_place_that_is_kept_if_it_was_granted_so(kv_transfer: str) -> None:
    machine = cluster(seen("b", Role.PD), seen("d", Role.D), kv_transfer=kv_transfer)
    first = want(machine)
    kept = want(machine, kept_credit=first.credit)
    assert (kept.credit, kept.transfers_kv) == (first.credit, kv_transfer == "always")


def test_instances_of_the_release_before_go_on_as_they_did() -> None:
    machine = cluster(seen("b", Role.PD, kind=""), seen("c", Role.PD, kind="", continues=False), kv_transfer="always")
    assert {want(machine, number).name for number in range(4)} == {"b", "c"}
    assert want(machine, continues=True).name == "b"


def test_an_engine_that_fails_in_decoding_is_in_backoff_there() -> None:
    machine = cluster(seen("d", Role.D), seen("e", Role.D), seen("p", Role.P))
    grant = go_on(machine, "p")
    machine.handle(CallFailed(grant.credit, grant.name, InstanceLost("gone")), 0)
    assert {go_on(machine, "p", number).name for number in range(4)} == {"d", "e"} - {grant.name}


def test_answers_are_expected_to_be_as_long_as_earlier_ones_of_the_same_model() -> None:
    machine = cluster(seen("t", Role.PD))

    def expected() -> int:
        """Tokens that one more answer adds to what is to be decoded."""
        grant = want(machine)
        tokens = machine.instances.by_name["t"].pending_tokens(Stage.DECODE)
        machine.handle(CreditReturned(grant.credit), 0)
        return tokens

    assert expected() == EXPECTED
    for number in range(400):
        grant = want(machine, number)
        machine.handle(TextReported(grant.credit, Finished(FinishReason.STOP, 1, 0.0, 0.0)), 0)
        machine.handle(CreditReturned(grant.credit), 0)
    assert expected() < 5
    machine.handle(MemberJoined(Member("u")), 0)
    machine.handle(seen("u", Role.PD), 0)
    assert expected() < 5, "the model is the same"
    machine.handle(MemberLeft("u"), 0)
    other = seen("t", Role.PD)
    model = replace(MODEL, model_id="other")
    machine.handle(InstanceSeen("t", replace(other.info, model=model)), 0)
    assert expected() == EXPECTED


def test_a_request_moves_to_a_lender_that_is_idle_and_leaves_it_when_items_come() -> None:
    limits = replace(LIMITS, lend_above=2, max_lent=2, lent_patience_s=1.0)
    policies = Policies.named(PolicyNames(lending="idle"))
    machine = Checked(limits, policies, Random(7), arena_retry_s=0.5, retry_after_s=2.0)
    for instance in (seen("h", Role.EPD), seen("t", Role.PD)):
        machine.handle(MemberJoined(Member(instance.name)), 0)
        machine.handle(instance, 0)

    def item(number: int, now_s: float) -> Grant:
        wanted = CreditsWanted(number, (Want(0, 5, 10, (b"%d" % number, b"")),), wait=False)
        (granted,) = [effect for effect in machine.handle(wanted, now_s) if isinstance(effect, Granted)]
        return granted.grants[0]

    first = item(90, 0.0)
    places = [want(machine, number) for number in range(4)]
    assert {place.name for place in places} == {"t"}
    moved = [effect for effect in machine.handle(CreditReturned(first.credit), 0) if isinstance(effect, Moved)]
    assert [(effect.request, effect.grant and effect.grant.name) for effect in moved] == [(3, "h"), (2, "h")]
    assert machine.lending.lent == {"new": 0, "moved": 2, "continued": 0}
    for move in moved:
        assert move.grant is not None
        machine.handle(CreditReturned(move.credit), 0)
        assert want(machine, move.request, kept_credit=move.grant.credit, moves=1).credit == move.grant.credit
    item(91, 1.0)
    left: list[Moved] = []
    for now_s in (1.0, 1.9, 2.0):
        assert not left
        effects = machine.handle(LoadReported("t", InstanceLoad({})), now_s)
        left = [effect for effect in effects if isinstance(effect, Moved)]
    assert {(effect.request, effect.grant) for effect in left} == {(2, None), (3, None)}
    assert machine.lending.taken_back["held_up"] == 2
