"""Items that are lost on their way into vLLM: their request fails, and nothing else."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.utils import strip_covered_mm_data
from vllm.usage.usage_lib import is_usage_stats_enabled

from tests.contract.text_engine_kit import ENGINES, Answers, ask, ask_one, assert_idle, collect, drawn, greedy, request
from tests.e2e.reference import Question, answer
from triptych.demo import MODEL_ID
from triptych.domain.embedding import EMBEDS
from triptych.engine.request_checks import check_request
from triptych.errors import EngineFailure, InstanceLost, InvalidRequest
from triptych.integrations.vllm.engine import VllmTextEngine
from triptych.integrations.vllm.items import HeldItems, Item

pytestmark = pytest.mark.timeout(300)

OTHERS = 100
LOST = Question("What digits are shown?", ("3_a", "7_b"))
TWO = Question("What digits are shown?", ("4_a", "9_b"))


@pytest.fixture(scope="module")
def loaded() -> Iterator[VllmTextEngine]:
    engine = ENGINES["vllm"]()
    assert isinstance(engine, VllmTextEngine)
    yield engine
    engine.close()


@pytest.fixture
def engine(loaded: VllmTextEngine) -> Iterator[VllmTextEngine]:
    yield loaded
    assert_idle(loaded)
    assert len(loaded._items) == 0
    assert loaded.embedding_nbytes == 0


def finish(engine: VllmTextEngine, answers: Answers) -> Answers:
    while engine.has_work:
        collect(answers, engine.step())
    return answers


def test_the_engine_has_no_vision_encoder(engine: VllmTextEngine) -> None:
    model = engine._engine.model_executor.driver_worker.model_runner.model
    names = [name for name, _ in model.named_parameters()]
    assert names
    assert not [name for name in names if "vision" in name or "projector" in name or "visual" in name]


def test_an_item_that_is_gone_fails_its_request_and_a_hundred_others_succeed(engine: VllmTextEngine) -> None:
    engine.add(request("lost", LOST, tenant_salt=b"lost"))
    asked = [TWO if number % 5 == 0 else Question("Hello!") for number in range(OTHERS)]
    for number, question in enumerate(asked):
        engine.add(request(f"r{number}", question))
    engine._items.drop(engine._choices.by_name["lost/0"].vllm_id)
    answers = finish(engine, {})
    assert isinstance(answers["lost", 0].error, EngineFailure)
    for number, question in enumerate(asked):
        assert tuple(answers[f"r{number}", 0].token_ids) == answer(question).token_ids
    assert tuple(ask_one(engine, request("again", LOST)).token_ids) == answer(LOST).token_ids


def test_an_item_that_vanishes_between_check_and_load_is_used_all_the_same(
    engine: VllmTextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step has checked is taken at that moment."""
    connector = engine._scheduler.get_ec_connector()
    check = connector.ensure_cache_available

    def then_vanish(request: object, computed: int) -> bool:
        there = check(request, computed)
        connector.items = HeldItems()
        return bool(there)

    engine.add(request("one", LOST, tenant_salt=b"vanishes"))
    monkeypatch.setattr(connector, "ensure_cache_available", then_vanish)
    answers: Answers = {}
    collect(answers, engine.step())
    monkeypatch.undo()
    connector.items = engine._items
    assert tuple(finish(engine, answers)["one", 0].token_ids) == answer(LOST).token_ids


def test_an_item_that_vanishes_while_its_prompt_is_computed_fails_its_request_only(engine: VllmTextEngine) -> None:
    """A preempted request needs its items again."""
    engine.add(request("lost", LOST, greedy(30, ignore_eos=True), tenant_salt=b"preempted"))
    engine.add(request("other", TWO, greedy(30)))
    answers: Answers = {}
    collect(answers, engine.step())
    preempted = engine._scheduler.requests[engine._choices.by_name["lost/0"].vllm_id]
    engine._scheduler.running.remove(preempted)
    engine._scheduler._preempt_request(preempted, 0.0)
    engine._items.drop(preempted.request_id)
    finish(engine, answers)
    assert isinstance(answers["lost", 0].error, EngineFailure)
    assert tuple(answers["other", 0].token_ids) == answer(TWO).token_ids


def test_an_item_is_passed_to_the_worker_once_while_its_cache_has_it(
    engine: VllmTextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = engine._scheduler.get_ec_connector()
    build, loads = connector.build_connector_meta, list[str]()

    def counted(output: object) -> object:
        made = build(output)
        loads.extend(made.by_identifier)
        return made

    monkeypatch.setattr(connector, "build_connector_meta", counted)
    fresh = Question("What digits are shown?", ("6_c", "6_c", "8_c"))
    answers = ask(engine, *(request(f"r{number}", fresh, tenant_salt=bytes([number])) for number in range(4)))
    assert {tuple(answered.token_ids) for answered in answers.values()} == {answer(fresh).token_ids}
    assert len(loads) == len(set(loads)) == 2


def test_vllm_keeps_what_positions_need_for_items_that_the_prefix_cache_covers(
    engine: VllmTextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else of them is dropped."""
    grid = torch.tensor([1, 4, 4])
    monkeypatch.setattr(engine._features, "_fields", lambda *_: ("image", {"grid": grid}))
    asked = request("one", TWO)
    positions = check_request(asked, engine._limits).positions
    features = [item.feature for item in engine._features.place(asked, positions)]
    covered = strip_covered_mm_data(features, num_computed_tokens=1000, uses_mrope=True)
    assert [set(feature.data) for feature in covered] == [{"grid"}] * 2


@pytest.mark.parametrize("rows", [(17, 16), (16, 17)])
def test_an_item_with_places_of_two_lengths_fails_its_request(engine: VllmTextEngine, rows: tuple[int, int]) -> None:
    """A step with the longer place alone would end the engine. Clients of ``vllm serve`` name items themselves."""
    connector = engine._scheduler.get_ec_connector()
    connector.items.hold("hostile", [Item("k", torch.zeros(16, 128))])
    features = [
        SimpleNamespace(identifier="k", mm_position=PlaceholderRange(offset=100 * number, length=length))
        for number, length in enumerate(rows)
    ]
    hostile = SimpleNamespace(request_id="hostile", mm_features=features)
    assert not connector.ensure_cache_available(hostile, 0)
    assert connector.take_unavailable_requests() == {"hostile"}
    connector.items.drop("hostile")


def test_a_cancelled_request_lets_go_of_its_items_at_once(engine: VllmTextEngine) -> None:
    engine.add(request("one", LOST, greedy(30, n=2)))
    assert len(engine._items) == 2
    assert engine.embedding_nbytes == sum(
        given.tensors[EMBEDS].spec.nbytes for given in request("one", LOST).embeddings
    )
    engine.cancel("one", 0)
    assert len(engine._items) == 2
    engine.cancel("one")
    assert len(engine._items) == 0


def test_an_image_of_two_requests_outlives_the_one_that_is_cancelled(engine: VllmTextEngine) -> None:
    twice = Question("What digits are shown?", ("2_b", "2_b"))
    engine.add(request("gone", twice, greedy(30), tenant_salt=b"gone"))
    engine.add(request("stays", twice, tenant_salt=b"stays"))
    answers: Answers = {}
    collect(answers, engine.step())
    engine.cancel("gone")
    assert tuple(finish(engine, answers)["stays", 0].token_ids) == answer(twice).token_ids


def test_a_step_that_fails_ends_the_engine(engine: VllmTextEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("secret")

    engine.add(request("one", TWO))
    with monkeypatch.context() as patch:
        patch.setattr(engine._engine, "step", fail)
        with pytest.raises(InstanceLost, match=r"^the engine has failed: RuntimeError: secret$"):
            engine.step()
    with pytest.raises(InstanceLost):
        engine.step()
    engine.cancel("one")
    engine._has_failed = False


def test_a_cancellation_that_fails_within_vllm_shows_in_the_next_step(
    engine: VllmTextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("secret")

    engine.add(request("one", TWO))
    with monkeypatch.context() as patch:
        patch.setattr(engine._engine, "step", fail)
        engine.cancel("one")
    with pytest.raises(InstanceLost):
        engine.step()
    engine._has_failed = False


@pytest.mark.parametrize("refused", [0, 1])
def test_a_request_that_vllm_refuses_leaves_nothing_behind(
    engine: VllmTextEngine, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    add, added = engine._engine.engine_core.add_request, list[object]()

    def refuse(asked: object) -> None:
        added.append(asked)
        if len(added) > refused:
            raise ValueError("refused by vLLM")
        add(asked)

    with monkeypatch.context() as patch:
        patch.setattr(engine._engine.engine_core, "add_request", refuse)
        with pytest.raises(ValueError, match="refused by vLLM"):
            engine.add(request("one", TWO, drawn(n=2), schema={"const": 7}))
    assert_idle(engine)
    assert not engine._grammars._named
    assert not engine._engine.has_unfinished_requests()
    assert tuple(ask_one(engine, request("one", TWO)).token_ids) == answer(TWO).token_ids


def test_images_without_identity_share_nothing_even_under_one_id(engine: VllmTextEngine) -> None:
    for question in (Question(LOST.text, ("1_c", "2_c")), Question(LOST.text, ("3_c", "4_c"))):
        asked = request("one", question)
        nameless = replace(asked, embeddings=tuple(replace(embedding, key=b"") for embedding in asked.embeddings))
        assert tuple(ask_one(engine, nameless).token_ids) == answer(question).token_ids


def test_metrics_do_not_show_what_was_cancelled(engine: VllmTextEngine) -> None:
    def shown() -> dict[str, float]:
        gauges = {family.name: family.samples[0].value for family in engine.metrics() if family.type == "gauge"}
        return {name: gauges[f"vllm:{name}"] for name in ("num_requests_running", "kv_cache_usage_perc")}

    engine.add(request("one", TWO, greedy(30, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    assert shown()["num_requests_running"] == 1
    engine.cancel("one")
    assert shown() == {"num_requests_running": 0, "kv_cache_usage_perc": 0}


def test_nothing_is_reported_to_the_authors_of_vllm(engine: VllmTextEngine) -> None:
    assert not is_usage_stats_enabled()


def test_the_metrics_are_those_of_vllm(engine: VllmTextEngine) -> None:
    ask_one(engine, request("one", TWO))
    families = {family.name: family for family in engine.metrics()}
    assert {name.partition(":")[0] for name in families} == {"vllm"}
    (prompts,) = (sample for sample in families["vllm:prompt_tokens"].samples if sample.name.endswith("_total"))
    assert prompts.labels == {"engine": "0", "model_name": MODEL_ID}
    assert prompts.value >= len(request("one", TWO).token_ids)


def test_an_item_larger_than_the_encoder_cache_is_refused(
    engine: VllmTextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._features, "_largest_item", 15)
    with pytest.raises(InvalidRequest, match="16 tokens, vLLM's encoder cache takes 15"):
        engine.add(request("one", TWO))
