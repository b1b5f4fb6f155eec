"""The router's load and attainment: from requests over in-process instances to reports and metrics, under virtual time."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.services.router.fakes import Bench, ask, bench, collect, image
from triptych.domain.profile import Profile
from triptych.domain.stage import Stage
from triptych.domain.windows import ClassWindow, Refusals, merged
from triptych.engine.delay import synthetic_decoder_profile, synthetic_encoder_profile
from triptych.errors import Overloaded
from triptych.policy.admission import ServerBounds
from triptych.runtime.metrics import Metrics
from triptych.services.router import gauges
from triptych.services.router.settings import RouterSettings
from triptych.virtual.virtual_time import run

SETTINGS = RouterSettings(slo=("ttft=60s", "tbt=10s", "text:ttft=0.00001s"))


async def window(made: Bench) -> dict[str, ClassWindow]:
    await asyncio.sleep(1)
    return merged(made.router.attainment.reports())


def test_requests_of_each_class_are_counted_and_judged() -> None:
    async def test() -> None:
        async with bench(settings=SETTINGS) as made:
            await collect(made.router, ask("a", [image(1), image(2)]))
            await collect(made.router, ask("b"))
            found = await window(made)
            assert sorted(found) == ["image-256", "text"]
            images, text = found["image-256"], found["text"]
            assert (images.arrivals, images.items, images.media_tokens, images.done) == (1, 2, 8, 1)
            assert (images.ttft.met, images.tbt.met, images.e2e.count) == (1, 1, 0)
            assert (text.arrivals, text.items, text.media_tokens) == (1, 0, 0)
            assert (text.ttft.missed, text.missed_uncharged) == (1, 1)
            timeline = await made.router.timeline("b")
            assert text.gaps == timeline.completion_tokens - 1
            assert text.output_tokens == timeline.completion_tokens

    run(test())


def test_judged_requests_are_counted_since_the_start() -> None:
    async def test() -> None:
        async with bench(settings=SETTINGS) as made:
            for name in "abc":
                await collect(made.router, ask(name))
                await asyncio.sleep(100)  # longer than the window that attainment is shown over
            metrics = Metrics()
            gauges.watch(metrics, made.router)
            found = {
                (sample.labels["metric"], sample.labels["verdict"]): sample.value
                for family in text_string_to_metric_families(metrics.render().decode())
                for sample in family.samples
                if sample.name == "triptych_slo_judged_total"
            }
            assert found == {("ttft", "met"): 0, ("ttft", "missed"): 3, ("tbt", "met"): 3, ("tbt", "missed"): 0}

    run(test())


def test_a_request_that_waits_is_in_the_next_report() -> None:
    async def test() -> None:
        async with bench(settings=RouterSettings(slo=("ttft=0.5s",))) as made:
            made.texts[0].token_s = 5.0
            running = asyncio.create_task(collect(made.router, ask("a", [image(1)])))  # noqa: TID251 - awaited below
            await asyncio.sleep(2)
            (report,) = made.router.attainment.reports()
            (judged,) = [named.window.ttft for named in report.classes]
            assert (judged.missed, report.waiting, report.waiting_media_tokens) == (1, 1, 0)
            assert report.waiting_prompt_tokens > 0
            assert [instance.instance_id for instance in report.instances] == ["text-0"]
            await running

    run(test())


def test_with_profiles_the_first_request_of_a_class_is_judged_and_its_miss_charged() -> None:
    profiles = (synthetic_profile(Stage.ENCODE), synthetic_profile(Stage.PREFILL))

    async def test() -> None:
        async with bench(profiles=profiles) as made:
            await collect(made.router, ask("a", [image(1)]))
            found = (await window(made))["image-256"]
            assert (found.ttft.met, found.ttft.missed, found.not_judged) == (1, 0, 0)
            for encoder in made.encoders:
                encoder.encode_s = 2.0
            await collect(made.router, ask("b", [image(2)]))
            found = (await window(made))["image-256"]
            assert (found.ttft.missed, found.missed_encode, found.missed_prefill) == (1, 1, 0)
            metrics = Metrics()
            gauges.watch(metrics, made.router)
            families = text_string_to_metric_families(metrics.render().decode())
            limits = {
                sample.labels["metric"]: sample.value
                for family in families
                for sample in family.samples
                if sample.name == "triptych_slo_limit_seconds"
            }
            assert limits["ttft"] == pytest.approx(5 * (0.1 + 0.1), rel=0.01)

    run(test())


def test_the_objective_counts_all_items_over_all_encoders_and_the_work_counts_them_all() -> None:
    """0.025 s for each token: 0.1 s for each of the images, of 4 tokens."""
    encoder = synthetic_encoder_profile(pass_s=1e-9, token_s=0.025, load_s=0.0, prepare_s=1e-9)

    async def test() -> None:
        async with bench(encoders=2, profiles=(encoder, synthetic_profile(Stage.PREFILL))) as made:
            await collect(made.router, ask("a", [image(number) for number in range(4)]))
            metrics = Metrics()
            gauges.watch(metrics, made.router)
            families = list(text_string_to_metric_families(metrics.render().decode()))
            (limit_s,) = [
                sample.value
                for family in families
                for sample in family.samples
                if sample.name == "triptych_slo_limit_seconds" and sample.labels["metric"] == "ttft"
            ]
            assert limit_s == pytest.approx(5 * (2 * 0.1 + 0.1), rel=0.01)
            (work_us,) = [
                sample.value
                for family in families
                for sample in family.samples
                if sample.name == "triptych_tenant_work_total" and sample.labels["stage"] == "encode"
            ]
            assert work_us == pytest.approx(4 * 100_000, rel=0.01)

    run(test())


@pytest.mark.parametrize("stages", [(), (Stage.ENCODE,), (Stage.PREFILL,)])
def test_without_the_profiles_of_both_parts_the_first_image_is_not_judged(stages: tuple[Stage, ...]) -> None:
    async def test() -> None:
        async with bench(profiles=tuple(map(synthetic_profile, stages))) as made:
            await collect(made.router, ask("a", [image(1)]))
            found = (await window(made))["image-256"]
            assert (found.ttft.count, found.not_judged) == (0, 1)

    run(test())


def synthetic_profile(stage: Stage) -> Profile:
    """Encoding, and prefilling, takes 0.1 s."""
    if stage is Stage.ENCODE:
        return synthetic_encoder_profile(pass_s=0.1, token_s=1e-9, load_s=0.0)
    return synthetic_decoder_profile(step_s=0.1, sequence_s=1e-9, prefill_token_s=1e-9, load_s=0.0)


def test_refusals_are_reported() -> None:
    async def test() -> None:
        settings = RouterSettings(capacity=ServerBounds(max_concurrent_requests=1))
        async with bench(settings=settings) as made:
            running = asyncio.create_task(collect(made.router, ask("a")))  # noqa: TID251 - awaited below
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await collect(made.router, ask("b"))
            await running
            await asyncio.sleep(1)
            assert sum((report.refusals for report in made.router.attainment.reports()), Refusals()) == Refusals(1, 0)

    run(test())


def test_reports_say_how_old_they_are_and_the_last_minute_is_kept() -> None:
    async def test() -> None:
        async with bench() as made:
            for _ in range(70):
                await asyncio.sleep(1)
                await collect(made.router, ask("a"))
            await asyncio.sleep(0.5)
            reports = made.router.attainment.reports()
            assert len(reports) == 60
            ages = [report.age_s for report in reports]
            assert ages == sorted(ages, reverse=True)
            assert ages[0] > 55
            assert ages[-1] < 2
            assert made.router.attainment.reports(reports[-1].sequence) == []
            assert made.router.attainment.reports(reports[-3].sequence) == reports[-2:]

    run(test())


def test_metrics_show_whether_hints_of_embeddings_were_right() -> None:
    async def test() -> None:
        async with bench(settings=SETTINGS) as made:
            metrics = Metrics()
            gauges.watch(metrics, made.router)
            for name in "abc":
                await collect(made.router, ask(name, [image(1)]))
            families = text_string_to_metric_families(metrics.render().decode())
            got = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
            assert got["triptych_embedding_hints",] == 1
            name = "triptych_embedding_hints_followed_total"
            assert [got[name, outcome] for outcome in ("hit", "joined", "stale")] == [0, 0, 2], (
                "the encoder keeps nothing"
            )

    run(test())


def test_metrics_show_attainment_by_modality_and_stage() -> None:
    async def test() -> None:
        async with bench(settings=SETTINGS) as made:
            metrics = Metrics()
            gauges.watch(metrics, made.router)
            await collect(made.router, ask("a", [image(1)]))
            await collect(made.router, ask("b"))
            await asyncio.sleep(1)
            families = text_string_to_metric_families(metrics.render().decode())
            got = {(s.name, frozenset(s.labels.values())): s.value for family in families for s in family.samples}
            model = made.router.cluster.machine.instances.model
            assert model is not None
            name = model.model_id
            assert got["triptych_slo_attainment", frozenset({name, "ttft", "image"})] == 1.0
            assert got["triptych_slo_attainment", frozenset({name, "ttft", "text"})] == 0.0
            assert got["triptych_slo_requests", frozenset({name, "ttft", "text", "missed"})] == 1
            assert got["triptych_slo_stage_attainment", frozenset({name, "encode", "image"})] == 1.0
            assert got["triptych_slo_limit_seconds", frozenset({name, "ttft", "image-256"})] == 60.0
            assert got["triptych_latency_seconds", frozenset({name, "ttft", "text", "0.99"})] > 0
            assert ("triptych_slo_attainment", frozenset({name, "e2e", "text"})) not in got

    run(test())
