"""What every text engine promises whose keys and values can be copied (``ports.KvAccess``), and answers of Triptych's own
that were transferred with the demo model: each is the one of a single engine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.contract.test_continuations import SAMPLING, check_same, of_choices
from tests.contract.test_text_engine import SCHEMA, TWO
from tests.contract.text_engine_kit import (
    Answered,
    Answers,
    ask,
    assert_idle,
    close,
    collect,
    drawn,
    finish,
    greedy,
    no_white_space,
    own,
    request,
    vllm,
)
from tests.e2e.reference import answer, questions
from tests.unit.engine.kv_transfer import CUT, Packed, access, go_on, prefill, transfer_kv
from triptych.domain.engine import EngineRequest
from triptych.domain.kv_segment import KvSegment
from triptych.domain.queue_position import QueuePosition
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.decoder.setup import KvOptions
from triptych.engine.decoder.text_engine import TransformersTextEngine
from triptych.engine.delay import DelayTextEngine, synthetic_decoder_profile
from triptych.policy.costs import Costs
from triptych.ports import TextEngine
from triptych.testing.fakes import FAKE_MODEL, FakeTextEngine
from triptych.testing.model import FakeFamily

pytestmark = pytest.mark.timeout(300)

# --- the contract ----------------------------------------------------------------------------------------------------

PROMPT = tuple(range(20, 70))


def delayed() -> TextEngine:
    profile = synthetic_decoder_profile(step_s=0.0, sequence_s=0.0, prefill_token_s=0.0, load_s=0.0)
    options = EngineOptions(token_budget=16, max_sequences=4)
    return DelayTextEngine(FAKE_MODEL, FakeFamily(), Costs(profile), options, sleep=lambda _: None)


ENGINES: Mapping[str, Callable[[], TextEngine]] = {
    "triptych": lambda: own(token_budget=16, max_sequences=4),
    "fake": lambda: FakeTextEngine(range(20, 60), chunk_tokens=16),
    "delay": delayed,
    "vllm": lambda: vllm("--max-num-batched-tokens 16 --max-num-seqs 4", transfers_kv=True),
}


@pytest.fixture(scope="module", params=ENGINES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[TextEngine, TextEngine]]:
    engines = ENGINES[request.param](), ENGINES[request.param]()
    yield engines
    for engine in engines:
        close(engine)


@pytest.fixture
def source(pair: tuple[TextEngine, TextEngine]) -> Iterator[TextEngine]:
    yield pair[0]
    assert_idle(pair[0])


@pytest.fixture
def target(pair: tuple[TextEngine, TextEngine]) -> Iterator[TextEngine]:
    yield pair[1]
    assert_idle(pair[1])


@pytest.fixture
def asked(request: pytest.FixtureRequest) -> EngineRequest:
    """Of each test another tenant's, so that nothing of it is cached. Draws of vLLM are others when an answer goes on."""
    sampling = greedy(4, ignore_eos=True) if request.node.callspec.params["pair"] == "vllm" else drawn(4)
    return EngineRequest("one", PROMPT, (), sampling, tenant_salt=request.node.name.encode())


def step_while_it_can(engine: TextEngine) -> Answers:
    answers: Answers = {}
    while engine.can_step:
        collect(answers, engine.step())
    return answers


def with_choices(asked: EngineRequest, n: int) -> EngineRequest:
    return replace(asked, sampling=replace(asked.sampling, n=n))


def test_each_choice_pauses_after_its_first_token(asked: EngineRequest, source: TextEngine) -> None:
    source.add(replace(with_choices(asked, 2), pauses=True))
    answers = step_while_it_can(source)
    assert {choice: len(answered.token_ids) for (_, choice), answered in answers.items()} == {0: 1, 1: 1}
    assert [access(source).computed("one", choice) for choice in range(3)] == [len(PROMPT), len(PROMPT), 0]
    assert source.has_work
    assert source.pending_tokens == 0
    assert source.step() == []
    source.cancel("one")


def test_a_paused_answer_holds_up_no_other(asked: EngineRequest, source: TextEngine) -> None:
    source.add(asked)
    source.step()
    access(source).pause("one")
    access(source).pause("unknown")
    source.add(replace(asked, request_id="two"))
    answers = step_while_it_can(source)
    assert len(answers["two", 0].token_ids) == 4
    assert ("one", 0) not in answers
    assert access(source).computed("one", 0) == 16
    source.cancel("one")


@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_goes_on_at_another_engine(
    asked: EngineRequest, source: TextEngine, target: TextEngine, n: int
) -> None:
    asked = with_choices(asked, n)
    whole = of_choices(ask(source, asked), "one")
    outputs, packed = prefill(source, asked)
    begun = {output.choice: list(output.token_ids) for output in outputs}
    assert packed[-1][0].end == len(PROMPT)
    answers: Answers = {}
    collect(answers, go_on(target, asked, begun, dict.fromkeys(begun, packed)))
    assert access(target).computed("one", 0) == len(PROMPT), "only its last token is left"
    while target.has_work:
        collect(answers, target.step())
    check_same(of_choices(answers, "one"), whole, 1)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_what_is_lost_on_the_way_is_computed(
    asked: EngineRequest, source: TextEngine, target: TextEngine, lost: int
) -> None:
    whole = of_choices(ask(source, asked), "one")
    outputs, packed = prefill(source, asked)
    begun = {output.choice: list(output.token_ids) for output in outputs}
    answers: Answers = {}
    collect(answers, go_on(target, asked, begun, {0: packed}, lost=range(lost, 3)))
    collect(answers, target.step())
    while target.has_work:
        collect(answers, target.step())
    check_same(of_choices(answers, "one"), whole, 1)


def test_a_new_request_gets_the_beginning_that_another_one_has_computed(
    asked: EngineRequest, source: TextEngine, target: TextEngine
) -> None:
    """Only the positions in which they differ are computed."""
    other = replace(asked, request_id="other", token_ids=(*PROMPT[: 2 * CUT], 7, 8, 9, 10, 11))
    whole = of_choices(ask(source, other), "other")
    _, packed = prefill(source, asked)
    target.add(replace(other, arriving=2 * CUT))
    assert target.step() == []
    assert access(target).awaiting == {("other", 0)}
    for segment, memory in packed[:2]:
        assert access(target).unpack("other", 0, segment, memoryview(memory))
    access(target).arrived("other")
    computed, new_tokens = access(target).computed("other", 0), len(other.token_ids) - 2 * CUT
    assert 2 * CUT - 16 < computed <= 2 * CUT
    assert target.pending_tokens <= new_tokens + 16 + 4
    check_same(of_choices(finish(target), "other"), whole, 0)


def test_a_request_may_end_while_it_arrives(asked: EngineRequest, source: TextEngine, target: TextEngine) -> None:
    _, packed = prefill(source, asked)
    for number, steps in enumerate((0, 1, 2)):
        name = f"ends-{number}"
        target.add(replace(asked, request_id=name, arriving=len(PROMPT)))
        for _ in range(steps):
            target.step()
            for segment, memory in packed[:2]:
                access(target).unpack(name, 0, segment, memoryview(memory))
            access(target).arrived(name)
        target.cancel(name)
        assert_idle(target)


def test_a_running_answer_goes_on_at_another_engine(
    asked: EngineRequest, source: TextEngine, target: TextEngine
) -> None:
    whole = of_choices(ask(source, asked), "one")
    source.add(asked)
    answers: Answers = {}
    while len(answers.get(("one", 0), Answered()).token_ids) < 3:
        collect(answers, source.step())
    transfer_kv(source, asked, target, {0: answers["one", 0].token_ids})
    assert access(target).computed("one", 0) == len(PROMPT) + 2
    check_same(of_choices(finish(target), "one"), whole, 3)


def test_what_arrives_is_taken_in_order_and_once(asked: EngineRequest, source: TextEngine, target: TextEngine) -> None:
    _, packed = prefill(source, asked)
    (first, memory), (second, other), _ = packed
    target.add(replace(asked, request_id="two", arriving=len(PROMPT)))
    assert not access(target).unpack("two", 0, first, memoryview(memory)), "it has no memory yet"
    target.step()
    assert access(target).awaiting == {("two", 0)}
    assert not access(target).unpack("two", 0, second, memoryview(other)), "nothing is there of what comes before"
    assert access(target).unpack("two", 0, first, memoryview(memory).toreadonly())
    assert access(target).unpack("two", 0, first, memoryview(memory))
    assert access(target).computed("two", 0) == CUT
    assert not access(target).unpack("two", 1, second, memoryview(other))
    assert not access(target).unpack("one", 0, second, memoryview(other))
    access(target).arrived("two")
    access(target).arrived("unknown")
    assert not access(target).unpack("two", 0, second, memoryview(other)), "it awaits nothing any more"
    answers = finish(target)
    assert len(answers["two", 0].token_ids) == 4
    assert not access(target).unpack("two", 0, second, memoryview(other))


def test_only_what_is_computed_is_packed(asked: EngineRequest, source: TextEngine) -> None:
    kind = access(source).kind
    assert kind is not None
    memory = memoryview(bytearray(40 * kind.position_nbytes))

    def packs(positions: int) -> bool:
        segment = KvSegment(kind, 0, positions)
        return access(source).pack("one", 0, segment, memory[: segment.nbytes])

    assert not packs(1)
    source.add(asked)
    packed = [packs(1)]
    source.step()
    packed += [packs(16), packs(17)]
    source.cancel("one")
    packed += [packs(16)]
    assert packed == [False, True, False, False]


def test_hashes_of_beginnings_are_known_at_once_and_equal_in_all_engines(
    asked: EngineRequest, source: TextEngine, target: TextEngine
) -> None:
    assert access(source).prefix_hash("one", 0, 1) is None
    source.add(asked)
    target.add(replace(asked, token_ids=(*PROMPT[:40], 7, 8, 9)))
    pairs = [tuple(access(engine).prefix_hash("one", 0, end) for engine in (source, target)) for end in (1, 16, 40, 41)]
    assert [of_source == of_target for of_source, of_target in pairs] == [True, True, True, False]
    target.cancel("one")
    target.add(replace(asked, tenant_salt=b"another"))
    assert access(source).prefix_hash("one", 0, 16) != access(target).prefix_hash("one", 0, 16)
    assert access(source).prefix_hash("one", 1, 16) is None
    for engine in (source, target):
        engine.cancel("one")


# --- answers of Triptych's engine ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prefills() -> TransformersTextEngine:
    return own(KvOptions(16, contiguous=True), token_budget=40)


@pytest.fixture(scope="module", params=[(48, False), (256, True), (16, False)], ids=str)
def decodes(request: pytest.FixtureRequest) -> TransformersTextEngine:
    block_tokens, contiguous = request.param
    return own(KvOptions(block_tokens, contiguous=contiguous))


def prefilled(engine: TransformersTextEngine, asked: EngineRequest) -> tuple[Answers, Packed]:
    answers: Answers = {}
    outputs, packed = prefill(engine, asked)
    collect(answers, outputs)
    return answers, packed


def rest(
    engine: TransformersTextEngine, asked: EngineRequest, begun: Answers, packed: Packed, *, lost: Sequence[int] = ()
) -> dict[int, Answered]:
    """The answers' ends, from another engine."""
    going = {
        choice: answered.token_ids
        for choice, answered in of_choices(begun, asked.request_id).items()
        if answered.reason is None
    }
    answers: Answers = {}
    collect(answers, go_on(engine, asked, going, dict.fromkeys(going, packed), lost=lost))
    while engine.has_work:
        collect(answers, engine.step())
    return of_choices(answers, asked.request_id)


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_a_kv_transferred_answer_is_that_of_one_engine(
    prefills: TransformersTextEngine, decodes: TransformersTextEngine, sampling: Any
) -> None:
    asked = request("one", TWO, sampling)
    whole = of_choices(ask(prefills, asked), "one")
    begun, packed = prefilled(prefills, asked)
    check_same(rest(decodes, asked, begun, packed), whole, 1)


def test_answers_in_a_response_format_are_kv_transferred(
    prefills: TransformersTextEngine, decodes: TransformersTextEngine
) -> None:
    sampling = drawn(100, seed=0, n=2, ignore_eos=False, logit_bias=no_white_space())
    asked = request("one", TWO, sampling, schema=SCHEMA)
    assert asked.grammar is not None
    whole = of_choices(ask(prefills, replace(asked, grammar=asked.grammar.fork())), "one")
    begun, packed = prefilled(prefills, asked)
    check_same(rest(decodes, asked, begun, packed), whole, 1)


def test_sixteen_mixed_requests_go_from_engine_to_engine(
    prefills: TransformersTextEngine, decodes: TransformersTextEngine
) -> None:
    asked = {f"r{number}": question for number, question in enumerate(questions((0, 1, 2, 8), 16))}
    answers: Answers = {}
    for number, (name, question) in enumerate(asked.items()):
        outputs, packed = prefill(prefills, request(name, question))
        collect(answers, outputs)
        if answers[name, 0].reason is None:
            lost = [1] if number % 3 == 0 else []
            begun = {0: answers[name, 0].token_ids}
            collect(answers, go_on(decodes, request(name, question), begun, {0: packed}, lost=lost))
    while decodes.has_work:
        collect(answers, decodes.step())
    assert_idle(prefills)
    assert_idle(decodes)
    for name, question in asked.items():
        assert tuple(answers[name, 0].token_ids) == answer(question).token_ids, question


@pytest.mark.parametrize("copied", [0, None], ids=["recomputed", "copied"])
def test_what_has_been_kv_transferred_can_be_preempted(prefills: TransformersTextEngine, copied: int | None) -> None:
    """While it arrives, and while it runs: others that go before it take its memory."""
    kind = access(prefills).kind
    assert kind is not None
    asked = request("one", TWO, greedy(60, ignore_eos=True))
    whole = of_choices(ask(prefills, asked), "one")
    begun, packed = prefilled(prefills, asked)
    prompt = len(asked.token_ids)
    for runs in (True, False):
        engine = own(
            KvOptions(16, contiguous=False),
            kv_cache_bytes=(2 * prompt + 48) * kind.position_nbytes,
            preempted_kv_bytes=copied,
        )
        engine.add(
            replace(
                request("first", TWO, greedy(prompt + 40, ignore_eos=True)), queue_position=QueuePosition(-1, 0.0, 0)
            )
        )
        engine.step()
        answers: Answers = {}
        if runs:
            going = {0: begun["one", 0].token_ids}
            collect(answers, go_on(engine, asked, going, {0: packed}))
        else:
            engine.add(replace(asked, arriving=prompt))
            while not engine.preemptions:
                collect(answers, engine.step())
                for segment, memory in packed[:1]:
                    access(engine).unpack("one", 0, segment, memoryview(memory))
            assert not access(engine).awaiting
        while engine.has_work:
            collect(answers, engine.step())
        assert engine.preemptions
        check_same(of_choices(answers, "one"), whole, int(runs))
