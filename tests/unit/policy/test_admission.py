from typing import Any

import pytest

from triptych.domain.chat import ToolChoice
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.sampling import Grammar, ResponseFormat, SamplingParams
from triptych.errors import ContextTooLong, InvalidRequest, Overloaded
from triptych.policy.admission import (
    WAIT_CAUTION,
    RequestBounds,
    ServerBounds,
    admit_anyway,
    check_capacity,
    check_continued,
    check_items,
    check_priority,
    check_sampling,
    check_timeout,
    check_tool_choice,
    check_wait,
    complete,
)

BOUNDS = RequestBounds(
    max_items_per_request=4,
    max_stop_strings=2,
    max_stop_chars=5,
    max_top_k=100,
    max_stop_token_ids=2,
    max_logit_bias=2,
    max_schema_chars=10,
)
OBJECT = ResponseFormat(Grammar.JSON_OBJECT)
SERVER = ServerBounds(max_concurrent_requests=2, max_media_bytes=100, retry_after_s=3.0)


def test_a_request_above_the_kv_memory_is_refused_and_max_tokens_defaults_to_what_fits() -> None:
    asked = SamplingParams(max_tokens=10, n=3)
    assert complete(asked, prompt_tokens=20, context_length=100, kv_tokens=90) == asked
    with pytest.raises(InvalidRequest, match=r"3 times a prompt of 20 tokens and 10 to generate .* the 89") as caught:
        complete(asked, prompt_tokens=20, context_length=100, kv_tokens=89)
    assert caught.value.param == "n"
    with pytest.raises(InvalidRequest, match=r"^a prompt of 20 tokens and 10") as caught:
        complete(SamplingParams(max_tokens=10), prompt_tokens=20, context_length=100, kv_tokens=29)
    assert caught.value.param == "max_tokens"
    with pytest.raises(InvalidRequest, match=r"^2 times a prompt") as caught:
        complete(SamplingParams(max_tokens=80, n=2), prompt_tokens=20, context_length=100, kv_tokens=199)
    assert caught.value.param == "n"
    assert complete(SamplingParams(), prompt_tokens=20, context_length=100, kv_tokens=21).max_tokens == 1
    with pytest.raises(InvalidRequest):
        complete(SamplingParams(), prompt_tokens=20, context_length=100, kv_tokens=20)
    assert complete(SamplingParams(n=2), prompt_tokens=20, context_length=100, kv_tokens=90).max_tokens == 25
    assert complete(SamplingParams(n=2), prompt_tokens=20, context_length=100, kv_tokens=999).max_tokens == 80
    three = SamplingParams(n=3)
    completed = complete(three, prompt_tokens=20, context_length=100, kv_tokens=112, kv_block_tokens=16)
    assert completed.max_tokens == 12, "a third of seven blocks is two blocks"
    with pytest.raises(ContextTooLong):
        complete(SamplingParams(max_tokens=81), prompt_tokens=20, context_length=100, kv_tokens=50)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": -1e-9}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 101}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ("a", "b", "c")}, "stop"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("abcdef",)}, "stop"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"stop_token_ids": (1, 2, 3)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-10}, "repetition_penalty"),
        ({"repetition_penalty": 10.1}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"logit_bias": ((1, 0.0), (2, 0.0), (3, 0.0))}, "logit_bias"),
        ({"logit_bias": ((1, 100.1),)}, "logit_bias"),
        ({"logit_bias": ((1, -100.1),)}, "logit_bias"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias"),
        ({"logit_bias": ((1, 0.0), (1, 1.0))}, "logit_bias"),
        ({"logit_bias": ((-1, 0.0),)}, "logit_bias"),
        ({"logprobs": -1}, "top_logprobs"),
        ({"logprobs": 21}, "top_logprobs"),
        ({"response_format": OBJECT, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": ResponseFormat(Grammar.LARK, "start: /a/")}, "response_format"),
        ({"response_format": ResponseFormat(Grammar.JSON_OBJECT, "{}")}, "response_format"),
        ({"response_format": ResponseFormat(Grammar.JSON_SCHEMA)}, "response_format"),
        ({"response_format": ResponseFormat(Grammar.JSON_SCHEMA, '{"a": "bcd"}')}, "response_format"),
    ],
)
def test_a_parameter_out_of_bounds_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(SamplingParams(**fields), BOUNDS)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
        {"top_k": -1},
        {"temperature": 2.0, "top_p": 0.0, "top_k": 100, "seed": -(2**63), "max_tokens": 1, "stop": ("abcde", "x")},
        {"seed": 2**63 - 1, "repetition_penalty": 1e-9, "n": 16},
        {"min_p": 1.0, "n": 3, "min_tokens": 5, "max_tokens": 5, "stop_token_ids": (0, 1), "repetition_penalty": 10.0},
        {"frequency_penalty": -2.0, "presence_penalty": 2.0, "logit_bias": ((0, -100.0), (1, 100.0)), "logprobs": 20},
        {"logprobs": 0, "response_format": ResponseFormat(Grammar.JSON_SCHEMA, '{"a": "b"}')},
    ],
)
def test_bounds_are_inclusive(fields: dict[str, Any]) -> None:
    check_sampling(SamplingParams(**fields), BOUNDS)


@pytest.mark.parametrize(
    ("bias", "message"),
    [(((-1, 0.0),), "a key of logit_bias is -1, must be from 0"), (((0, 0.0), (0, 1.0)), "token 0 is named twice")],
)
def test_the_error_for_a_biased_token_names_the_fault(bias: tuple[tuple[int, float], ...], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_sampling(SamplingParams(logit_bias=bias), BOUNDS)


def test_a_missing_and_a_superfluous_schema_have_different_errors() -> None:
    with pytest.raises(InvalidRequest, match="json_object takes no schema"):
        check_sampling(SamplingParams(response_format=ResponseFormat(Grammar.JSON_OBJECT, "{}")), BOUNDS)
    with pytest.raises(InvalidRequest, match="json_schema needs a schema"):
        check_sampling(SamplingParams(response_format=ResponseFormat(Grammar.JSON_SCHEMA)), BOUNDS)


@pytest.mark.parametrize(
    ("choice", "tools", "fields", "param"),
    [
        (ToolChoice(required=True), "", {}, "tool_choice"),
        (ToolChoice(name="f"), "", {}, "tool_choice"),
        (ToolChoice(required=True), "[f]", {"response_format": OBJECT}, "tool_choice"),
        (ToolChoice(required=True), "[f]", {"ignore_eos": True}, "ignore_eos"),
    ],
)
def test_an_impossible_tool_choice_is_refused(
    choice: ToolChoice, tools: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_tool_choice(choice, tools, SamplingParams(**fields))
    assert caught.value.param == param


def test_a_possible_tool_choice_is_accepted() -> None:
    check_tool_choice(ToolChoice(required=True), "[f]", SamplingParams())
    check_tool_choice(ToolChoice(name="f"), "[f]", SamplingParams())
    check_tool_choice(ToolChoice(), "", SamplingParams(response_format=OBJECT))
    check_tool_choice(ToolChoice(), "[f]", SamplingParams(ignore_eos=True))


def test_a_priority_has_the_range_of_32_bits() -> None:
    for priority in (-(2**31), 0, 2**31 - 1):
        check_priority(priority)
    for priority in (-(2**31) - 1, 2**31):
        with pytest.raises(InvalidRequest) as caught:
            check_priority(priority)
        assert caught.value.param == "priority"


def test_the_number_of_items_is_bounded() -> None:
    check_items(4, BOUNDS)
    with pytest.raises(InvalidRequest, match="5 images, at most 4"):
        check_items(5, BOUNDS)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_timeout_is_refused(timeout_s: float) -> None:
    with pytest.raises(InvalidRequest):
        check_timeout(timeout_s, 10)


def test_a_timeout_is_cut_to_the_limit() -> None:
    assert (check_timeout(0.5, 10), check_timeout(5, 10), check_timeout(50, 10)) == (0.5, 5, 10)


def test_without_max_tokens_the_answer_may_fill_the_context() -> None:
    assert complete(SamplingParams(), prompt_tokens=60, context_length=100).max_tokens == 40
    assert complete(SamplingParams(), prompt_tokens=99, context_length=100).max_tokens == 1
    assert complete(SamplingParams(max_tokens=40), prompt_tokens=60, context_length=100).max_tokens == 40


@pytest.mark.parametrize(
    ("sampling", "prompt_tokens", "param"),
    [
        (SamplingParams(), 100, "messages"),
        (SamplingParams(max_tokens=1), 100, "messages"),
        (SamplingParams(max_tokens=41), 60, "max_tokens"),
    ],
)
def test_a_prompt_above_the_context_length_is_refused(sampling: SamplingParams, prompt_tokens: int, param: str) -> None:
    with pytest.raises(ContextTooLong) as caught:
        complete(sampling, prompt_tokens=prompt_tokens, context_length=100)
    assert caught.value.param == param


def test_a_context_with_less_room_than_min_tokens_is_refused() -> None:
    assert complete(SamplingParams(min_tokens=40), prompt_tokens=60, context_length=100).max_tokens == 40
    with pytest.raises(InvalidRequest, match="the context leaves 40 tokens"):
        complete(SamplingParams(min_tokens=41), prompt_tokens=60, context_length=100)


def test_capacity_is_bounded_in_requests_and_in_bytes() -> None:
    check_capacity(requests=1, media_bytes=50, new_media_bytes=50, bounds=SERVER)
    check_capacity(requests=0, media_bytes=0, new_media_bytes=100, bounds=SERVER)
    with pytest.raises(Overloaded) as caught:
        check_capacity(requests=2, media_bytes=0, new_media_bytes=0, bounds=SERVER)
    assert caught.value.retry_after_s == 3.0
    with pytest.raises(Overloaded, match="50 bytes of media"):
        check_capacity(requests=0, media_bytes=50, new_media_bytes=51, bounds=SERVER)


def test_the_last_eighth_of_the_requests_is_left_to_other_tenants() -> None:
    bounds = ServerBounds(max_concurrent_requests=16)
    check_capacity(requests=15, own_requests=13, media_bytes=0, new_media_bytes=0, bounds=bounds)
    with pytest.raises(Overloaded, match="14 requests of this tenant"):
        check_capacity(requests=14, own_requests=14, media_bytes=0, new_media_bytes=0, bounds=bounds)


def test_what_others_were_promised_is_left_to_them() -> None:
    check_wait(left_s=4.0, wait_s=1.0, service_s=1.0, promised_s=1.7)
    with pytest.raises(Overloaded, match=r"2\.8 s in queues") as refused:
        check_wait(left_s=4.0, wait_s=1.0, service_s=1.0, promised_s=1.8)
    assert refused.value.retry_after_s == pytest.approx(0.05)
    check_wait(left_s=1.0, wait_s=0.0, service_s=0.5, promised_s=9.0)


def test_media_above_the_limit_is_invalid_rather_than_overloaded() -> None:
    with pytest.raises(InvalidRequest, match="101 bytes, the limit is 100"):
        check_capacity(requests=2, media_bytes=0, new_media_bytes=101, bounds=SERVER)


@pytest.mark.parametrize(
    ("left_s", "wait_s", "service_s", "retry_s"),
    [
        (3.0, 4.0, 1.0, 4 * WAIT_CAUTION + 1 - 3),
        (3.0, 2.0, 0.6, 2 * WAIT_CAUTION + 0.6 - 3),
        (1.0, 0.5, 9.0, 0.5),
    ],
)
def test_a_deadline_that_cannot_be_met_after_the_wait_is_refused_until_the_queue_is_short_enough(
    left_s: float, wait_s: float, service_s: float, retry_s: float
) -> None:
    with pytest.raises(Overloaded, match=f"{left_s:.1f} s are left") as refused:
        check_wait(left_s=left_s, wait_s=wait_s, service_s=service_s)
    assert refused.value.retry_after_s == pytest.approx(retry_s)
    admit_anyway(left_s=left_s, wait_s=wait_s, service_s=service_s)


@pytest.mark.parametrize(("left_s", "wait_s", "service_s"), [(3.0, 1.6, 1.0), (3.0, 2.4, 0.0), (1.0, 0.0, 9.0)])
def test_a_request_in_time_or_without_a_wait_is_not_refused(left_s: float, wait_s: float, service_s: float) -> None:
    check_wait(left_s=left_s, wait_s=wait_s, service_s=service_s)


SEEDED = SamplingParams(n=3, seed=1, max_tokens=5)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ((1, 0), r"choices \[1, 0\] are not some of 3 in their order"),
        ((1, 1), r"choices \[1, 1\]"),
        ((0, 3), r"choices \[0, 3\]"),
    ],
)
def test_a_continuation_names_choices_of_the_request_in_their_order(choices: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_continued(SEEDED, [ContinuedChoice(choice, (7,)) for choice in choices], 100)
    assert caught.value.param == "continued"
    check_continued(SEEDED, [ContinuedChoice(choice, (7,)) for choice in (0, 2)], 100)


@pytest.mark.parametrize(("max_tokens", "context_length", "most"), [(5, 100, 5), (None, 8, 8), (20, 8, 8)])
def test_only_a_choice_with_tokens_left_can_be_continued(
    max_tokens: int | None, context_length: int, most: int
) -> None:
    sampling = SamplingParams(seed=1, max_tokens=max_tokens)
    check_continued(sampling, [ContinuedChoice(0, (7,) * (most - 1))], context_length)
    with pytest.raises(InvalidRequest, match=f"choice 0 has ended already, with {most} tokens"):
        check_continued(sampling, [ContinuedChoice(0, (7,) * most)], context_length)


def test_an_answer_without_a_seed_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_continued(SamplingParams(), [ContinuedChoice(0, (7,))], 100)
    assert caught.value.param == "seed"
