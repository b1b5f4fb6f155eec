"""Each type of model that the generic family serves, encoder and decoder apart, against the whole model's ``generate``.

Float32 and greedy, token for token; prompts are built as the router builds them and equal the processor's.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.integration.families.harness import Case, Question, Unclear, finish, renamed
from tests.models.conftest import WITHOUT, ZOO, made
from tests.models.table import BEGIN, END, PAGE
from tests.unit.engine.kv_transfer import access, go_on, prefill
from triptych.domain.engine import EngineOutput
from triptych.engine.decoder.packed_runner import PackedModelRunner
from triptych.engine.decoder.setup import KvOptions
from triptych.families.model_files import BadModel

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:__array__ implementation")]
"""Processors of GLM and ERNIE give arrays of tensors to numpy."""

ANSWER_TOKENS = 20
AT_ONCE = 16
ATTEMPTS = 30


def questions(case: Case, count: int) -> dict[str, Question]:
    """Text, one item, and several of other sizes among texts, as far as the processor takes them."""
    most = getattr(case.tiny, "most_items", None) or 3
    least = 1 if getattr(case.tiny, "needs_images", False) else 0
    return {f"r{seed}": clear_question(case, seed, max(least, min(most, seed % 4))) for seed in range(count)}


def clear_question(case: Case, seed: int, items: int) -> Question:
    """A clear question with so many items."""
    return clear(case, (case.question(seed + AT_ONCE * attempt, items) for attempt in range(ATTEMPTS)))


def clear(case: Case, asked: Iterable[Question]) -> Question:
    """The first question whose answer by ``generate`` is clear, and has no placeholder."""
    for question in asked:
        with suppress(Unclear):
            # Models may embed a placeholder that they generate otherwise. Published ones do not generate any.
            if case.builder.family.placeholder_ids.isdisjoint(case.answer(question, ANSWER_TOKENS)):
                return question
    raise AssertionError("no question has a clear answer")


def mixed(case: Case) -> dict[str, Question]:
    """Items of all modalities of a model in one request, beginning with each of them; none for a model of one."""
    kinds = [modality for modality, _ in case.tiny.targets]
    if len(kinds) == 1:
        return {}
    orders = [[*kinds[at:], *kinds[: at + 1]] for at in range(len(kinds))]
    return {
        f"mixed{seed}": clear(case, (case.question_of(100 * seed + attempt, *order) for attempt in range(ATTEMPTS)))
        for seed, order in enumerate(orders)
    }


def answers(case: Case, asked: dict[str, Question]) -> dict[str, list[int]]:
    return {name: case.answer(question, ANSWER_TOKENS) for name, question in asked.items()}


def test_answers_equal_generate(served: Case, results: dict[str, dict[str, Any]]) -> None:
    """One request after the other."""
    engine = served.engine()
    for name, question in (questions(served, 4) | mixed(served)).items():
        engine.add(served.request(name, question, ANSWER_TOKENS))
        assert finish(engine)[name] == served.answer(question, ANSWER_TOKENS)
    packed = isinstance(engine._runner, PackedModelRunner)
    results.setdefault(served.tiny.name, {}).update(
        media=sorted(modality.value for modality in served.builder.family.replacement_targets),
        passes="packed" if packed else "one sequence each",
        transfers=engine.kv is not None,
        prefixes=engine.finds_prefixes,
        transformers=transformers.__version__,
        torchvision=getattr(served.tiny, "needs_torchvision", False),
    )


def test_sixteen_at_once(served: Case, results: dict[str, dict[str, Any]]) -> None:
    asked = questions(served, AT_ONCE) | mixed(served)
    engine = served.engine(max_sequences=AT_ONCE, kv=KvOptions(border_tokens=8))
    outputs: list[EngineOutput] = []
    for name, question in asked.items():
        engine.add(served.request(name, question, ANSWER_TOKENS))
        outputs += engine.step() if name == "r3" else ()
    assert finish(engine, outputs) == answers(served, asked)
    results.setdefault(served.tiny.name, {})["at_once"] = AT_ONCE


def test_preempted_sequences_give_the_same_answers(served: Case) -> None:
    """Prompts fit side by side, and answers do not."""
    asked = questions(served, 4)
    requests = [served.request(name, question, ANSWER_TOKENS) for name, question in asked.items()]
    prompts = sum(len(request.token_ids) for request in requests)
    most = max(len(request.token_ids) for request in requests) + ANSWER_TOKENS
    engine = served.engine(kv_cache_bytes=int(max(1.2 * prompts, 1.2 * most) + 40) * served.slot_nbytes)
    for request in requests:
        engine.add(request)
    assert finish(engine) == answers(served, asked)


def test_cached_prefixes_do_not_change_answers(served: Case) -> None:
    question = questions(served, 2)["r1"]
    engine = served.engine(kv=KvOptions(1, border_tokens=4))
    for name in ("first", "again"):
        engine.add(served.request(name, question, ANSWER_TOKENS))
        assert finish(engine) == {name: served.answer(question, ANSWER_TOKENS)}
    assert (engine.prefix_hits_tokens > 0) is engine.finds_prefixes


def test_choices_of_a_seed_are_the_same_beside_others(served: Case) -> None:
    request = served.request("drawn", questions(served, 2)["r1"], ANSWER_TOKENS)
    drawn = replace(request, sampling=replace(request.sampling, temperature=0.9, seed=5, n=2))
    engine = served.engine()
    engine.add(drawn)
    alone = finish(engine)["drawn"]
    engine.add(served.request("beside", questions(served, 3)["r2"], ANSWER_TOKENS))
    engine.add(renamed(drawn, "again"))
    assert sorted(finish(engine)["again"]) == sorted(alone)


def test_prompts_are_prefilled_in_one_engine_and_decoded_in_another(served: Case) -> None:
    source, target = served.engine(), served.engine(kv=KvOptions(48, contiguous=False))
    if source.kv is None:
        pytest.skip("its sequences cannot be transferred")
    for name, question in questions(served, 4).items():
        request = served.request(name, question, ANSWER_TOKENS)
        begun, packed = prefill(source, request)
        tokens = [token for output in begun for token in output.token_ids]
        outputs = begun
        if begun[-1].finish_reason is None:
            outputs = [*begun, *go_on(target, request, {0: tokens}, {0: packed})]
            assert access(target).computed(name, 0) == len(request.token_ids), "it is computed once more"
        assert finish(target, outputs)[name] == served.answer(question, ANSWER_TOKENS)


@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_what_cannot_be_served_is_refused_at_start(name: str, tmp_path: Path) -> None:
    case = made(name, tmp_path)
    with pytest.raises(BadModel, match=WITHOUT[name]):
        served_parts(case)


def served_parts(case: Case) -> None:
    """Start both engines."""
    case.engine()
    case.encode(case.directory, [])


def test_the_page_has_a_row_for_each_type() -> None:
    """Also where those that need torchvision are not tested."""
    rows = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    types = {name for name in ZOO if "--" not in name}
    assert set(re.findall(r"^\| `([^`]+)`", rows, re.MULTILINE)) == types.difference(WITHOUT)
