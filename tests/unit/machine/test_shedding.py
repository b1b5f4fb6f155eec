"""What a process knows of its own delay and of who sends how much."""

from triptych.machine.shedding import Arrivals, Probing, SustainedDelay

TARGET_S, INTERVAL_S = 0.05, 0.25


def test_a_delay_that_lasts_puts_a_process_behind_until_it_has_been_small_for_as_long() -> None:
    delay = SustainedDelay(TARGET_S, INTERVAL_S)
    changes = [(at_s, delay.measured(0.06, at_s)) for at_s in (10.0, 10.1, 10.2, 10.25, 10.3)]
    assert [at_s for at_s, changed in changes if changed] == [10.25]
    assert delay.behind
    assert not any(delay.measured(0.04, at_s) for at_s in (10.4, 10.6))
    assert delay.behind
    assert delay.measured(0.04, 10.65)
    assert not delay.behind


def test_one_pause_however_long_puts_nothing_behind() -> None:
    delay = SustainedDelay(TARGET_S, INTERVAL_S)
    for number in range(20):
        assert not delay.measured(5.0, 10.0 * number)
        assert not delay.measured(TARGET_S, 10.0 * number + 0.01)
    assert not delay.behind


def test_a_process_that_is_behind_is_not_put_back_by_one_delay_that_is_small() -> None:
    delay = SustainedDelay(TARGET_S, INTERVAL_S)
    for at_s in (1.0, 1.25):
        delay.measured(1.0, at_s)
    for at_s in (2.0, 2.2, 2.4, 2.6):
        assert not delay.measured(0.0, at_s)
        assert not delay.measured(0.06, at_s + 0.1)
    assert delay.behind


def test_what_is_let_in_is_shared_by_weight() -> None:
    arrivals = Arrivals(1.0)
    for number in range(400):
        arrivals.refused("flood", 1.0, 5.0 + number / 1000)
    for number in range(100):
        arrivals.admit("flood", 1.0, 5.4 + number / 1000)
    for _ in range(30):
        arrivals.admit("small", 1.0, 5.5)
    for _ in range(60):
        arrivals.refused("heavier", 2.0, 5.5)
    # 130 were let in, over a weight of 4: 32.5 for a weight of one.
    within = {key: arrivals.is_within_share(key, 5.5) for key in ("flood", "small", "heavier", "new")}
    assert within == {"flood": False, "small": True, "heavier": True, "new": True}
    for _ in range(10):
        arrivals.refused("heavier", 2.0, 5.5)
    assert not arrivals.is_within_share("heavier", 5.5)


def test_a_key_that_sends_alone_is_beyond_any_share() -> None:
    arrivals = Arrivals(1.0)
    arrivals.admit("only", 1.0, 5.0)
    assert not arrivals.is_within_share("only", 5.1)


def test_arrivals_count_for_a_window_and_then_are_forgotten() -> None:
    arrivals = Arrivals(1.0)
    for key in ("a", "b", "b", "b"):
        arrivals.admit(key, 1.0, 5.0)
    for now_s in (5.9, 6.9):
        assert (arrivals.is_within_share("a", now_s), arrivals.is_within_share("b", now_s)) == (True, False)
    arrivals.admit("a", 1.0, 8.0)
    assert not arrivals.is_within_share("a", 8.0), "b has sent nothing for three seconds"
    arrivals.admit("b", 1.0, 50.0)
    assert not arrivals.is_within_share("b", 50.0)


def test_as_many_are_let_through_as_were_accepted_and_always_some() -> None:
    probing = Probing(2.0, 10.0, 2.0)
    for number in range(100):
        probing.accepted(5.0 + number / 50)
    passed = sum(probing.take(7.0 + number / 1000) for number in range(500))
    assert 40 <= passed <= 60, "of 500 in half a second, as 50 a second were accepted, and fewer and fewer since"
    passed = sum(probing.take(20.0 + number / 100) for number in range(500))
    assert 45 <= passed <= 51, "in five seconds"
