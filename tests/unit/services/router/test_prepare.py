import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from tokenizers import Tokenizer as Backend

from tests.unit.tokens.test_reasoning import tokenizer
from triptych.domain.chat import ChatRequest, MediaPart, Message, TextPart
from triptych.domain.media import Modality
from triptych.domain.sampling import Grammar, ResponseFormat, SamplingParams
from triptych.errors import InvalidMedia, InvalidRequest
from triptych.media.sniff import MediaLimits
from triptych.services.router.prepare import AUTO, ModelPrepare, Prompted, SmallInline
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.model import fake_prompt_builder, fake_tokenizer
from triptych.tokens.grammar import Grammars
from triptych.tokens.template import ChatTemplate
from triptych.tokens.tokenizer import Tokenizer

T = TypeVar("T")


class Counted:
    """``ports.Offload`` that counts its calls."""

    def __init__(self) -> None:
        self.runs = 0

    async def run(self, fn: Callable[..., T], /, *args: object) -> T:
        self.runs += 1
        return fn(*args)


def request(text: str = "hello", media: bytes = b"", messages: int = 1, **more: object) -> ChatRequest:
    parts = (TextPart(text), *((MediaPart(Modality.IMAGE, media),) if media else ()))
    return ChatRequest("id", "model", (Message("user", parts),) * messages, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "kv_transferred"),
    [
        (request("x" * 100), False),
        (request("x" * 101), True),
        (request("x" * 51, messages=2), True),
        (request("", messages=17), True),
        (request(media=bytes(1000)), False),
        (request(media=bytes(1001)), True),
        (request(tools="[" + " " * 100 + "]"), True),
        (ChatRequest("id", "model", (), prompt="x" * 101), True),
        (request(sampling=SamplingParams(response_format=ResponseFormat(Grammar.JSON_OBJECT))), True),
    ],
)
async def test_only_small_requests_are_prepared_on_the_event_loop(asked: ChatRequest, kv_transferred: bool) -> None:
    threads = Counted()
    offload = SmallInline(threads, max_chars=100, max_media_bytes=1000)
    assert await offload.run(lambda question, model: (question, model), asked, "model") == (asked, "model")
    assert threads.runs == kv_transferred


async def test_other_work_runs_in_threads() -> None:
    threads = Counted()
    assert await SmallInline(threads, max_chars=100, max_media_bytes=1000).run(len, "abc") == 3
    assert threads.runs == 1


@pytest.mark.parametrize(
    ("modality", "message"),
    [
        (Modality.AUDIO, "the model takes images, not audio"),
        (Modality.VIDEO, "the model takes images, not videos"),
        (Modality.IMAGE, "format is not known"),
    ],
)
def test_an_unsupported_modality_is_named(modality: Modality, message: str) -> None:
    parts = (TextPart("w5"), MediaPart(modality, b"neither of them"))
    prepare = ModelPrepare(fake_prompt_builder(), MediaLimits(), Grammars(fake_tokenizer()))
    with pytest.raises(InvalidMedia, match=message) as refused:
        prepare(ChatRequest("request", "fake", (Message("user", parts),)), FAKE_MODEL)
    assert refused.value.param == "messages[0].content[1]"


# --- reasoning and variables of the template --------------------------------------------------------------------------

TEMPLATE = (
    "{%- for m in messages -%}<{{ m.role }}> {% if m.reasoning_content %}<think> {{ m.reasoning_content }} </think> {% endif %}"
    "{{ m.content }} <end> {%- endfor -%} <assistant>{% if enable_thinking %}<think>{% else %}{{ reasoning_effort }}{% endif %}"
)
JSON = SamplingParams(response_format=ResponseFormat(Grammar.JSON_OBJECT))


def preparing(template: str = TEMPLATE, reasoning: str = AUTO) -> ModelPrepare:
    builder = replace(fake_prompt_builder(), template=ChatTemplate(template, {}))
    return ModelPrepare(builder, MediaLimits(), Grammars(tokenizer(marks=False)), reasoning)


def prepared(prepare: ModelPrepare, *, kwargs: object = "", **more: object) -> Prompted:
    written = json.dumps(kwargs) if kwargs else ""
    fields: Any = {"separates_reasoning": True, **more}
    return prepare(request("w5", template_kwargs=written, **fields), FAKE_MODEL)


def test_reasoning_is_read_if_the_template_has_its_marks_and_the_caller_knows_it() -> None:
    opened = prepared(preparing(), kwargs={"enable_thinking": True}).reading
    assert opened is not None
    assert opened.reasoning is not None
    assert opened.reasoning.prompt_tail.endswith("<think>")
    assert prepared(preparing()).reading is not None
    for other in (
        prepared(preparing(), separates_reasoning=False),
        prepared(preparing(reasoning="none")),
        prepared(preparing(TEMPLATE.replace("think>", "thing>"))),
        preparing()(ChatRequest("id", "model", (), prompt="w5", separates_reasoning=True), FAKE_MODEL),
    ):
        assert other.reading is None


def test_a_prompt_of_token_ids_is_taken_as_it_is() -> None:
    def tokens(*token_ids: int) -> Prompted:
        return preparing()(ChatRequest("id", "model", (), prompt="", prompt_tokens=token_ids), FAKE_MODEL)

    assert tokens(70, 71).token_ids == (70, 71)
    with pytest.raises(InvalidRequest, match="there is no token 2147483647") as caught:
        tokens(70, 2**31 - 1)
    assert caught.value.param == "prompt"


def test_the_setting_names_a_syntax_that_the_template_does_not_have() -> None:
    reading = prepared(preparing(reasoning="mistral")).reading
    assert reading is not None
    assert reading.reasoning is not None
    assert reading.reasoning.syntax.name == "mistral"


def test_marks_that_are_special_tokens_are_shown_and_other_special_tokens_are_not() -> None:
    backend = Backend.from_str(fake_tokenizer().backend.to_str())
    backend.add_special_tokens(["[THINK]", "[/THINK]", "[OTHER]"])
    marked = Tokenizer(backend, special_tokens={}, eos_ids=frozenset())
    builder = replace(fake_prompt_builder(), tokenizer=marked)
    prepare = ModelPrepare(builder, MediaLimits(), Grammars(marked), "mistral")
    answer = prepared(prepare)
    assert answer.sampling.special_tokens
    assert answer.reading is not None
    assert answer.reading.reasoning is not None
    assert answer.reading.reasoning.closing_id == marked.token_to_id("[/THINK]")
    assert answer.reading.hidden is not None
    assert answer.reading.hidden.tokens.sub("", "[THINK]a[OTHER]") == "[THINK]a"
    assert marked.token_to_id("[OTHER]") in answer.reading.hidden.ids
    assert marked.token_to_id("[THINK]") not in answer.reading.hidden.ids
    asked = prepared(prepare, sampling=SamplingParams(special_tokens=True)).reading
    assert asked is not None
    assert asked.hidden is None


def test_a_format_holds_after_reasoning_only_where_reasoning_is_separated() -> None:
    assert prepared(preparing(), sampling=JSON, separates_reasoning=False).sampling == JSON
    wanted = prepared(preparing(), sampling=JSON).sampling.response_format
    assert wanted is not None
    assert wanted.grammar is Grammar.LARK


def test_variables_reach_the_template_and_those_that_it_lacks_are_named() -> None:
    plain = prepared(preparing())
    given = {"reasoning_effort": "w7", "enable_thinking": False, "other": 1}
    answer = prepared(preparing(), kwargs=given)
    assert answer.ignored == ("chat_template_kwargs.other",)
    assert len(answer.token_ids) == len(plain.token_ids) + 1
    assert prepared(preparing("{{ messages[0].content }}"), kwargs=given).ignored == (
        "chat_template_kwargs.enable_thinking",
        "chat_template_kwargs.other",
        "reasoning_effort",
    )


@pytest.mark.parametrize(
    "kwargs",
    [{"messages": []}, {"tools": []}, {"range": 1}, {"raise_exception": 1}, {"__class__": 1}, {"a b": 1}, [1]],
    ids=str,
)
def test_variables_of_the_template_that_requests_must_not_set_are_refused(kwargs: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        prepared(preparing(), kwargs=kwargs)
    assert refused.value.param == "chat_template_kwargs"


def test_a_placeholder_in_a_variable_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="<image>"):
        prepared(preparing(), kwargs={"reasoning_effort": "<image>"})


def test_reasoning_of_earlier_turns_is_given_to_the_template() -> None:
    turns = (Message("user", (TextPart("w5"),)), Message("assistant", (TextPart("w6"),), reasoning="w7"))
    tokens = preparing()(ChatRequest("id", "model", turns), FAKE_MODEL).token_ids
    assert fake_tokenizer().token_to_id("w7") in tokens
