from triptych.policy.retrying import pause_s


def test_pauses_double_up_to_the_maximum_with_jitter_of_at_most_half() -> None:
    for refusals in range(1, 2000):
        whole_s = min(0.1 * 2 ** min(refusals - 1, 30), 2.0)
        assert whole_s / 2 <= pause_s("r", refusals, first_s=0.1, longest_s=2.0) <= whole_s


def test_requests_refused_together_retry_at_different_but_reproducible_times() -> None:
    pauses = [pause_s(f"r{n}", 1, first_s=0.1, longest_s=2.0) for n in range(100)]
    assert len({round(pause, 3) for pause in pauses}) > 30
    assert pauses == [pause_s(f"r{n}", 1, first_s=0.1, longest_s=2.0) for n in range(100)]
