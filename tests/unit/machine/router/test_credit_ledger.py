import pytest

from triptych.domain.embedding import DType
from triptych.domain.instance import InstanceInfo, ModelInfo
from triptych.domain.membership import Member
from triptych.domain.stage import Role, Stage
from triptych.machine.router.credit_ledger import Credit, CreditLedger
from triptych.machine.router.instance import Instance
from triptych.machine.router.instances import Instances
from triptych.policy.placement.items import Why

MODEL = ModelInfo("m", "r", DType.F32, 8, 100)
CAT = (b"cat", b"")


def instances() -> Instances:
    made = Instances(max_hints=10)
    for name, role in (("e", Role.E), ("t", Role.PD)):
        made.join(Member(name))
        made.see(made.by_name[name], InstanceInfo(f"i-{name}", 1, role, MODEL, 100, ()))
    made.review(0.0)
    return made


def item(tokens: int = 10, nbytes: int = 30) -> Credit:
    return Credit(1, "e", Stage.ENCODE, CAT, tokens, nbytes, why=Why.HEDGE, prepare_s=0.5)


def load(instance: Instance, stage: Stage) -> tuple[int, int, int]:
    stage_load = instance.stages[stage]
    return stage_load.own_tokens, stage_load.own_pending, stage_load.own_bytes


def test_an_items_work_ends_before_its_bytes_are_given_back() -> None:
    pool = instances()
    ledger, encoder = CreditLedger(pool), pool.by_name["e"]
    grant = ledger.grant(item(), 3, 1.0, hedge_after_s=2.0)
    assert (grant.credit, grant.item, grant.instance_id, grant.reason) == (1, 3, "i-e", Why.HEDGE)
    assert (load(encoder, Stage.ENCODE), encoder.own_prepare_us) == ((10, 1, 30), 500_000)
    assert [holder.name for holder in pool.directory.holders(CAT)] == ["e"]
    for _ in range(2):
        ledger.work_ended(1)
        ledger.validate()
        assert (load(encoder, Stage.ENCODE), encoder.own_prepare_us) == ((0, 0, 30), 0)
    assert not pool.directory.holders(CAT)
    assert ledger.give_back(1) is not None
    assert (load(encoder, Stage.ENCODE), encoder.credits, len(ledger.by_number)) == ((0, 0, 0), 0, 0)
    assert ledger.give_back(1) is None


def test_a_prompt_that_is_computed_leaves_what_is_expected_of_its_answer() -> None:
    pool = instances()
    ledger, text = CreditLedger(pool), pool.by_name["t"]
    credit = Credit(1, "t", Stage.PREFILL, None, 50, 0, output_tokens=20)
    ledger.grant(credit, None, 0.0)
    ledger.prompt_computed(credit)
    ledger.validate()
    assert (load(text, Stage.PREFILL), load(text, Stage.DECODE)) == ((0, 1, 0), (20, 0, 0))
    ledger.give_back(1)
    ledger.validate()
    assert (load(text, Stage.PREFILL), load(text, Stage.DECODE)) == ((0, 0, 0), (0, 0, 0))


def test_credits_of_an_instance_that_is_forgotten_end() -> None:
    pool = instances()
    ledger = CreditLedger(pool)
    ledger.grant(item(), 0, 0.0)
    ledger.grant(Credit(1, "t", Stage.PREFILL, None, 50, 0), None, 0.0)
    pool.forget("e")
    with pytest.raises(AssertionError, match="credits of an unknown instance"):
        ledger.validate()
    ledger.forget("e")
    ledger.validate()
    assert ledger.by_number.keys() == {2}
    assert not pool.directory.holders(CAT)


def test_credits_that_an_instance_counts_otherwise_are_noticed() -> None:
    pool = instances()
    ledger = CreditLedger(pool)
    ledger.grant(item(), 0, 0.0)
    pool.by_name["e"].stages[Stage.ENCODE].own_tokens = 9
    with pytest.raises(AssertionError, match="e: tokens"):
        ledger.validate()


def test_leases_without_a_credit_hold_their_instance() -> None:
    pool = instances()
    ledger, text = CreditLedger(pool), pool.by_name["t"]
    ledger.take_leases("t", (b"1", b"2"))
    ledger.take_leases("t", (b"2", b"3"))
    ledger.take_leases("nobody", (b"4",))
    ledger.validate()
    assert ledger.leases == {"t": {b"1", b"2", b"3"}}
    ledger.give_back_leases("t", (b"1", b"2", b"of another"))
    assert ledger.holds(text)
    ledger.give_back_leases("t", (b"3",))
    assert not ledger.holds(text)
    ledger.take_leases("t", ())
    assert not ledger.holds(text), "none is held"
    ledger.give_back_leases("t", (b"3",))
    ledger.take_leases("t", (b"5",))
    pool.forget("t")
    with pytest.raises(AssertionError, match="leases at an unknown instance"):
        ledger.validate()
    ledger.forget("t")
    ledger.validate()


def test_the_memory_of_an_answer_that_will_be_handed_over_is_promised_elsewhere() -> None:
    pool = instances()
    ledger, text = CreditLedger(pool), pool.by_name["t"]
    kept, handed = (
        ledger.grant(Credit(1, "t", Stage.PREFILL, None, 5, 0, kv_tokens=60, transfers_kv=transfers_kv), None, 0.0)
        for transfers_kv in (False, True)
    )
    assert (text.own_kv_tokens, ledger.promised_kv_tokens) == (60, 60)
    ledger.give_back(kept.credit)
    assert (text.own_kv_tokens, ledger.promised_kv_tokens) == (0, 60)
    ledger.give_back(handed.credit)
    assert (text.own_kv_tokens, ledger.promised_kv_tokens) == (0, 0)
    ledger.validate()


def test_suspects_are_the_calls_of_a_request_until_they_have_computed_something_or_end() -> None:
    ledger = CreditLedger(instances())
    for request in (1, 1, 2, 2):
        ledger.grant(Credit(request, "t", Stage.PREFILL, None, 5, 0), None, 0.0)
    ledger.grant(Credit(3, "t", Stage.PREFILL, None, 5, 0), None, 0.0, suspect=True)
    assert ledger.suspects.keys() == {5}
    ledger.work_ended(1)
    ledger.suspect(1)
    assert ledger.suspects.keys() == {2, 5}, "one has ended before"
    ledger.is_cleared(2)
    ledger.work_ended(5)
    assert not ledger.suspects
    ledger.suspect(2)
    ledger.forget("t")
    assert not ledger.suspects
