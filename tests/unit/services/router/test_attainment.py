"""The router's load and attainment: from requests over in-process instances to reports and metrics, under virtual time."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.router import gauges
from services.router.settings import RouterSettings
from tests.unit.services.router.fakes import Bench, ask, bench, collect, image
from triptych.domain.windows import ClassWindow, Refusals, merged
from triptych.errors import Overloaded
from triptych.policy.admission import ServerBounds
from triptych.runtime.metrics import Metrics
from triptych.testing.virtual_time import run

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


def test_a_request_that_waits_is_in_the_next_report() -> None:
    async def test() -> None:
        async with bench(settings=RouterSettings(slo=("ttft=0.5s",))) as made:
            made.texts[0].token_s = 5.0
            running = asyncio.create_task(collect(made.router, ask("a", [image(1)])))  # noqa: TID251 - awaited below
            await asyncio.sleep(2)
            (report,) = made.router.attainment.reports()
            (judged,) = [one.window.ttft for one in report.classes]
            assert (judged.missed, report.waiting, report.waiting_media_tokens) == (1, 1, 0)
            assert report.waiting_prompt_tokens > 0
            assert [one.instance_id for one in report.instances] == ["text-0"]
            await running

    run(test())


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
            assert sum((one.refusals for one in made.router.attainment.reports()), Refusals()) == Refusals(1, 0)

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
            ages = [one.age_s for one in reports]
            assert ages == sorted(ages, reverse=True)
            assert ages[0] > 55
            assert ages[-1] < 2
            assert made.router.attainment.reports(reports[-1].sequence) == []
            assert made.router.attainment.reports(reports[-3].sequence) == reports[-2:]

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
            model = made.router.cluster.model
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
