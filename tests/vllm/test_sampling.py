"""Sampling parameters at the edge of their range, as vLLM takes them."""

from typing import Any

import pytest

from triptych.domain.sampling import SamplingParams
from triptych.integrations.vllm.sampling import vllm_params


@pytest.mark.parametrize(
    "edge",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "top_p": 0.0},
        {"temperature": 5e-324},
        {"temperature": 2.0, "top_p": 0.0},
        {"top_k": -1},
        {"top_k": 0},
        {"min_p": 1.0},
        {"repetition_penalty": 1e-9},
        {"repetition_penalty": 10.0},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"frequency_penalty": -2.0, "presence_penalty": 2.0},
        {"min_tokens": 9, "max_tokens": 1},
        {"logprobs": 20},
    ],
    ids=str,
)
def test_every_value_that_is_accepted_is_accepted_by_vllm(edge: dict[str, Any]) -> None:
    sampling = SamplingParams(**{"max_tokens": 5, "seed": 1, **edge})
    params = vllm_params(sampling, choice=0, end_ids=(2,), grammar=None)
    assert params.max_tokens == sampling.max_tokens
    assert 0 < params.top_p <= 1
