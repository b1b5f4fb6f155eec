"""LoRA adapters of requests: answers are those of the model that each adapter is merged into."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.engine.loras import ALL, PREFIX, VISION, make_lora, merged
from tests.unit.engine.on_cuda import as_on_cuda
from tests.unit.engine.tiny import (
    Question,
    Reference,
    encoder_engine,
    engine_request,
    greedy,
    info_of,
    random_question,
    run,
    text_config,
    text_engine,
    transformers,
)
from triptych.domain.engine import EngineRequest
from triptych.domain.lora import LoraLimits
from triptych.engine.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from triptych.engine.decoder.setup import KvOptions
from triptych.engine.decoder.text_engine import TransformersTextEngine
from triptych.engine.encoder import TransformersEncoderEngine
from triptych.errors import EngineFailure, InvalidRequest

MAX_TOKENS = 8


class Adapters:
    """Adapters on disk, each with its merged model."""

    def __init__(self, model_dir: Path, root: Path, reference: Reference) -> None:
        self._model_dir, self._root = model_dir, root
        self.decoder = reference.model.model.language_model
        self._made: dict[str, Path] = {}
        self._merged: dict[str, Reference] = {"": reference}

    def make(self, name: str, **options: Any) -> Path:
        if name not in self._made:
            self._made[name] = make_lora(self._root / name, self.decoder, **options)
        return self._made[name]

    def merged(self, name: str) -> Reference:
        if name not in self._merged:
            self._merged[name] = merged(self._model_dir, self._made[name])
        return self._merged[name]


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory, reference: Reference) -> Adapters:
    adapters = Adapters(model_dir, tmp_path_factory.mktemp("loras"), reference)
    for number in range(8):
        targets = ALL if number % 2 == 0 else ("q_proj", "v_proj")
        adapters.make(f"lora-{number}", seed=number, rank=2 + number, targets=targets, use_rslora=number == 3)
    return adapters


def load(engine: TransformersTextEngine, directory: Path) -> str:
    weights = engine.loras.read(directory)
    engine.loras.add(weights)
    return weights.digest


Ask = Callable[[str, Question, str], EngineRequest]


@pytest.fixture
def ask(reference: Reference, encoder: TransformersEncoderEngine) -> Ask:
    def ask(name: str, question: Question, digest: str) -> EngineRequest:
        return replace(engine_request(name, question, reference, encoder, greedy(MAX_TOKENS)), lora=digest)

    return ask


def clear(references: Sequence[Reference], images: int, seed: int) -> Question:
    """A question to which the answers of all references are clear."""
    source = random.Random(seed)
    while True:
        question = random_question(source, images)
        try:
            for reference in references:
                reference.answer(question, MAX_TOKENS)
        except AssertionError:
            continue
        return question


@pytest.mark.parametrize("eager", [False, True], ids=["fused", "plain"])
def test_eight_adapters_and_none_in_one_batch_answer_as_their_merged_models(
    model_dir: Path, adapters: Adapters, ask: Ask, *, eager: bool
) -> None:
    """Prompts come in chunks beside answers, so that most passes mix both, with images and without."""
    engine = text_engine(model_dir, token_budget=24, enforce_eager=eager)
    digests = {"": ""} | {name: load(engine, adapters.make(name)) for name in sorted(adapters._made)}
    expected: dict[str, list[int]] = {}
    for number, (name, digest) in enumerate([*digests.items(), ("", "")]):
        question = clear([adapters.merged(name)], images=number % 2, seed=number)
        expected[f"{number}"] = adapters.merged(name).answer(question, MAX_TOKENS)
        engine.add(ask(f"{number}", question, digest))
    assert run(engine) == expected
    assert len({tuple(answer) for answer in expected.values()}) > len(expected) // 2


def test_an_adapter_of_both_parts_answers_as_the_merged_model(
    model_dir: Path, adapters: Adapters, reference: Reference, tmp_path: Path
) -> None:
    vision = {VISION: reference.model.model.vision_tower}
    lora = make_lora(tmp_path / "both", adapters.decoder, seed=1, targets=("q_proj", "fc1"), encoders=vision)
    whole = merged(model_dir, lora)
    engine, encoder = text_engine(model_dir), encoder_engine(model_dir)
    assert encoder.loras is not None
    encoder.loras.add(encoder.loras.read(lora))
    digest = load(engine, lora)
    question = clear([whole], images=2, seed=3)
    asked = engine_request("asked", question, whole, encoder, greedy(MAX_TOKENS), lora=digest)
    engine.add(replace(asked, lora=digest))
    assert run(engine) == {"asked": whole.answer(question, MAX_TOKENS)}
    assert encoder.loras.nbytes > 0
    before = {
        name.replace("model.model.vision_tower.", "model.vision_tower.vision_model."): matrix
        for name, matrix in load_file(lora / ADAPTER_WEIGHTS).items()
    }
    save_file(
        before, make_lora(tmp_path / "older", adapters.decoder, seed=1, targets=("q_proj", "fc1")) / ADAPTER_WEIGHTS
    )
    assert encoder.loras.read(tmp_path / "older").parts.keys() == encoder.loras.read(lora).parts.keys()
    with pytest.raises(EngineFailure, match="not loaded"):
        encoder_engine(model_dir).encode(
            [encoder.prepare(media, info_of(media).with_lora(digest)) for media in question.images]
        )


def test_a_cached_prefix_of_one_adapter_is_used_by_no_other(model_dir: Path, adapters: Adapters, ask: Ask) -> None:
    engine = text_engine(model_dir)
    names = ["", "lora-0", "lora-1"]
    digests = {name: load(engine, adapters.make(name)) if name else "" for name in names}
    question = clear([adapters.merged(name) for name in names], images=1, seed=5)
    question = Question(" ".join([question.text, *["w7"] * 40]), question.images)
    for turn, expected_hits in (("first", False), ("again", True)):
        for name in names:
            before = engine.prefix_hits_tokens
            engine.add(ask(f"{turn} {name}", question, digests[name]))
            run(engine)
            assert (engine.prefix_hits_tokens > before) == expected_hits, (turn, name)


def test_keys_of_prefixes_differ_by_adapter_and_name_what_moves_between_instances(
    model_dir: Path, adapters: Adapters, ask: Ask
) -> None:
    engine = text_engine(model_dir)
    question = random_question(random.Random(1), 0)
    hashes = set()
    for digest in ("", load(engine, adapters.make("lora-0")), load(engine, adapters.make("lora-1"))):
        engine.add(ask(digest or "none", question, digest))
        assert engine.kv is not None
        hashes.add(engine.kv.prefix_hash(digest or "none", 0, 2))
    assert len(hashes) == 3


@pytest.mark.parametrize("copied", [True, False], ids=["copied", "recomputed"])
def test_a_preempted_sequence_goes_on_with_its_adapter(
    model_dir: Path, adapters: Adapters, ask: Ask, *, copied: bool
) -> None:
    block = 16 * 3 * 2 * 2 * 16 * 4
    engine = text_engine(model_dir, kv_cache_bytes=5 * block, preempted_kv_bytes=1 << 20 if copied else 0)
    expected = {}
    for name in ("lora-0", "", "lora-2"):
        question = clear([adapters.merged(name)], images=0, seed=11)
        words = question.text.split()
        question = Question(" ".join((words * 14)[:14]))
        request = ask(name or "none", question, load(engine, adapters.make(name)) if name else "")
        engine.add(replace(request, sampling=greedy(20, ignore_eos=True)))
        expected[name or "none"] = adapters.merged(name).answer(question, 20, ignore_eos=True)
    assert run(engine) == expected
    assert engine.preemptions


def test_a_decoder_with_a_cache_per_sequence_applies_adapters(
    tmp_path: Path, reference: Reference, encoder: TransformersEncoderEngine
) -> None:
    from tests.unit.engine.tiny import make_model

    kind = transformers.Lfm2Config
    directory = make_model(
        tmp_path / "model",
        text=text_config(kind, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False),
    )
    plain = Reference(directory)
    lora = make_lora(tmp_path / "lora", plain.model.model.language_model, seed=1, targets=("q_proj", "in_proj", "w2"))
    whole = merged(directory, lora)
    engine = text_engine(directory)
    digest = load(engine, lora)
    expected = {}
    for name, model, adapter in (("with", whole, digest), ("without", plain, "")):
        question = clear([model], images=0, seed=3)
        expected[name] = model.answer(question, MAX_TOKENS)
        engine.add(replace(engine_request(name, question, reference, encoder, greedy(MAX_TOKENS)), lora=adapter))
    assert run(engine) == expected


def test_a_removed_adapter_takes_no_memory_and_no_requests(model_dir: Path, adapters: Adapters, ask: Ask) -> None:
    engine = text_engine(model_dir)
    first, second = load(engine, adapters.make("lora-0")), load(engine, adapters.make("lora-2"))
    question = clear([adapters.merged("lora-2")], images=0, seed=2)
    engine.loras.remove(first)
    with pytest.raises(InvalidRequest, match="not loaded"):
        engine.add(ask("gone", question, first))
    engine.add(ask("stays", question, second))
    assert run(engine) == {"stays": adapters.merged("lora-2").answer(question, MAX_TOKENS)}
    engine.loras.remove(second)
    assert engine.loras.nbytes == 0
    assert not any(module._forward_hooks for module in engine.module.modules())


def test_an_adapter_that_finds_no_memory_leaves_nothing(
    model_dir: Path, adapters: Adapters, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = text_engine(model_dir)
    first = load(engine, adapters.make("lora-0"))
    nbytes, second = engine.loras.nbytes, engine.loras.read(adapters.make("lora-2"))
    calls = count()

    def cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if next(calls) == 5:
            raise MemoryError
        return torch.concat(list(tensors))

    with monkeypatch.context() as patched:
        patched.setattr(torch, "cat", cat)
        with pytest.raises(MemoryError):
            engine.loras.add(second)
    assert (engine.loras.digests, engine.loras.nbytes) == (frozenset({first}), nbytes)
    question = clear([adapters.merged("lora-0")], images=0, seed=2)
    engine.add(ask("one", question, first))
    assert run(engine) == {"one": adapters.merged("lora-0").answer(question, MAX_TOKENS)}


def test_requests_without_adapters_stay_in_fused_passes(model_dir: Path, adapters: Adapters, ask: Ask) -> None:
    engine = text_engine(model_dir)
    digest = load(engine, adapters.make("lora-0"))
    assert engine._runner.is_fused  # type: ignore[attr-defined]
    called = 0

    def note(*_: object) -> None:
        nonlocal called
        called += 1

    decoder: Any = engine._adapter.decoder
    decoder.layers[0].self_attn.o_proj.register_forward_pre_hook(note)
    question = clear([adapters.merged(""), adapters.merged("lora-0")], images=0, seed=2)
    engine.add(ask("none", question, ""))
    run(engine)
    assert not called
    engine.add(ask("one", question, digest))
    run(engine)
    assert called


def test_on_a_gpu_passes_without_adapters_are_replayed_and_others_run_eagerly(
    model_dir: Path, adapters: Adapters, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = as_on_cuda(monkeypatch, block_tokens=16)
    engine = text_engine(model_dir, kv=KvOptions(contiguous=False))
    digest = load(engine, adapters.make("lora-0"))
    question = clear([adapters.merged(""), adapters.merged("lora-0")], images=1, seed=4)
    for name, chosen, replays in (("", "", True), ("lora-0", digest, False), ("", "", True)):
        before = graphs.replayed
        engine.add(ask("one", question, chosen))
        assert run(engine) == {"one": adapters.merged(name).answer(question, MAX_TOKENS)}
        assert (graphs.replayed > before) == replays, name
    both = {"with": ("lora-0", digest), "without": ("", "")}
    for request_id, (_, chosen) in both.items():
        engine.add(ask(request_id, question, chosen))
    expected = {
        request_id: adapters.merged(name).answer(question, MAX_TOKENS) for request_id, (name, _) in both.items()
    }
    assert run(engine) == expected


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_made_and_merged_by_peft_gives_the_same_answers(
    model_dir: Path, tmp_path: Path, encoder: TransformersEncoderEngine
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=r".*language_model.*\.(q|k|v|o|gate|up|down)_proj", init_lora_weights=False
    )
    adapted = peft.get_peft_model(Reference(model_dir).model, config)
    adapted.save_pretrained(tmp_path / "lora")
    whole = Reference(model_dir)
    whole.model = peft.PeftModel.from_pretrained(whole.model, tmp_path / "lora").merge_and_unload().eval()
    engine = text_engine(model_dir)
    digest = load(engine, tmp_path / "lora")
    for number in range(4):
        question = clear([whole], images=number % 2, seed=number)
        request = engine_request("one", question, whole, encoder, greedy(MAX_TOKENS))
        engine.add(replace(request, lora=digest))
        assert run(engine) == {"one": whole.answer(question, MAX_TOKENS)}


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"r": 0}, "r is 0"),
        ({"r": 64}, "r is 64, must be from 1 to 16"),
        ({"r": 3}, "does not fit"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"target_modules": ["q_proj", "wo"]}, "target_modules has 'wo'"),
    ],
)
def test_other_variants_and_contradictions_are_refused(
    model_dir: Path, adapters: Adapters, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    engine = text_engine(model_dir, loras=LoraLimits(max_lora_rank=16))
    directory = make_lora(tmp_path / "lora", adapters.decoder, seed=0)
    file = directory / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(InvalidRequest, match=named):
        engine.loras.read(directory)


def test_matrices_that_do_not_fit_the_language_model_are_refused(
    model_dir: Path, adapters: Adapters, tmp_path: Path
) -> None:
    engine = text_engine(model_dir, loras=LoraLimits(max_lora_bytes=1 << 20))
    directory = make_lora(tmp_path / "lora", adapters.decoder, seed=0, targets=("q_proj",))
    file = directory / ADAPTER_WEIGHTS
    matrices = load_file(file)
    first = next(iter(matrices))
    nan = matrices[first].clone()
    nan[0, 0] = torch.nan
    vision = "base_model.model.model.other_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight"
    cases: dict[str, dict[str, torch.Tensor]] = {
        "does not fit": {first: matrices[first]},
        "no linear layer": {name.replace("layers.0", "layers.9"): value for name, value in matrices.items()},
        "no matrix of a layer": matrices | {vision: matrices[first]},
        "lm_head": matrices | {"base_model.model.lm_head.lora_A.weight": matrices[first]},
        "no tensor": {},
        "not finite": matrices | {first: nan},
        "is no linear layer": {
            name.replace("self_attn.q_proj", "rotary_emb.q_proj"): value for name, value in matrices.items()
        },
        "more than 1048576 bytes": matrices | {f"{PREFIX}extra": torch.zeros(1 << 18)},
    }
    for named, changed in cases.items():
        save_file({name: value.contiguous().clone() for name, value in changed.items()}, file)
        with pytest.raises(InvalidRequest, match=named):
            engine.loras.read(directory)


def test_files_that_are_missing_or_cut_off_are_refused(model_dir: Path, adapters: Adapters, tmp_path: Path) -> None:
    engine = text_engine(model_dir)
    directory = make_lora(tmp_path / "lora", adapters.decoder, seed=0)
    weights, config = directory / ADAPTER_WEIGHTS, directory / ADAPTER_CONFIG
    content, described = weights.read_bytes(), config.read_bytes()
    for named, file, changed in (
        ("cut off", weights, content[:-1]),
        ("cut off", weights, content[:20]),
        ("cut off", weights, b""),
        ("adapter_model.safetensors is missing", weights, None),
        ("adapter_config.json is missing", config, None),
        ("no JSON|not a JSON", config, described[:-3]),
    ):
        weights.write_bytes(content)
        config.write_bytes(described)
        if changed is None:
            file.unlink()
        else:
            file.write_bytes(changed)
        with pytest.raises(InvalidRequest, match=named):
            engine.loras.read(directory)


def test_the_digest_is_that_of_the_files(model_dir: Path, adapters: Adapters, tmp_path: Path) -> None:
    engine = text_engine(model_dir)
    directory = make_lora(tmp_path / "lora", adapters.decoder, seed=0)
    before = engine.loras.read(directory).digest
    assert engine.loras.read(directory).digest == before
    make_lora(directory, adapters.decoder, seed=0, lora_alpha=9)
    assert engine.loras.read(directory).digest != before
