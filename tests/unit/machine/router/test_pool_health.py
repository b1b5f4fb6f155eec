from dataclasses import replace

import pytest

from triptych.domain.embedding import DType
from triptych.domain.instance import InstanceInfo, ModelInfo
from triptych.domain.membership import Member
from triptych.domain.stage import Role, Stage
from triptych.machine.router.cluster_events import ClusterEffect, Logged
from triptych.machine.router.cluster_limits import ClusterLimits
from triptych.machine.router.credit_ledger import Credit
from triptych.machine.router.health import BackoffReason, Health
from triptych.machine.router.instances import Instances
from triptych.machine.router.pool_health import PoolHealth

INFO = InstanceInfo("i", 1, Role.EPD, ModelInfo("m", "r", DType.F32, 8, 100), 1000, ())
SLOW = "it is far slower than the others"


def pool(names: str, *, share: float = 0.5, factor: float = 5.0) -> PoolHealth:
    """Instances of all stages, with these letters as names."""
    instances = Instances(10)
    for name in names:
        instances.join(Member(name))
        instances.see(instances.by_name[name], replace(INFO, instance_id=name))
    instances.review(0.0)
    limits = ClusterLimits(
        first_backoff_s=1.0,
        longest_backoff_s=8.0,
        max_failures_in_row=3,
        max_backoff_share=share,
        outlier_factor=factor,
    )
    return PoolHealth(instances, limits)


def health(made: PoolHealth, name: str, stage: Stage = Stage.ENCODE) -> Health:
    return made.instances.by_name[name].stages[stage].health


def fails(made: PoolHealth, name: str, reason: BackoffReason, now_s: float = 0.0) -> list[ClusterEffect]:
    return made.failed(made.instances.by_name[name], Stage.ENCODE, reason, now_s)


def credit(name: str, *, granted_s: float = 0.0, tokens: int = 10) -> Credit:
    return Credit(1, name, Stage.ENCODE, None, tokens, 10, granted_s=granted_s, pending_tokens=tokens)


def learn(made: PoolHealth, names: str, *, slow: str = "") -> list[ClusterEffect]:
    """Encodes of 0.1 s, or 1 s where slow, of these encoders in turn."""
    return [
        effect
        for number in range(30)
        for name in names
        for effect in made.encoded(number, credit(name), 1.0 if name in slow else 0.1)
    ]


def test_one_engine_failure_or_several_others_in_a_row_lead_to_a_backoff() -> None:
    made = pool("abcdef")
    assert fails(made, "a", BackoffReason.ENGINE) == [Logged("a", "in backoff for 1 s: its engine fails")]
    assert not fails(made, "b", BackoffReason.CALLS)
    assert not fails(made, "b", BackoffReason.EMBEDDINGS)
    made.worked(credit("b"))
    for _ in range(2):
        assert not fails(made, "b", BackoffReason.CALLS)
    assert not fails(made, "b", BackoffReason.EMBEDDINGS)
    made.read(credit("b"))
    assert fails(made, "b", BackoffReason.CALLS) == [Logged("b", "in backoff for 1 s: calls to it break")]
    for _ in range(2):
        assert not fails(made, "c", BackoffReason.EMBEDDINGS)
    assert fails(made, "c", BackoffReason.EMBEDDINGS) == [
        Logged("c", "in backoff for 1 s: its embeddings cannot be used")
    ]
    assert health(made, "c", Stage.PREFILL).reason is None


@pytest.mark.parametrize(("share", "names", "ejected"), [(0.5, "abcd", "ab"), (0.1, "abcd", "a"), (1.0, "abc", "ab")])
def test_a_pool_keeps_enough_instances(share: float, names: str, ejected: str) -> None:
    made = pool(names, share=share)
    logged = [effect for name in names for effect in fails(made, name, BackoffReason.ENGINE)]
    assert [effect.name for effect in logged if isinstance(effect, Logged)] == list(ejected)


def test_instances_that_cannot_be_used_anyway_do_not_count() -> None:
    made = pool("abc")
    made.instances.by_name["c"].reachable = False
    made.instances.review(0.0)
    assert fails(made, "a", BackoffReason.ENGINE)
    assert not fails(made, "b", BackoffReason.ENGINE)
    assert fails(made, "c", BackoffReason.ENGINE)


def test_an_encoder_that_is_slow_is_in_backoff_and_the_percentiles_start_over() -> None:
    made = pool("abc")
    for _ in range(100):
        made.times.took_at_least(10, 0.1)
    assert learn(made, "abc", slow="a") == [Logged("a", f"in backoff for 1 s: {SLOW}")]
    assert made.times.tail_s(10) > 100.0, "unknown: they included the slow one"


def test_an_encoder_is_compared_with_the_others_and_not_with_itself() -> None:
    made = pool("ab")
    assert learn(made, "ab", slow="b")
    assert health(made, "b").reason is BackoffReason.LATENCY


def test_without_a_factor_no_encoder_is_slow() -> None:
    made = pool("abc", factor=0.0)
    assert not learn(made, "abc", slow="a")
    for number in range(5):
        assert not made.overtaken(number, credit("a"), 1.0)


def test_items_that_are_encoded_with_another_say_nothing() -> None:
    made = pool("abc")
    learn(made, "abc")
    for number in range(30):
        assert not made.encoded(number, credit("a", tokens=0), 100.0)
        assert not made.overtaken(number, credit("a", tokens=0), 100.0)


@pytest.mark.parametrize(("time_s", "slow"), [(1.0, True), (0.2, False)])
def test_a_probe_decides_whether_a_slow_encoder_is_well(time_s: float, *, slow: bool) -> None:
    made = pool("abc")
    learn(made, "abc", slow="a")
    assert not made.encoded(7, credit("a", granted_s=3.0), 3.0 + time_s), "it is no probe"
    assert health(made, "a").reason is BackoffReason.LATENCY
    health(made, "a").probes.add(8)
    effects = made.encoded(8, credit("a", granted_s=3.0), 3.0 + time_s)
    assert effects == ([Logged("a", f"in backoff for 2 s: {SLOW}")] if slow else [])
    assert (health(made, "a").reason is None) is not slow


def test_an_encoder_that_is_overtaken_three_times_in_a_row_is_slow() -> None:
    made = pool("ab")
    assert not made.overtaken(1, credit("a"), 1.0)
    assert not made.overtaken(2, credit("a"), 1.0)
    made.encoded(3, credit("a"), 0.1)
    assert not made.overtaken(4, credit("a"), 1.0)
    assert not made.overtaken(5, credit("a"), 1.0)
    ended = credit("a")
    ended.working = False
    assert not made.overtaken(6, ended, 1.0)
    assert made.overtaken(7, credit("a"), 1.0) == [Logged("a", f"in backoff for 1 s: {SLOW}")]
    assert not made.overtaken(8, credit("a"), 3.0), "granted before the backoff"
    health(made, "a").probes.add(9)
    assert made.overtaken(9, credit("a", granted_s=3.0), 4.0) == [Logged("a", f"in backoff for 2 s: {SLOW}")]


def test_how_long_overtaken_items_took_counts_for_the_percentile() -> None:
    made = pool("ab", factor=0.0)
    for number in range(100):
        made.overtaken(number, credit("a"), 0.5)
    assert 0.5 <= made.times.tail_s(10) <= 0.55
