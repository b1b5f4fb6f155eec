"""The papers' engines of vLLM: what one request takes, what others' prompts do to answers, and what waits for preprocessing."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.papers.engines import Model, Release, serve_apart, serve_in_step
from benchmarks.papers.simulation import Served
from triptych.engine.delay import synthetic_decoder_profile, synthetic_encoder_profile
from triptych.policy.costs import Costs
from triptych.workload.requests import TEMPLATE_TOKENS, Plan, Planned, Size

STEP_S, SEQUENCE_S, TOKEN_S, IMAGE_S, IMAGE_TOKENS = 0.01, 0.001, 0.0001, 0.05, 100
MODEL = Model(
    Costs(synthetic_encoder_profile(pass_s=0.0, token_s=IMAGE_S / IMAGE_TOKENS, load_s=0.0)),
    Costs(synthetic_decoder_profile(step_s=STEP_S, sequence_s=SEQUENCE_S, prefill_token_s=TOKEN_S, load_s=0.0)),
    IMAGE_TOKENS,
    IMAGE_TOKENS,
    kv_tokens=1 << 20,
)
V1 = Release(4096, chunked=True)
V0 = replace(V1, chunked=False)


def request(at_s: float, *, images: int = 0, text: int = 188, answer: int = 5) -> Planned:
    return Planned(at_s, text, (Size(8, 8),) * images, answer)


def plan(*requests: Planned) -> Plan:
    return Plan(requests, 10.0)


@pytest.mark.parametrize("release", [V0, V1])
def test_a_request_alone_is_encoded_computed_and_answered(release: Release) -> None:
    [record] = serve_apart(release, MODEL, plan(request(0.0, images=2)), 1).records
    tokens = 2 * IMAGE_TOKENS + 188 + TEMPLATE_TOKENS
    assert record.prompt_tokens == tokens
    assert record.ttft_s == pytest.approx(2 * IMAGE_S + STEP_S + tokens * TOKEN_S)
    assert record.tpot_s == pytest.approx(STEP_S + SEQUENCE_S)
    assert record.tokens == 5


def test_answers_go_on_beside_a_prompt_in_v1_and_wait_for_it_in_v0() -> None:
    both = plan(request(0.0, answer=100), request(0.1, text=2000))
    least = {release.chunked: max(serve_apart(release, MODEL, both, 1).gaps_s[0]) for release in (V0, V1)}
    prompt_s = STEP_S + (2000 + TEMPLATE_TOKENS) * TOKEN_S
    assert least[False] == pytest.approx(prompt_s + STEP_S + 2 * SEQUENCE_S)
    assert least[True] == pytest.approx(prompt_s, abs=STEP_S)


def test_parts_of_a_prompt_are_within_the_budget() -> None:
    both = plan(request(0.0, answer=100), request(0.1, text=2000))
    [gaps_s, _] = serve_apart(replace(V1, budget=500), MODEL, both, 1).gaps_s
    assert max(gaps_s) <= 2 * STEP_S + 500 * TOKEN_S


def test_engines_in_lock_step_wait_for_the_prompts_of_others() -> None:
    both = plan(request(0.0, answer=100), request(0.1, images=4))
    apart, in_step = (max(serve(V1, MODEL, both, 2).gaps_s[0]) for serve in (serve_apart, serve_in_step))
    assert apart == pytest.approx(STEP_S + SEQUENCE_S)
    assert in_step > 4 * IMAGE_S


def test_requests_go_to_the_engine_with_the_least_load() -> None:
    four = plan(*(request(0.0) for _ in range(4)))
    together = serve_in_step(V1, MODEL, four, 4)
    assert max(record.ttft_s or 0.0 for record in together.records) == pytest.approx(STEP_S + 200 * TOKEN_S)


def test_a_request_waits_for_the_preprocessing_of_all_before_it() -> None:
    two = plan(request(0.0, images=3), request(0.0, images=1))
    ahead, within, without = (
        serve_in_step(release, MODEL, two, 2).records
        for release in (replace(V1, ahead_s=0.2), replace(V1, in_step_s=0.2), V1)
    )
    assert [record.ttft_s for record in ahead] == pytest.approx(
        [0.6 + (without[0].ttft_s or 0.0), 0.8 + IMAGE_S + STEP_S + 300 * TOKEN_S], abs=0.05
    )
    assert [record.ttft_s for record in within] == pytest.approx([0.6 + (record.ttft_s or 0.0) for record in without])


def test_a_request_waits_for_memory() -> None:
    first, second = serve_apart(V1, replace(MODEL, kv_tokens=300), plan(request(0.0), request(0.0)), 1).records
    assert second.ttft_s is not None
    assert second.ttft_s > first.end_s


@pytest.mark.parametrize("release", [V0, V1])
@pytest.mark.parametrize("serve", [serve_apart, serve_in_step])
def test_a_request_that_no_engine_has_memory_for_is_an_error(
    release: Release, serve: Callable[[Release, Model, Plan, int], Served]
) -> None:
    tokens = 188 + TEMPLATE_TOKENS + 5
    assert len(serve(release, replace(MODEL, kv_tokens=tokens), plan(request(0.0)), 2).records) == 1
    with pytest.raises(ValueError, match=f"{tokens} tokens"):
        serve(release, replace(MODEL, kv_tokens=tokens - 1), plan(request(0.0)), 2)
