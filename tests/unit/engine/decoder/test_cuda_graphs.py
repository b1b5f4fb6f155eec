"""Decoding by CUDA graphs: filled buffers, padding rows, and models that cannot be captured.

Without a GPU: see ``on_cuda``. Answers of every family by graphs are tested in ``tests/integration/families``.
"""

import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.engine.on_cuda import as_on_cuda
from tests.unit.engine.tiny import (
    Reference,
    engine_request,
    greedy,
    make_model,
    random_question,
    run,
    text_config,
    text_engine,
)
from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.domain.sampling import SamplingParams
from triptych.engine.decoder import cuda_graphs, setup
from triptych.engine.decoder.setup import KvOptions
from triptych.engine.encoder import TransformersEncoderEngine

BLOCK_TOKENS = 8
SCATTERED = KvOptions(contiguous=False)


def text_requests(count: int, answer_tokens: int = 12) -> list[EngineRequest]:
    prompts = (tuple(4 + (7 * n + at) % 100 for at in range(3 + 5 * n)) for n in range(count))
    return [
        EngineRequest(f"r{n}", prompt, (), greedy(answer_tokens, ignore_eos=True)) for n, prompt in enumerate(prompts)
    ]


@pytest.mark.slow
def test_answers_equal_generate_for_any_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path, reference: Reference, encoder: TransformersEncoderEngine
) -> None:
    """Requests come and go, so that steps have one to nine rows; image prefills precede the decodes."""
    graphs = as_on_cuda(monkeypatch, block_tokens=BLOCK_TOKENS)
    questions = {f"r{seed}": random_question(random.Random(seed), (0, 1, 2, 0)[seed % 4]) for seed in range(9)}
    engine = text_engine(model_dir, max_sequences=9, kv=SCATTERED)
    outputs: list[EngineOutput] = []
    for name, question in questions.items():
        engine.add(engine_request(name, question, reference, encoder, greedy(24, ignore_eos=True)))
        outputs += engine.step()
    assert run(engine, outputs) == {
        name: reference.answer(question, 24, ignore_eos=True) for name, question in questions.items()
    }
    assert graphs.captured == len((1, 2, 4, 8, 9)) + len((16, 32, 64))
    assert graphs.replayed >= 20


def test_prompts_are_replayed_as_well_up_to_512_rows(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    """In part, whole, and beside decodes; what is larger runs eagerly."""
    graphs = as_on_cuda(monkeypatch, block_tokens=BLOCK_TOKENS)
    engine = text_engine(model_dir, token_budget=1024, kv=SCATTERED)
    assert graphs.captured == len((1, 2, 4, 8, 16)) + len((16, 32, 64, 128, 256, 512))
    long = [EngineRequest(f"long {n}", tuple(4 + (n + at) % 100 for at in range(300)), (), greedy(4)) for n in range(3)]
    for requests, replayed in (([long[0]], 1), (text_requests(3), 1), ([], 1), (long[1:], 0), ([], 1)):
        before = graphs.replayed
        for request in requests:
            engine.add(replace(request, request_id=f"{request.request_id} {before}"))
        assert engine.step()
        assert graphs.replayed - before == replayed


def test_one_sequence_may_need_all_programs_of_a_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With five heads to a key head, a program has twelve rows, whose products leave four of 64 rows unused."""
    sizes = text_config(hidden_size=80, num_attention_heads=5, num_key_value_heads=1, max_position_embeddings=1024)
    directory = make_model(tmp_path, text=sizes)
    request = EngineRequest("one", tuple(4 + at % 100 for at in range(511)), (), greedy(4, ignore_eos=True))
    answers = []
    for on_cuda in (False, True):
        with monkeypatch.context() as patch:
            graphs = as_on_cuda(patch, block_tokens=BLOCK_TOKENS) if on_cuda else None
            engine = text_engine(directory, max_sequences=1, token_budget=512, kv=SCATTERED)
            before = 0 if graphs is None else graphs.replayed
            engine.add(request)
            answers.append(run(engine))
            assert graphs is None or graphs.replayed - before == 4
    assert answers[0] == answers[1]


def test_graphs_can_be_captured_again_after_any_pass(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    """The passes that capture runs must not be those of the last prompt, which may have had more rows."""
    graphs = as_on_cuda(monkeypatch, block_tokens=BLOCK_TOKENS)
    engine = text_engine(model_dir, max_sequences=4, token_budget=512, kv=SCATTERED)
    captured, answers = graphs.captured, []
    for number in range(2):
        prompt = tuple(4 + (number + at) % 100 for at in range(400))
        engine.add(EngineRequest(f"long {number}", prompt, (), greedy(2, ignore_eos=True)))
        run(engine)
        engine._runner.weights_moved()
        engine.add(EngineRequest("short", tuple(range(4, 20)), (), greedy(12, ignore_eos=True)))
        answers.append(run(engine))
    assert graphs.captured == 3 * captured
    assert answers[0] == answers[1]
    graphs.refuse = True
    engine._runner.weights_moved()
    engine.add(EngineRequest("short", tuple(range(4, 20)), (), greedy(12, ignore_eos=True)))
    assert run(engine) == answers[0]


@pytest.mark.slow
@pytest.mark.parametrize("token_budget", [2, 8, 20, 32, 40])
def test_small_token_budgets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token_budget: int) -> None:
    """With one head to a key head, a pass of 16 rows needs more programs than one of 32."""
    directory = make_model(tmp_path, text=text_config(num_key_value_heads=4))
    answers = []
    for on_cuda in (False, True):
        with monkeypatch.context() as patch:
            graphs = as_on_cuda(patch, block_tokens=BLOCK_TOKENS) if on_cuda else None
            engine = text_engine(directory, max_sequences=2, token_budget=token_budget, kv=SCATTERED)
            assert graphs is None or graphs.captured
            for request in text_requests(6):
                engine.add(request)
            answers.append(run(engine))
    assert answers[0] == answers[1]


def test_kernels_that_do_not_compile_are_not_used(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*memory: object, **options: object) -> None:
        raise RuntimeError("out of resource: shared memory")

    graphs = as_on_cuda(monkeypatch, block_tokens=BLOCK_TOKENS)
    monkeypatch.setattr(setup, "compile_kernels", refuse)
    engine = text_engine(model_dir)
    assert "paged attention cannot be compiled" in caplog.text
    assert not graphs.captured
    for request in text_requests(3):
        engine.add(request)
    found = run(engine)
    monkeypatch.undo()
    engine = text_engine(model_dir)
    for request in text_requests(3):
        engine.add(request)
    assert found == run(engine)


def test_passes_that_do_not_compile_are_captured_as_they_are(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(decoder: object) -> None:
        raise RuntimeError("there is no compiler")

    graphs = as_on_cuda(monkeypatch, block_tokens=BLOCK_TOKENS)
    monkeypatch.setattr(cuda_graphs, "_compiled", refuse)
    text_engine(model_dir, compile_passes=True)
    assert "passes cannot be compiled" in caplog.text
    assert graphs.captured


@pytest.mark.slow
def test_preempted_sequences_and_shared_blocks_give_the_same_answers(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path
) -> None:
    requests = text_requests(6, 40)
    sampled = SamplingParams(temperature=1.5, seed=11, max_tokens=20, ignore_eos=True, n=3, frequency_penalty=0.4)
    requests += [EngineRequest(f"s{n}", tuple(range(4, 24)), (), sampled) for n in range(2)]
    answers = []
    for on_cuda, room in ((False, 4 << 20), (True, 4 << 20), (True, 300_000)):
        with monkeypatch.context() as patch:
            graphs = as_on_cuda(patch, block_tokens=BLOCK_TOKENS) if on_cuda else None
            engine = text_engine(model_dir, kv_cache_bytes=room, kv=SCATTERED)
            for request in requests:
                engine.add(request)
            choices = dict[tuple[str, int], tuple[int, ...]]()
            while engine.has_work:
                for output in engine.step():
                    assert output.error is None
                    told = choices.get((output.request_id, output.choice), ())
                    choices[output.request_id, output.choice] = told + output.token_ids
            answers.append(choices)
            assert graphs is None or graphs.replayed
            assert bool(engine.preemptions) == (room < 1 << 20)
            assert engine.kv_free_tokens == engine.kv_tokens
    assert answers[0] == answers[1] == answers[2]


def test_a_sequence_may_fill_the_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With blocks allocated ahead, it ends up with more of them than the context needs."""
    directory = make_model(tmp_path, text=text_config(max_position_embeddings=4 * BLOCK_TOKENS))
    answers = []
    for on_cuda in (False, True):
        with monkeypatch.context() as patch:
            if on_cuda:
                as_on_cuda(patch, block_tokens=BLOCK_TOKENS)
            engine = text_engine(
                directory, max_sequences=2, token_budget=32, kv=KvOptions(BLOCK_TOKENS, contiguous=False)
            )
            engine.add(EngineRequest("long", tuple(range(4, 12)), (), greedy(3 * BLOCK_TOKENS, ignore_eos=True)))
            answers.append(run(engine))
    assert answers[0] == answers[1]
    assert len(answers[0]["long"]) == 3 * BLOCK_TOKENS


def test_a_decoder_that_cannot_be_captured_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = []
    for refuse in (False, True):
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            graphs = as_on_cuda(patch, block_tokens=BLOCK_TOKENS)
            graphs.refuse = refuse
            engine = text_engine(model_dir)
            assert ("cannot be captured" in caplog.text) == refuse
            for request in text_requests(3):
                engine.add(request)
            answers.append(run(engine))
            assert bool(graphs.replayed) != refuse
    assert answers[0] == answers[1]


def test_eager_mode_can_be_chosen(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    graphs = as_on_cuda(monkeypatch, block_tokens=BLOCK_TOKENS)
    engine = text_engine(model_dir, enforce_eager=True)
    whole = engine.kv_tokens
    engine.add(text_requests(1)[0])
    run(engine)
    assert (graphs.captured, graphs.replayed) == (0, 0)
    assert whole == text_engine(model_dir).kv_tokens + BLOCK_TOKENS, "a spare block is taken from the prefix cache"
