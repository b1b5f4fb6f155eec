"""A text instance goes on with an answer that another one began, from any of its tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.services.instances import (
    Asked,
    Instances,
    answer,
    encode_and_keep_only_tickets,
    instances,
    question,
    text_instance,
    under_virtual_time,
)
from tests.unit.services.text.test_service import by_choice, sampled
from triptych.demo import MODEL_DIR
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.generation import (
    Finished,
    FinishReason,
    TextEvent,
    TextRequest,
    TokenChunk,
    TokenLogprobs,
)
from triptych.domain.sampling import SamplingParams
from triptych.errors import InvalidRequest
from triptych.families.model_files import ModelFiles
from triptych.services.text.answer import Answer
from triptych.tokens.detokenize import IncrementalDetokenizer
from triptych.tokens.tokenizer import Tokenizer
from triptych.transport.memory import MemoryNetwork

TOKENIZER = Tokenizer.load(ModelFiles.load(MODEL_DIR))
Choices = Mapping[int, Sequence[TextEvent]]


def chunks(events: Sequence[TextEvent]) -> list[TokenChunk]:
    """Chunks, one per token, as every step sends what it made."""
    found = [event for event in events if isinstance(event, TokenChunk)]
    assert all(len(chunk.token_ids) == 1 for chunk in found)
    return found


def tokens(sent: Sequence[TokenChunk]) -> tuple[int, ...]:
    return tuple(token for chunk in sent for token in chunk.token_ids)


def text(sent: Sequence[TokenChunk]) -> str:
    return "".join(chunk.text for chunk in sent)


def logprobs(sent: Sequence[TokenChunk]) -> list[TokenLogprobs]:
    return [logprob for chunk in sent for logprob in chunk.logprobs]


def finished(events: Sequence[TextEvent]) -> tuple[FinishReason, int]:
    (end,) = (event for event in events if isinstance(event, Finished))
    return end.reason, end.completion_tokens


def cut(whole: Choices, position: int) -> tuple[ContinuedChoice, ...]:
    """What a router has of each choice that has not finished after ``position`` steps."""
    sent = {choice: tokens(chunks(events)) for choice, events in whole.items()}
    return tuple(
        ContinuedChoice(choice, sent[choice][:position]) for choice in sorted(sent) if position < len(sent[choice])
    )


async def ask_about_cat(made: Instances, **sampling: Any) -> TextRequest:
    items = await encode_and_keep_only_tickets(made.encoder, "cat")
    return sampled(question("who", items).request, seed=1, **sampling)


@pytest.mark.parametrize("max_tokens", [3, 64])
def test_choices_go_on_from_every_position_as_if_nothing_had_happened(max_tokens: int) -> None:
    async def scenario() -> None:
        async with instances() as made:
            asked = {"n": 3, "logprobs": 2, "max_tokens": max_tokens}
            _, whole = await by_choice(made.text.service, await ask_about_cat(made, **asked))
            longest = max(len(chunks(events)) for events in whole.values())
            for position in range(longest):
                continued = cut(whole, position)
                request = replace(await ask_about_cat(made, **asked), continued=continued)
                _, rest = await by_choice(made.text.service, request)
                assert sorted(rest) == [continuation.choice for continuation in continued]
                for choice, events in rest.items():
                    before, after = chunks(whole[choice])[:position], chunks(events)
                    assert before + after == chunks(whole[choice])
                    assert finished(events) == finished(whole[choice])
            assert longest >= 3

    under_virtual_time(scenario)


def long_answer() -> Asked:
    """A question without items whose answer has at least 10 tokens, a letter each."""
    return next(asked for number in range(100) if len((asked := question(f"why {number}", [])).expected) >= 10)


@pytest.mark.parametrize("min_tokens", [0, 6])
@pytest.mark.parametrize(
    ("held", "ended"),
    [((0, 3), None), ((2, 6), None), ((1, 9), (5, 7)), (None, (4, 9)), ((3, 5), (4, 5))],
    ids=str,
)
def test_text_that_a_stop_string_holds_back_comes_once_wherever_the_stream_broke(
    held: tuple[int, int] | None, ended: tuple[int, int] | None, min_tokens: int
) -> None:
    """``held`` is where the text looks like a stop string that is not completed, ``ended`` where one is."""

    async def scenario() -> None:
        asked = long_answer()
        letters = "".join(map(chr, asked.expected))
        stop = tuple(letters[slice(*bounds)] + end for bounds, end in ((held, "~"), (ended, "")) if bounds is not None)
        request = sampled(asked.request, seed=1, stop=stop, min_tokens=min_tokens)
        async with text_instance(MemoryNetwork(), []) as made:
            _, whole = await by_choice(made.service, request)
            all_of_it = chunks(whole[0])
            for position in range(len(all_of_it)):
                _, rest = await by_choice(made.service, replace(request, continued=cut(whole, position)))
                before, after = all_of_it[:position], chunks(rest[0])
                assert text(before) + text(after) == text(all_of_it)
                assert tokens(before) + tokens(after) == tokens(all_of_it)
                assert finished(rest[0]) == finished(whole[0])

    under_virtual_time(scenario)


@settings(max_examples=examples(200))
@given(data=st.data())
def test_characters_and_stop_strings_across_the_break_come_once(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, TOKENIZER.backend.get_vocab_size() - 1), min_size=2, max_size=20))
    decoded = TOKENIZER.decode(ids)
    places = st.tuples(st.integers(0, max(0, len(decoded) - 1)), st.integers(1, 4), st.sampled_from(("", "\n~")))
    drawn = data.draw(st.lists(places, max_size=2))
    stop = tuple(piece + end for start, length, end in drawn if (piece := decoded[start : start + length]))
    sampling = SamplingParams(max_tokens=99, stop=stop, min_tokens=data.draw(st.integers(0, 6)))

    def fed(answering: Answer, token_ids: Sequence[int], *, is_rest: bool) -> tuple[str, FinishReason | None]:
        said, reason = "", None
        for place, token in enumerate(token_ids):
            last = FinishReason.LENGTH if is_rest and place + 1 == len(token_ids) else None
            chunk, reason = answering.feed((token,), last)
            said += chunk.text
            if reason is not None:
                break
        return said, reason

    def new() -> Answer:
        return Answer(IncrementalDetokenizer(TOKENIZER), sampling)

    whole_answer = new()
    whole = fed(whole_answer, ids, is_rest=True)
    for position in range(whole_answer.completion_tokens):
        before, ended = fed(new(), ids[:position], is_rest=False)
        assert ended is None
        other = new()
        other.replay(ids[:position])
        after, reason = fed(other, ids[position:], is_rest=True)
        assert (before + after, reason) == whole
        assert other.completion_tokens == whole_answer.completion_tokens


@pytest.mark.parametrize(
    ("continued", "changes", "param"),
    [
        (((1, 0), (0, 0)), {"n": 2}, "continued"),
        (((0, 0), (0, 0)), {"n": 2}, "continued"),
        (((2, 0),), {"n": 2}, "continued"),
        (((0, 4),), {"max_tokens": 4}, "continued"),
        (((0, 4),), {}, None),
        (((0, 1),), {"seed": None}, "seed"),
    ],
    ids=str,
)
def test_what_cannot_be_continued_is_refused(
    continued: tuple[tuple[int, int], ...], changes: dict[str, Any], param: str | None
) -> None:
    async def scenario() -> None:
        async with text_instance(MemoryNetwork(), []) as made:
            asked = long_answer()
            request = replace(
                sampled(asked.request, **({"seed": 1} | changes)),
                continued=tuple(ContinuedChoice(choice, asked.expected[:length]) for choice, length in continued),
            )
            if param is None:
                assert (await answer(made.service, request)).token_ids == asked.expected[4:]
                return
            with pytest.raises(InvalidRequest) as caught:
                await answer(made.service, request)
            assert caught.value.param == param

    under_virtual_time(scenario)


def test_an_answer_that_has_ended_with_a_stop_string_is_not_continued() -> None:
    async def scenario() -> None:
        asked = long_answer()
        stop = "".join(map(chr, asked.expected[1:3]))
        request = sampled(asked.request, seed=1, stop=(stop,))
        async with text_instance(MemoryNetwork(), []) as made:
            with pytest.raises(InvalidRequest, match="choice 0 has ended already"):
                await answer(made.service, replace(request, continued=(ContinuedChoice(0, asked.expected[:4]),)))
            assert not made.engine.has_work

    under_virtual_time(scenario)


def test_an_instance_says_that_it_continues_answers() -> None:
    async def scenario() -> None:
        async with text_instance(MemoryNetwork(), []) as made:
            assert (await made.service.describe()).continues

    under_virtual_time(scenario)
