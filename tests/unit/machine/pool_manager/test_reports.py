from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.mix import Form
from triptych.domain.slo import ChargedStage
from triptych.domain.windows import ClassWindow, Judged, NamedClass, NamedInstance, Refusals, WindowReport
from triptych.machine.pool_manager.reports import MAX_ROUTERS, Dropped, RouterReports
from triptych.policy.scaling import encode_tokens

ENCODERS, TEXTS = (ChargedStage.ENCODE,), (ChargedStage.PREFILL,)


def report(sequence: int, *, epoch: int = 1, tokens: int = 100, age_s: float = 0.0, **more: object) -> WindowReport:
    classes = (NamedClass("text", ClassWindow(arrivals=1, prompt_tokens=tokens)),)
    made = WindowReport(epoch, sequence, 1.0, age_s, "m", classes)
    return replace(made, **more)  # type: ignore[arg-type]  # whatever a test asks for


def tokens(classes: Mapping[str, ClassWindow]) -> float:
    return float(sum(window.prompt_tokens for window in classes.values()))


def fed(reports: RouterReports, seconds: int, *, router: str = "r", begin_s: int = 0, per_report: int = 100) -> None:
    """One report at the end of each second."""
    for at_s in range(begin_s + 1, begin_s + seconds + 1):
        assert reports.accept(router, report(at_s, tokens=per_report), float(at_s)) is None
        reports.validate()


def test_the_load_is_that_of_all_routers() -> None:
    reports = RouterReports()
    fed(reports, 60)
    fed(reports, 60, router="other", per_report=50)
    assert reports.per_s(30.0, 60.0, tokens) == pytest.approx(150)
    assert reports.per_s(300.0, 60.0, tokens) == pytest.approx(150)
    assert reports.coverage(60.0) == pytest.approx(1.0)
    assert reports.age_s(61.5) == 1.5


def test_attainment_is_that_of_the_window_that_was_asked_for() -> None:
    for window_s, missed in ((60.0, 3), (15.0, 0)):
        reports = RouterReports(attainment_s=window_s)
        late = ClassWindow(arrivals=3, ttft=Judged(0, 3), missed_prefill=3)
        in_time = ClassWindow(arrivals=2, ttft=Judged(2, 0))
        for at_s, classes in ((1, late), (30, in_time)):
            said = report(at_s, classes=(NamedClass("text", classes),))
            assert reports.accept("r", said, float(at_s)) is None
        assert reports.attainment(TEXTS, 31.0) == Judged(2, missed)


def test_a_router_cannot_hide_the_load_of_the_others_by_more_cached_tokens_than_were_finished() -> None:
    reports = RouterReports()
    for router, cached in (("honest", 0), ("wrong", 2**40)):
        window = ClassWindow(arrivals=1, items=1, media_tokens=300, finished_media_tokens=300, cached_tokens=cached)
        said = report(1, duration_s=30.0, classes=(NamedClass("image-1024", window),))
        assert reports.accept(router, said, 30.0) is None
    assert reports.per_s(30.0, 30.0, encode_tokens) == pytest.approx(10)


def test_nothing_is_known_without_reports() -> None:
    reports = RouterReports()
    assert (reports.per_s(30.0, 5.0, tokens), reports.coverage(5.0), reports.age_s(5.0)) == (None, 0.0, None)


@pytest.mark.parametrize(("now_s", "duration_s"), [(433.2, 17.684060248982032), (472245.2435761166, 10.16), (0.5, 1.0)])
def test_a_window_of_any_length_at_any_time_is_counted_whole(now_s: float, duration_s: float) -> None:
    """Rounding must not leave a part that never gets smaller."""
    reports = RouterReports()
    assert reports.accept("r", report(1, duration_s=duration_s), now_s) is None
    assert reports.per_s(30.0, now_s, tokens) == pytest.approx(100 / duration_s)


def test_a_burst_shows_in_the_shortest_window_first() -> None:
    reports = RouterReports()
    fed(reports, 300)
    fed(reports, 5, begin_s=300, per_report=1000)
    burst, short, long = (reports.per_s(window_s, 305.0, tokens) for window_s in (5.0, 30.0, 300.0))
    assert burst is not None
    assert short is not None
    assert long is not None
    assert burst > 500 > short > 200 > long > 100


def test_missing_reports_lower_the_coverage_and_not_the_load() -> None:
    reports = RouterReports()
    for at_s in range(1, 61):
        if at_s % 3:
            reports.accept("r", report(at_s), float(at_s))
    assert reports.per_s(30.0, 60.0, tokens) == pytest.approx(100)
    assert reports.coverage(60.0) == pytest.approx(2 / 3, abs=0.05)


def test_a_duplicate_is_dropped_and_a_late_report_counts_where_it_belongs() -> None:
    reports = RouterReports()
    reports.accept("r", report(1), 1.0)
    reports.accept("r", report(3), 3.0)
    assert reports.accept("r", report(3), 3.1) is Dropped.DUPLICATE
    assert reports.accept("r", report(2, age_s=28.0), 30.0) is None
    assert reports.accept("r", report(2, age_s=28.0), 30.0) is Dropped.DUPLICATE
    assert reports.age_s(30.0) == 27.0
    assert reports.classes(5.0, 30.0) == {}
    assert reports.classes(30.0, 30.0)["text"].arrivals == 3


def test_a_report_that_is_too_old_is_dropped() -> None:
    reports = RouterReports()
    assert reports.accept("r", report(1, age_s=301.0), 400.0) is Dropped.OLD
    fed(reports, 300, begin_s=400)
    assert reports.accept("r", report(401 - 1, age_s=0.5), 700.5) is Dropped.OLD


def test_a_restarted_router_begins_anew_and_its_former_process_is_not_heard_any_more() -> None:
    reports = RouterReports()
    fed(reports, 10)
    assert reports.accept("r", report(1, epoch=2), 11.0) is None
    assert reports.accept("r", report(11, epoch=1), 11.5) is Dropped.OLD
    assert reports.accept("r", report(1, epoch=2), 12.0) is Dropped.DUPLICATE
    assert reports.classes(30.0, 12.0)["text"].arrivals == 11


def test_the_number_of_routers_is_bounded_and_those_that_are_gone_make_room() -> None:
    reports = RouterReports()
    for number in range(MAX_ROUTERS):
        reports.accept(f"r{number}", report(1), 1.0)
    assert reports.accept("one more", report(1), 1.0) is Dropped.TOO_MANY
    reports.retain({f"r{number}" for number in range(1, MAX_ROUTERS)})
    assert reports.accept("one more", report(1), 1.0) is None
    assert reports.accept("yet one more", report(1), 1.0) is Dropped.TOO_MANY
    assert reports.dropped == {Dropped.TOO_MANY: 2}
    reports.retain({"one more"})
    reports.accept("one more", report(2), 400.0)
    for number in range(MAX_ROUTERS - 1):
        assert reports.accept(f"new{number}", report(1), 400.0) is None
    reports.validate()


def test_a_window_that_is_long_covers_all_its_time() -> None:
    reports = RouterReports()
    reports.accept("r", report(1, tokens=3000, duration_s=30.0), 30.0)
    assert reports.coverage(30.0) == pytest.approx(1.0)
    assert reports.per_s(30.0, 30.0, tokens) == pytest.approx(100)


def test_requests_refused_for_overload_are_load() -> None:
    reports = RouterReports()
    for at_s in range(1, 31):
        reports.accept("r", report(at_s, refusals=Refusals(overloaded=1, other=5)), float(at_s))
    assert reports.per_s(30.0, 30.0, tokens) == pytest.approx(200)


def test_misses_count_for_the_stage_that_is_charged() -> None:
    reports = RouterReports()
    image = ClassWindow(arrivals=10, items=10, ttft=Judged(6, 4), missed_encode=3, missed_prefill=1)
    text = ClassWindow(arrivals=10, ttft=Judged(9, 1), missed_uncharged=1)
    classes = (NamedClass("image-256", image), NamedClass("text", text))
    instances = (NamedInstance("e", Judged(7, 3)),)
    for sequence in (1, 2):
        reports.accept("r", report(sequence, classes=classes, instances=instances), float(sequence))
    assert reports.attainment(ENCODERS, 2.0) == Judged(14, 6)
    assert reports.attainment(TEXTS, 2.0) == Judged(38, 2)
    assert reports.attainment(ENCODERS + TEXTS, 2.0) == Judged(32, 8)
    assert reports.uncharged(2.0) == 2
    assert reports.instances(2.0) == {"e": Judged(14, 6)}


def test_what_waits_is_taken_from_the_newest_reports_only() -> None:
    reports = RouterReports()
    reports.accept("r", report(1, waiting_media_tokens=9, waiting_prompt_tokens=3), 1.0)
    reports.accept("r", report(2, waiting_media_tokens=5, waiting_prompt_tokens=2), 2.0)
    reports.accept("s", report(1, waiting_media_tokens=1, waiting_prompt_tokens=1), 2.0)
    assert reports.waiting_media(2.0) == 6
    assert reports.waiting_prompts(2.0) == 3
    assert reports.waiting_media(13.0) == 0


@pytest.mark.parametrize(
    ("end_s", "duration_s"), [(118.56, 1.01), (34.587, 0.1), (2.0**24, 1.01), (60.0, 1e-17), (60.0, 0.0)]
)
def test_a_window_of_any_length_and_end_is_counted_once(end_s: float, duration_s: float) -> None:
    """Seconds that remained by rounding once kept the manager counting for ever."""
    reports = RouterReports()
    reports.accept("r", report(1, duration_s=duration_s), end_s)
    expected = pytest.approx(100 / duration_s) if duration_s > 1e-9 else None
    assert reports.per_s(30.0, end_s, tokens) == expected


def test_a_router_that_is_back_with_the_windows_it_kept_is_not_counted_twice() -> None:
    reports = RouterReports()
    fed(reports, 30)
    reports.retain(set())
    assert reports.age_s(30.0) is None
    for at_s in range(1, 31):
        assert reports.accept("r", report(at_s, age_s=31.0 - at_s), 31.0) is Dropped.DUPLICATE
    assert reports.accept("r", report(31), 31.0) is None
    reports.retain({"r"})
    assert reports.classes(60.0, 31.0)["text"].arrivals == 31
    assert reports.per_s(30.0, 31.0, tokens) == pytest.approx(100, rel=0.05)
    assert reports.age_s(31.0) == 0


def test_load_that_moves_from_a_router_that_leaves_or_to_one_that_joins_is_counted_once() -> None:
    reports = RouterReports()
    fed(reports, 60)
    fed(reports, 60, router="other")
    reports.retain({"r"})
    fed(reports, 10, begin_s=60, per_report=200)
    assert reports.per_s(30.0, 70.0, tokens) == pytest.approx(200)
    for router in ("r", "joins"):
        fed(reports, 10, begin_s=70, router=router)
    reports.retain({"r", "joins"})
    assert reports.per_s(30.0, 80.0, tokens) == pytest.approx(200)


def test_windows_that_are_read_all_at_once_after_a_pause_are_no_burst() -> None:
    """The process was stopped: each window seems to have ended now."""
    reports = RouterReports()
    fed(reports, 60)
    for sequence in range(61, 73):
        assert reports.accept("r", report(sequence), 72.0) is None
    assert reports.coverage(72.0) == pytest.approx(1.0)
    for window_s in (5.0, 30.0, 300.0):
        assert reports.per_s(window_s, 72.0, tokens) == pytest.approx(100)


def test_the_time_in_which_a_router_was_gone_is_not_missing() -> None:
    reports = RouterReports()
    fed(reports, 60)
    fed(reports, 30, router="other")
    reports.retain({"r"})
    fed(reports, 5, router="other", begin_s=55)
    reports.retain({"r", "other"})
    assert reports.coverage(60.0) == pytest.approx(1.0)


windows = st.tuples(
    st.sampled_from("xyz"), st.integers(1, 3), st.integers(1, 500), st.floats(0, 400), st.floats(0, 1e6), st.booleans()
)


@given(st.lists(windows, max_size=40), st.integers(40, 60))
def test_no_router_makes_the_load_of_another_look_smaller(
    claims: list[tuple[str, int, int, float, float, bool]], seconds: int
) -> None:
    """Reports of a router may claim any time for its windows: windows that overlap, or began before it was there, count once."""
    reports = RouterReports()
    for at_s in range(1, seconds + 1):
        assert reports.accept("honest", report(at_s), float(at_s)) is None
        for router, epoch, sequence, age_s, duration_s, there in claims[at_s - 1 :: seconds]:
            said = report(sequence, epoch=epoch, tokens=0, age_s=age_s, duration_s=duration_s)
            reports.accept(router, said, float(at_s))
            reports.retain({"honest", router} if there else {"honest"})
            reports.validate()
    for window_s in (5.0, 30.0):
        load = reports.per_s(window_s, float(seconds), tokens)
        assert load is not None
        assert load >= 100 * (1 - 1e-9)
        assert 0 < reports.coverage(float(seconds)) <= 1


arrivals = st.tuples(st.sampled_from("ab"), st.integers(1, 2), st.integers(1, 400), st.floats(0, 400), st.floats(0, 5))


@given(st.lists(arrivals, max_size=60))
def test_any_order_of_reports_keeps_memory_bounded(feed: list[tuple[str, int, int, float, float]]) -> None:
    reports, now_s = RouterReports(), 0.0
    for router, epoch, sequence, age_s, after_s in feed:
        now_s += after_s
        reports.accept(router, report(sequence, epoch=epoch, age_s=age_s), now_s)
        reports.validate()
        assert 0 <= reports.coverage(now_s) <= 1
        assert (reports.per_s(300.0, now_s, tokens) or 0) >= 0


def test_embeddings_that_wait_announce_the_prompts_they_belong_to() -> None:
    reports = RouterReports()
    classes = (
        NamedClass("image-256", ClassWindow(arrivals=1, items=2, media_tokens=200, prompt_tokens=300)),
        NamedClass("text", ClassWindow(arrivals=1, prompt_tokens=999)),
    )
    reports.accept("r", report(1, classes=classes, waiting_media_tokens=100, waiting_prompt_tokens=30), 1.0)
    assert reports.waiting_prompts(1.0) == 30
    assert reports.announced(1.0) == 100 * 300 / 200


def test_requests_judged_between_tokens_are_those_of_all_classes() -> None:
    reports = RouterReports()
    assert reports.between_tokens(1.0) == Judged()
    classes = (
        NamedClass("text", ClassWindow(tbt=Judged(3, 1))),
        NamedClass("image-256", ClassWindow(tbt=Judged(2, 2))),
    )
    reports.accept("r", report(1, classes=classes), 1.0)
    assert reports.between_tokens(1.0) == Judged(5, 3)


def test_a_miss_that_both_stages_are_charged_with_is_one_miss_of_a_hybrid() -> None:
    reports = RouterReports()
    image = ClassWindow(arrivals=10, items=10, ttft=Judged(6, 4), missed_encode=4, missed_prefill=4)
    reports.accept("r", report(1, classes=(NamedClass("image-256", image),)), 1.0)
    assert reports.attainment(ENCODERS + TEXTS, 1.0) == Judged(6, 4)


def test_the_mix_is_that_of_the_window_and_of_all_routers() -> None:
    reports = RouterReports()
    text = Form("text", 2, 0, prompt_tokens=100)
    image = Form("image", 1, 0, 1, 50_000, 1, 0.0, 400)
    for at_s, forms in ((1, (text,)), (40, (text, image)), (41, (image,))):
        said = report(at_s, forms=forms)
        for router in ("r", "other"):
            assert reports.accept(router, said, float(at_s)) is None
    assert {form.kind: form.requests for form in reports.mix(30.0, 41.0).forms} == {"text": 4, "image": 4}
    assert reports.mix(300.0, 41.0).requests == 12


def test_forms_of_unknown_kinds_and_too_many_of_them_are_left_out() -> None:
    reports = RouterReports()
    forms = (Form("nonsense", 5, 0), Form("text", 0, 0), *(Form("text", 1, 0, prompt_tokens=2**at) for at in range(40)))
    assert reports.accept("r", report(1, forms=forms), 1.0) is None
    assert {form.kind for form in reports.mix(30.0, 1.0).forms} == {"text"}
    assert reports.mix(30.0, 1.0).requests == 40
