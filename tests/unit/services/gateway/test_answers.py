import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.generation import TokenChunk
from triptych.services.gateway.answers import ChatForm


@given(text=st.text(min_size=1), model=st.text(), choice=st.integers(0, 100), include_usage=st.booleans())
def test_a_preformatted_chunk_equals_the_json_encoders(text: str, model: str, choice: int, include_usage: bool) -> None:
    form = ChatForm("id", model, 7, include_usage=include_usage, logprobs=False)
    form.begin(1)
    written = form.chunk(TokenChunk((1,), text, choice))
    assert written.isascii()
    assert written.startswith(b"data: ")
    assert written.endswith(b"}\n\n")
    assert b"\n" not in written[:-2]
    said = {
        "id": "chatcmpl-id",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": model,
        "choices": [{"index": choice, "delta": {"content": text}, "logprobs": None, "finish_reason": None}],
    }
    assert json.loads(written[6:]) == (said | {"usage": None} if include_usage else said)


@pytest.mark.parametrize("model", ['"index":0', '""', "%b%d", ""])
def test_a_model_name_may_contain_the_placeholders_of_the_form(model: str) -> None:
    form = ChatForm("id", model, 7, include_usage=False, logprobs=False)
    form.begin(1)
    assert json.loads(form.chunk(TokenChunk((1,), "x", 3))[6:])["model"] == model
