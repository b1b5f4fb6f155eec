"""Sampling parameters are declared once: wire, REST API, SDK and admission accept and refuse the same values."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from triptych.client.options import SamplingOptions
from triptych.client.sampling import sampling_params
from triptych.domain.bounds import Between, Many
from triptych.domain.sampling import PARAMETERS, SamplingParams
from triptych.errors import InvalidRequest
from triptych.policy.admission import check_parameters
from triptych.services.gateway.openai_api import parse_chat
from triptych.services.gateway.openai_models import ChatCompletionRequest
from triptych.v1 import common_pb2, text_pb2
from triptych.wire.common import SAMPLING
from triptych.wire.decode import REQUESTS


def by_wire(name: str, value: Any) -> None:
    message = SAMPLING.to_wire(SamplingParams(**{name: value}))
    REQUESTS["/triptych.v1.Text/Generate"](text_pb2.TextRequest(sampling=message).SerializeToString())


def by_rest(name: str, value: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], PARAMETERS[name].api_name: value}
    if name == "logprobs":
        body["logprobs"] = True
    parsed = parse_chat(json.dumps(body).encode(), 1)
    assert getattr(parsed.sampling, name) == (tuple(value) if isinstance(value, list) else value)


def by_sdk(name: str, value: Any) -> None:
    assert getattr(sampling_params({name: value}), name) == (tuple(value) if isinstance(value, list) else value)


def by_admission(name: str, value: Any) -> None:
    check_parameters(SamplingParams(**{name: value}))


def is_representable_on_the_wire(name: str, value: Any) -> bool:
    try:
        SAMPLING.to_wire(SamplingParams(**{name: value}))
    except ValueError:
        return False
    return True


READERS = (by_wire, by_rest, by_sdk, by_admission)
NUMBERS = {name: row.bound for name, row in PARAMETERS.items() if isinstance(row.bound, Between)}
LISTS = {name: row.bound for name, row in PARAMETERS.items() if isinstance(row.bound, Many) and name != "logit_bias"}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", NUMBERS)
def test_every_reader_has_the_same_bounds(name: str, reader: Callable[[str, Any], None]) -> None:
    bound, number = NUMBERS[name], float if PARAMETERS[name].kind is float else int
    least = 1e-9 if bound.above else number(bound.low)
    if name != "min_tokens":
        reader(name, number(bound.high))
    reader(name, least)
    step = 0.001 if number is float else 1
    for value in (number(bound.high) + step, number(bound.low) - (0 if bound.above else step)):
        if reader is by_wire and not is_representable_on_the_wire(name, value):
            continue
        with pytest.raises(InvalidRequest) as caught:
            reader(name, value)
        assert caught.value.param in (name, PARAMETERS[name].api_name)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", LISTS)
def test_every_reader_has_the_same_maximum_count(name: str, reader: Callable[[str, Any], None]) -> None:
    bound, value = LISTS[name], "a" if name == "stop" else 7
    reader(name, [value] * bound.high)
    with pytest.raises(InvalidRequest):
        reader(name, [value] * (bound.high + 1))


def test_every_reader_knows_every_parameter() -> None:
    assert set(PARAMETERS) == set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    assert set(PARAMETERS) == set(SamplingOptions.__annotations__)
    assert {row.api_name for row in PARAMETERS.values()} <= set(ChatCompletionRequest.model_fields)


def test_defaults_are_within_their_bounds() -> None:
    check_parameters(SamplingParams())
    for name, row in PARAMETERS.items():
        if row.default is not None and row.bound is not None:
            assert row.bound.fault(name, row.default) is None
