"""Fused layers: the same answers as the layers that they stand in for, or these."""

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine.tiny import (
    Reference,
    encoder_engine,
    engine_request,
    greedy,
    make_model,
    random_question,
    run,
    text_config,
    text_engine,
    transformers,
)
from triptych.engine import cpu_kernels, prompt_kernel
from triptych.engine.decoder import fused_layers
from triptych.engine.decoder.packed_runner import PackedModelRunner
from triptych.engine.decoder.setup import KvOptions
from triptych.engine.decoder.text_engine import TransformersTextEngine

pytestmark = pytest.mark.slow

FUSED: dict[str, Callable[[], Any]] = {
    "llama": lambda: text_config(transformers.LlamaConfig),
    "windows": lambda: text_config(transformers.MistralConfig, sliding_window=12),
    "normalized heads": lambda: text_config(transformers.Qwen3Config, head_dim=16),
    "some windows": lambda: text_config(
        transformers.Qwen2Config,
        sliding_window=12,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
KERNELS: list[Any] = [
    cpu_kernels.rms_norm,
    cpu_kernels.add_rms_norm,
    cpu_kernels.silu_times,
    cpu_kernels.rotate_and_store,
    cpu_kernels.attend,
    cpu_kernels.few_rows_product,
    cpu_kernels.best_tokens,
    prompt_kernel.attend_prompt,
    prompt_kernel.rows_per_block,
]
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
OTHERS: dict[str, Callable[[], Any]] = {
    "gemma": lambda: text_config(transformers.Gemma3TextConfig, head_dim=16),
    "gelu": lambda: text_config(transformers.LlamaConfig, hidden_act="gelu"),
    "multipliers": lambda: text_config(transformers.GraniteConfig, residual_multiplier=0.5),
    "parts of heads": lambda: text_config(transformers.Phi3Config, rope_parameters=PARTIAL),
}


def is_fused(engine: TransformersTextEngine) -> bool:
    runner = engine._runner
    assert isinstance(runner, PackedModelRunner)
    return runner.is_fused


@pytest.mark.parametrize("kv", [KvOptions(4, contiguous=True), KvOptions(4, contiguous=False)], ids=["run", "pieces"])
@pytest.mark.parametrize("name", FUSED)
def test_answers_are_the_same(name: str, kv: KvOptions, tmp_path: Path) -> None:
    """Together, in chunks, and again with cached prefixes."""
    directory = make_model(tmp_path, text=FUSED[name]())
    reference, encoder = Reference(directory), encoder_engine(directory)
    questions = {f"r{seed}": random_question(random.Random(seed), seed % 3) for seed in range(4)}
    expected = {asked: reference.answer(question, 16, ignore_eos=True) for asked, question in questions.items()}
    whole = text_engine(directory, kv=kv)
    small = text_engine(directory, kv=kv, max_sequences=3, token_budget=16)
    eager = text_engine(directory, kv=kv, enforce_eager=True)
    assert [is_fused(model) for model in (whole, small, eager)] == [True, True, False]
    for engine in (whole, small, whole, eager):
        for asked, question in questions.items():
            engine.add(engine_request(asked, question, reference, encoder, greedy(16, ignore_eos=True)))
        assert run(engine) == expected
    assert [len(kernel.signatures) for kernel in KERNELS] == [1] * len(KERNELS), "nothing is compiled while it serves"


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_left_alone(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        engine = text_engine(make_model(tmp_path, text=OTHERS[name]()))
    assert not is_fused(engine)
    assert not caplog.records


def test_layers_that_compute_something_else_are_left_alone(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The structure is that of others."""
    layer = transformers.models.llama.modeling_llama.LlamaMLP
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, hidden: 0.9 * forward(self, hidden))
    engine = text_engine(model_dir)
    assert not is_fused(engine)
    assert "they would yield something else" in caplog.text
    model: Any = engine._adapter.decoder
    assert all("forward" not in vars(layer) for layer in model.layers)


def test_layers_that_depend_on_far_positions_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Queries of Ministral 3 grow from one position on, far beyond those of a short prompt."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}
    text = text_config(
        transformers.Ministral3Config,
        head_dim=16,
        max_position_embeddings=1024,
        rope_parameters=rope | {"original_max_position_embeddings": 512},
    )
    assert not is_fused(text_engine(make_model(tmp_path, text=text)))
    assert "they would yield something else" in caplog.text


def test_layers_whose_results_are_not_finite_are_left_alone(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says so of each request, as it does without fused layers."""
    layer = transformers.models.llama.modeling_llama.LlamaMLP
    monkeypatch.setattr(layer, "forward", lambda self, hidden: hidden * torch.nan)
    assert not is_fused(text_engine(model_dir, token_budget=64, preempted_kv_bytes=0))


@pytest.mark.parametrize("error", [ImportError("No module named 'numba'"), OSError("No space left on device")])
def test_where_nothing_can_be_compiled_layers_are_left_alone(
    error: Exception, model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare() -> None:
        raise error

    monkeypatch.setattr(cpu_kernels, "prepare", prepare)
    assert not is_fused(text_engine(model_dir))
    assert "nothing is compiled for the processor" in caplog.text


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_rows_are_divided_among_threads(model_dir: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "_WORTH_A_THREAD", 1)
    reference, encoder = Reference(model_dir), encoder_engine(model_dir)
    questions = {f"r{seed}": random_question(random.Random(seed), 0) for seed in range(4)}
    engine = text_engine(model_dir, torch_threads=threads)
    try:
        for name, question in questions.items():
            engine.add(engine_request(name, question, reference, encoder, greedy(8, ignore_eos=True)))
        found = run(engine)
    finally:
        torch.set_num_threads(1)
    assert found == {name: reference.answer(question, 8, ignore_eos=True) for name, question in questions.items()}


def test_an_attention_mask_is_refused(model_dir: Path) -> None:
    """Rather than ignored."""
    engine = text_engine(model_dir)
    runner: Any = engine._runner
    model: Any = engine._adapter.decoder
    packed = runner._pack([], [[]], fused=True)
    with pytest.raises(NotImplementedError, match="no attention mask"):
        model.layers[0](torch.zeros(1, 1, 8), attention_mask=torch.zeros(1), packed=packed)
