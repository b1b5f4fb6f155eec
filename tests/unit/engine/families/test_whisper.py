"""Specifics of Whisper; its answers are tested with the other families."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.integration.families.clips import RATE_HZ, samples_of
from tests.integration.families.harness import Case, Encoded, Item, Question, finish, message_of
from tests.integration.families.tiny_whisper import TinyWhisper
from tests.unit.engine.tiny import encoder_engine, text_engine, transformers
from triptych.domain.embedding import DType, Tensor, TensorSpec
from triptych.domain.engine import EmbeddingInput, EngineRequest, TokenGrammar
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import open_checkpoint
from triptych.errors import InvalidRequest
from triptych.families.model_files import BadModel, ModelFiles
from triptych.tokens.prompt import PromptBuilder

pytestmark = pytest.mark.timeout(180)

TOKENS = 12
PROMPT = ("<|startoftranscript|>", "<|fr|>", "<|transcribe|>", "<|notimestamps|>")
"""Tokens that ``generate`` finds for itself or is given; the second may be another language."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = tmp_path_factory.mktemp("whisper")
    tiny = TinyWhisper()
    tiny.make(directory)
    encoder = encoder_engine(directory)

    def encode(_: Path, items: Any) -> list[Encoded]:
        prepared = [encoder.prepare(item.media, item.info) for item in items]
        return [
            (features.tokens, tuple((tensor.spec, bytes(tensor.data)) for tensor in tensors))
            for features, tensors in zip(prepared, encoder.encode(prepared), strict=True)
        ]

    return Case(tiny, directory, encode)


def a_clip(case: Case, seed: int) -> Item:
    return case.tiny.item(random.Random(seed), Modality.AUDIO)


def prompt_of(builder: PromptBuilder, question: Question) -> list[str]:
    infos = [part.info for part in question if isinstance(part, Item)]
    ids = builder.build([message_of(question)], builder.family.together(infos)).token_ids  # type: ignore[attr-defined]
    return [builder.tokenizer.id_to_token(token_id) or "" for token_id in ids]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "", PROMPT[:1]),
        ("", "fr", PROMPT),
        ("", "  en translate\n", (PROMPT[0], "<|en|>", "<|translate|>", PROMPT[3])),
        (" ab\n", "fr", ("<|startofprev|>", "Ġa", "b", *PROMPT)),
    ],
)
def test_text_before_a_clip_is_context_and_text_after_it_names_language_and_task(
    case: Case, before: str, after: str, expected: tuple[str, ...]
) -> None:
    assert prompt_of(case.builder, (before, a_clip(case, 1), after)) == list(expected)


@pytest.mark.parametrize("after", ["Transcribe this.", "xx", "fr sing", "fr translate now"])
def test_other_text_after_a_clip_is_refused(case: Case, after: str) -> None:
    with pytest.raises(InvalidRequest, match="a language of the model and a task, as in 'fr' or 'fr translate'"):
        prompt_of(case.builder, (a_clip(case, 1), after))


def test_prompts_of_an_english_only_model_name_no_language(case: Case) -> None:
    files = ModelFiles.load(case.directory)
    builder = PromptBuilder.load(
        replace(files, generation_config={**files.generation_config, "is_multilingual": False})
    )
    assert prompt_of(builder, (a_clip(case, 1),)) == [PROMPT[0], PROMPT[3]]
    with pytest.raises(InvalidRequest, match="after the clip"):
        prompt_of(builder, (a_clip(case, 1), "fr"))


def request_of(case: Case, clip: Item) -> EngineRequest:
    """A request that leaves the language to the model."""
    prompt = case.builder.build([message_of((clip,))], [clip.info])
    ((tokens, tensors),) = case.encode(case.directory, [clip])
    made = {spec.name: Tensor(spec, memoryview(data)) for spec, data in tensors}
    sampling = SamplingParams(temperature=0, max_tokens=3 + TOKENS, seed=0)
    return EngineRequest("one", prompt.token_ids, (EmbeddingInput(0, tokens, made, clip.key),), sampling)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_language_is_found_like_generate_finds_it(case: Case, seed: int) -> None:
    clip = a_clip(case, seed)
    engine = case.engine()
    engine.add(request_of(case, clip))
    answer = finish(engine)["one"]
    whole = transformers.WhisperForConditionalGeneration.from_pretrained(case.directory, dtype=torch.float32).eval()
    extractor = case.tiny.load_processor(case.directory).feature_extractor
    spectrum = extractor(samples_of([clip]), sampling_rate=RATE_HZ, return_tensors="pt")["input_features"]
    out = whole.generate(
        spectrum, task="transcribe", max_new_tokens=TOKENS, do_sample=False, return_dict_in_generate=True
    )
    start, *expected = out.sequences[0].tolist()
    assert [start] == list(request_of(case, clip).token_ids)
    assert answer == expected
    assert [case.builder.tokenizer.id_to_token(token_id) for token_id in answer[1:3]] == [*PROMPT[2:]]


def test_answers_follow_no_grammar_of_a_request(case: Case) -> None:
    request = replace(request_of(case, a_clip(case, 1)), grammar=mock.Mock(spec=TokenGrammar))
    with pytest.raises(InvalidRequest, match="a form of their own"):
        case.engine().add(request)


def test_tensors_of_another_shape_are_refused(case: Case) -> None:
    engine = case.engine()
    states = TensorSpec("states", DType.F32, (500, 64))
    assert engine.accepts(1, [states])
    refused: list[tuple[int, list[TensorSpec]]] = [
        (500, [states]),
        (1, []),
        (1, [states, states]),
        (1, [replace(states, name="embeds")]),
        (1, [replace(states, dtype=DType.F16)]),
        (1, [replace(states, shape=(499, 64))]),
    ]
    for tokens, tensors in refused:
        assert not engine.accepts(tokens, tensors), tensors


def test_languages_without_tokens_of_tasks_are_refused(case: Case, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(case.directory, tmp_path / "copy"))
    generation = json.loads((copy / "generation_config.json").read_text())
    del generation["no_timestamps_token_id"]
    (copy / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(BadModel, match="no_timestamps_token_id"):
        text_engine(copy)


def test_costs_of_the_encoder_depend_on_the_layers_of_the_encoder(case: Case, tmp_path: Path) -> None:
    """All sizes are in one section of the configuration."""
    copy = Path(shutil.copytree(case.directory, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "encoder_layers": 9}))
    digests = {open_checkpoint(directory).part_digest(ModelPart.ENCODER) for directory in (case.directory, copy)}
    assert len(digests) == 2
