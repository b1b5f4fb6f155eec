"""Each family, encoded in one process and decoded in another, against the whole model's ``generate``.

Float32 and greedy, token for token; prompts are built as the router builds them and equal the processor's.
"""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from tests.integration.families.conftest import TINIES, usual_families
from tests.integration.families.harness import Case, finish, items_of, renamed
from tests.unit.engine.kv_transfer import CUT, access, go_on, prefill, transfer_kv
from tests.unit.engine.on_cuda import as_on_cuda
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.engine import EngineOutput
from triptych.engine.decoder.setup import KvOptions
from triptych.engine.decoder.text_engine import TransformersTextEngine
from triptych.engine.families.registry import ADAPTERS

pytestmark = pytest.mark.timeout(180)

ANSWER_TOKENS = 12
LONG_ANSWER_TOKENS = 40
MIXED = (0, 1, 2, 0, 3, 1, 1, 0)
"""Items of the requests of a mixed batch."""
WITHOUT_EARLY_PREFILL = {"convolutions", "mllama", "granite_speech", "whisper"}
"""What comes before an item depends on it, or has state outside of KV blocks."""
WITHOUT_GRAPHS = {"mllama", "granite_speech", "whisper"}
"""What decodes differs from pass to pass in more than tokens and positions."""


@pytest.mark.parametrize("items", [0, pytest.param(1, marks=pytest.mark.extended), 3])
def test_answers_equal_generate(case: Case, items: int) -> None:
    question = case.question(items, items)
    engine = case.engine()
    engine.add(case.request("one", question, ANSWER_TOKENS))
    assert finish(engine)["one"] == case.answer(question, ANSWER_TOKENS)


def test_each_modality_alone_and_all_together(case: Case) -> None:
    taken = [modality for modality, _ in case.tiny.targets]
    questions = {
        "+".join(modality.value for modality in chosen): case.question_of(200 + number, *chosen)
        for number, chosen in enumerate((*((modality,) for modality in taken), taken[::-1]))
    }
    engine = case.engine()
    for name, question in questions.items():
        engine.add(case.request(name, question, ANSWER_TOKENS))
    assert finish(engine) == {name: case.answer(question, ANSWER_TOKENS) for name, question in questions.items()}


def test_items_change_the_answer(case: Case) -> None:
    """Shows that items have an effect."""
    question = case.question(1, 1)
    other = tuple(items_of(case.question(101, 1))[0] if not isinstance(part, str) else part for part in question)
    assert case.answer(question, ANSWER_TOKENS) != case.answer(other, ANSWER_TOKENS)


@usual_families
def test_prefill_chunks_may_split_an_item(case: Case) -> None:
    question = case.question(2, 2)
    engine = case.engine(max_sequences=1, token_budget=case.tiny.chunk_tokens)
    engine.add(case.request("one", question, ANSWER_TOKENS))
    assert finish(engine)["one"] == case.answer(question, ANSWER_TOKENS)


@pytest.mark.extended
def test_a_full_batch_of_mixed_requests_that_arrive_one_by_one(case: Case) -> None:
    questions = {f"r{seed}": case.question(seed, items) for seed, items in enumerate(MIXED)}
    engine = case.engine(max_sequences=5, token_budget=5 + 4 * case.tiny.chunk_tokens)
    outputs: list[EngineOutput] = []
    for number, (name, question) in enumerate(questions.items()):
        engine.add(case.request(name, question, ANSWER_TOKENS + number))
        outputs += engine.step() + engine.step()
    assert finish(engine, outputs) == {
        name: case.answer(question, ANSWER_TOKENS + number) for number, (name, question) in enumerate(questions.items())
    }


@pytest.mark.extended
def test_preempted_sequences_give_the_same_answers(case: Case) -> None:
    """Prompts roughly fit side by side, and answers do not: some wait, some are preempted and copied back, or recomputed."""
    questions = {f"r{seed}": case.question(seed, items) for seed, items in enumerate(MIXED[:5])}
    requests = [case.request(name, question, LONG_ANSWER_TOKENS) for name, question in questions.items()]
    prompts = sum(len(request.token_ids) for request in requests)
    recomputed = copied_back = 0
    for spare, copied_bytes in ((20, None), (80, None), (110, None), (110, 0)):
        engine = case.engine(kv_cache_bytes=(prompts + spare) * case.slot_nbytes, preempted_kv_bytes=copied_bytes)
        for request in requests:
            engine.add(request)
        answers = finish(engine)
        assert answers == {name: case.answer(question, LONG_ANSWER_TOKENS) for name, question in questions.items()}
        recomputed += engine.preemptions - engine.kv_copies.out
        copied_back += engine.kv_copies.back
        assert engine.kv_copies.held_bytes == 0
    assert (recomputed and copied_back) or case.device != "cpu", (
        "elsewhere, copies may have been found slower, or faster"
    )


@pytest.mark.extended
@pytest.mark.parametrize("contiguous", [False, True], ids=["scattered", "contiguous"])
def test_a_prompt_whose_beginning_was_computed_early(case: Case, *, contiguous: bool) -> None:
    """Up to each of its items, the last time in part; what was computed is not computed again."""
    question = case.question(3, 3)
    whole = case.request("whole", question, ANSWER_TOKENS)
    kv = KvOptions(16, contiguous=contiguous)
    engine = case.engine(max_sequences=1, token_budget=case.tiny.chunk_tokens, kv=kv)
    one_token = replace(whole.sampling, max_tokens=1)
    for count, item in enumerate(whole.embeddings):
        beginning = replace(
            whole,
            request_id=f"before {count}",
            token_ids=whole.token_ids[: item.start],
            embeddings=whole.embeddings[:count],
            sampling=one_token,
        )
        engine.add(beginning)
        finish(engine)
    engine.add(replace(whole, request_id="cancelled", sampling=one_token))
    engine.step()
    engine.cancel("cancelled")
    before = engine.prefix_hits_tokens
    engine.add(whole)
    assert finish(engine)["whole"] == case.answer(question, ANSWER_TOKENS)
    found = engine.prefix_hits_tokens - before
    assert (found > 0) is engine.finds_prefixes
    assert found >= whole.embeddings[-1].start // 16 * 16 - case.tiny.chunk_tokens or not engine.finds_prefixes
    assert engine.finds_prefixes is (case.tiny.name not in WITHOUT_EARLY_PREFILL)


@pytest.mark.extended
def test_keys_and_values_go_from_engine_to_engine(case: Case) -> None:
    """Packed as chunks of the prompt are computed, and from the running answer; with blocks of other sizes and in other places, amid
    other requests. Nothing is computed twice but what is lost, and what the reader has need not come.
    """
    question = case.question(8, 2)
    request = case.request("one", question, ANSWER_TOKENS)
    other = case.request("other", case.question(1, 1), LONG_ANSWER_TOKENS)
    source = case.engine(kv=KvOptions(16, contiguous=True), token_budget=case.tiny.chunk_tokens, max_sequences=2)
    outputs, packed = prefill(source, request)
    answer = [token for output in outputs for token in output.token_ids]
    assert packed[-1][0].end == len(request.token_ids)
    assert not source.has_work
    target = case.engine(kv=KvOptions(48, contiguous=False))
    target.add(other)
    go_on(target, request, {0: answer}, {0: packed})
    computed = [access(target).computed("one", 0)]
    answer += first_token(target, "one")
    source, target = target, case.engine(kv=KvOptions(256, contiguous=True))
    target.add(renamed(other, "again"))
    transfer_kv(source, request, target, {0: answer}, lost={1})
    assert access(target).computed("one", 0) == CUT
    answer += first_token(target, "one")
    source, target = target, case.engine(kv=KvOptions(16, contiguous=False))
    target.add(replace(renamed(request, "before"), sampling=replace(request.sampling, max_tokens=1)))
    finish(target)
    transfer_kv(source, request, target, {0: answer}, lost=range(len(request.token_ids) // 16 * 16 // CUT))
    computed += [access(target).computed("one", 0)]
    assert computed == [len(request.token_ids), len(request.token_ids) + len(answer) - 1]
    assert answer + finish(target)["one"] == case.answer(question, ANSWER_TOKENS)


@pytest.mark.extended
def test_drawn_choices_go_on_in_another_engine(case: Case) -> None:
    """By seed, with the keys and values of one prompt for both."""
    request = case.request("drawn", case.question(9, 2), ANSWER_TOKENS)
    sampling = replace(request.sampling, temperature=0.8, top_p=0.95, seed=7, n=2)
    request = replace(request, sampling=sampling)
    source, target = case.engine(kv=KvOptions(48, contiguous=False)), case.engine(kv=KvOptions(16, contiguous=True))
    source.add(request)
    whole = by_choice(run_out(source))
    begun, packed = prefill(source, request)
    outputs = [*begun, *go_on(target, request, by_choice(begun), dict.fromkeys(range(2), packed)), *run_out(target)]
    assert by_choice(outputs) == whole
    assert whole[0] != whole[1]


@pytest.mark.extended
def test_mixed_requests_are_prefilled_in_one_engine_and_decoded_in_another(case: Case) -> None:
    """Requests are prefilled one after the other, while those before are decoded; a segment of every third is lost."""
    prefills = case.engine(kv=KvOptions(48, contiguous=False), token_budget=4 * case.tiny.chunk_tokens)
    decodes = case.engine(kv=KvOptions(16, contiguous=True))
    outputs: list[EngineOutput] = []
    expected: dict[str, list[int]] = {}
    for number, items in enumerate(MIXED):
        name, question = f"r{number}", case.question(number, items)
        expected[name] = case.answer(question, ANSWER_TOKENS + number)
        request = case.request(name, question, ANSWER_TOKENS + number)
        begun, packed = prefill(prefills, request)
        outputs += begun
        if begun[-1].finish_reason is None:
            lost = (1,) if number % 3 == 0 else ()
            outputs += go_on(decodes, request, {0: begun[-1].token_ids}, {0: packed}, lost=lost)
    assert finish(decodes, outputs) == expected


@usual_families
def test_answers_go_on_from_every_position(case: Case) -> None:
    """In an engine that has computed nothing of them, all at once."""
    question = case.question(8, 2)
    expected = case.answer(question, ANSWER_TOKENS)
    engine = case.engine(max_sequences=4)
    for position in range(len(expected)):
        request = case.request(f"from {position}", question, ANSWER_TOKENS)
        engine.add(replace(request, continued=(ContinuedChoice(0, tuple(expected[:position])),)))
    assert finish(engine) == {f"from {position}": expected[position:] for position in range(len(expected))}


@usual_families
def test_cached_prefixes_do_not_change_answers(case: Case) -> None:
    """The same request again, and one with the same prefix: both may reuse keys and values."""
    question = case.question(4, 2)
    ending = case.with_other_ending(question)
    engine = case.engine()
    request = case.request("first", question, ANSWER_TOKENS)
    for name, asked in (("first", request), ("again", renamed(request, "again"))):
        engine.add(asked)
        assert finish(engine) == {name: case.answer(question, ANSWER_TOKENS)}
    assert engine.prefix_hits_tokens > 0
    engine.add(case.request("ending", ending, ANSWER_TOKENS))
    assert finish(engine) == {"ending": case.answer(ending, ANSWER_TOKENS)}


@pytest.mark.extended
def test_a_prefix_is_reused_only_if_later_tokens_do_not_affect_it(case: Case) -> None:
    """A text prefix before other text, and before an item, which may change its keys and values."""
    if case.tiny.items:
        pytest.skip("there are no prompts without items")
    question = case.question(6, 1)
    plain = (question[0], "ab")
    for order in ((plain, question), (question, plain)):
        engine = case.engine(kv=KvOptions(1))
        for items in order:
            engine.add(case.request("one", items, ANSWER_TOKENS))
            assert finish(engine) == {"one": case.answer(items, ANSWER_TOKENS)}


@usual_families
def test_the_gpu_path_equals_generate_as_far_as_it_runs_on_a_cpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paged attention, and decoding by CUDA graphs where the family supports them."""
    graphs = as_on_cuda(monkeypatch, block_tokens=16)
    questions = {f"r{seed}": case.question(seed, items) for seed, items in enumerate(MIXED[:5])}
    engine = case.engine(kv=KvOptions(contiguous=False))
    outputs: list[EngineOutput] = []
    for name, question in questions.items():
        engine.add(case.request(name, question, ANSWER_TOKENS))
        outputs += engine.step()
    assert finish(engine, outputs) == {
        name: case.answer(question, ANSWER_TOKENS) for name, question in questions.items()
    }
    assert bool(graphs.replayed) == (case.tiny.model_type not in WITHOUT_GRAPHS)


def first_token(engine: TransformersTextEngine, name: str) -> list[int]:
    """A request's next token."""
    while True:
        if found := [token for output in engine.step() if output.request_id == name for token in output.token_ids]:
            return found


def test_every_family_is_tested() -> None:
    assert {tiny.model_type for tiny in TINIES.values()} == set(ADAPTERS)


def run_out(engine: TransformersTextEngine) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def by_choice(outputs: Iterable[EngineOutput]) -> dict[int, list[int]]:
    """The tokens of a single request."""
    found: dict[int, list[int]] = {}
    for output in outputs:
        found.setdefault(output.choice, []).extend(output.token_ids)
    return found
