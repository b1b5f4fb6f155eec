import logging
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from triptych.domain.timeline import ItemTimeline, Outcome, Timeline
from triptych.errors import Overloaded
from triptych.runtime.metrics import Metrics
from triptych.services.router.record import RouterRecord, summary

ITEM = ItemTimeline(0, "image", 28, 28, 16, "encoder-1", 1, encode_s=0.01, pull_backend="shm", pull_bytes=8208)
DONE = Timeline(
    request_id="r-1",
    model="m",
    outcome=Outcome.DONE,
    items=(
        ITEM,
        replace(ITEM, item=1, encode_attempts=2, hedges=1, hedge_won=True),
        replace(ITEM, item=2, encoder_cached=True, text_cached=True),
    ),
    text_instance="text-1",
    text_attempts=1,
    prompt_tokens=60,
    completion_tokens=11,
    prepare_s=0.001,
    encode_s=0.02,
    queue_s=0.003,
    pull_s=0.004,
    prefill_s=0.05,
    decode_s=0.1,
    ttft_s=0.08,
    total_s=0.18,
)


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[str]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, frozenset(s.labels.values())): s.value for family in families for s in family.samples}


def test_a_finished_request_is_counted_once_in_every_metric() -> None:
    metrics = Metrics()
    RouterRecord(metrics).ended(DONE, "stop")
    got = samples(metrics)
    model = frozenset({"m"})
    assert got["vllm:request_success_total", frozenset({"m", "stop"})] == 1
    assert got["vllm:prompt_tokens_total", model] == 60
    assert got["vllm:generation_tokens_total", model] == 11
    assert got["vllm:time_to_first_token_seconds_sum", model] == 0.08
    assert got["vllm:request_time_per_output_token_seconds_sum", model] == pytest.approx(0.01)
    assert got["vllm:request_prompt_tokens_sum", model] == 60
    assert got["triptych_stage_seconds_sum", frozenset({"encode"})] == 0.02
    assert got["triptych_attempts_total", frozenset({"encode"})] == 4
    assert got["triptych_attempts_total", frozenset({"encode_again"})] == 1
    assert got["triptych_attempts_total", frozenset({"encode_hedge"})] == 1
    assert got["triptych_attempts_total", frozenset({"encode_hedge_won"})] == 1
    assert got["triptych_embedding_cache_total", frozenset({"text"})] == 1
    assert got["triptych_embedding_cache_total", frozenset({"nowhere"})] == 2


@pytest.mark.parametrize(
    ("outcome", "error", "reason"), [(Outcome.FAILED, "instance_lost", "error"), (Outcome.CANCELLED, "", "abort")]
)
def test_a_failed_request_does_not_count_in_latency_metrics(outcome: Outcome, error: str, reason: str) -> None:
    metrics = Metrics()
    RouterRecord(metrics).ended(replace(DONE, outcome=outcome, error=error), "")
    got = samples(metrics)
    assert got["triptych_requests_total", frozenset({outcome.value, error})] == 1
    assert got["vllm:request_success_total", frozenset({"m", reason})] == 1
    assert ("vllm:time_to_first_token_seconds_count", frozenset({"m"})) not in got


def test_refusals_are_counted_by_code() -> None:
    metrics = Metrics()
    RouterRecord(metrics).refused(Overloaded("full"))
    assert samples(metrics)["triptych_requests_refused_total", frozenset({"overloaded"})] == 1


def test_a_request_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="triptych.services.router.record"):
        RouterRecord(Metrics()).ended(replace(DONE, outcome=Outcome.FAILED, error="transfer_failed"), "")
    (record,) = (logged for logged in caplog.records if logged.name == "triptych.services.router.record")
    message = record.getMessage()
    assert message.startswith("request outcome=failed finish_reason=error code=transfer_failed items=3")
    assert "ttft_s=0.08 total_s=0.18" in message
    assert record.fields == summary(replace(DONE, outcome=Outcome.FAILED, error="transfer_failed"), "error")  # type: ignore[attr-defined]


def test_an_answer_that_went_on_elsewhere_is_counted_and_logged() -> None:
    metrics = Metrics()
    RouterRecord(metrics).ended(replace(DONE, text_attempts=3, continuations=2, interrupted_s=0.02), "stop")
    got = samples(metrics)
    assert got["triptych_attempts_total", frozenset({"text_again"})] == 2
    assert got["triptych_attempts_total", frozenset({"continuation"})] == 2
    assert summary(replace(DONE, continuations=2), "stop")["continuations"] == 2


def test_of_an_answer_that_another_router_began_only_the_rest_is_counted() -> None:
    metrics, whole = Metrics(), Metrics()
    RouterRecord(metrics).ended(replace(DONE, continuations=1, continued_tokens=2), "stop")
    RouterRecord(whole).ended(DONE, "stop")
    got, all_of_it = samples(metrics), samples(whole)
    assert got["triptych_attempts_total", frozenset({"router_continuation"})] == 1
    generated = "vllm:generation_tokens_total", frozenset({DONE.model})
    assert got[generated] == all_of_it[generated] - 2
    first_tokens = "vllm:time_to_first_token_seconds_count", frozenset({DONE.model})
    assert (got.get(first_tokens, 0), all_of_it[first_tokens]) == (0, 1)
