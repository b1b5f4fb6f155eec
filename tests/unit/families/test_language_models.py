"""Costs of language models: counted parameters and operations of tiny ones of each type, and pairs of positions by hand."""

from itertools import product
from typing import Any

import pytest
import torch
import transformers as untyped_transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from triptych.domain.architecture import Experts, Layers, Weights
from triptych.domain.embedding import DType
from triptych.families.defaults import AUDIO_DEFAULTS, QFORMER_DEFAULTS, TEXT_DEFAULTS, VISION_DEFAULTS
from triptych.families.language_models import language_model
from triptych.families.model_files import BadModel

transformers: Any = untyped_transformers

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TYPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {}),
    ("granite", {"mlp_bias": True}),
    ("qwen2", {"head_dim": None}),
    ("qwen3", {}),
    ("gemma3_text", {"num_hidden_layers": 7}),
    ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}),
]


@pytest.mark.parametrize(("kind", "changes"), TYPES)
def test_a_language_model_has_these_parameters_and_operations(kind: str, changes: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[kind](**{name: value for name, value in (SIZES | changes).items() if value is not None})
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # their products are counted
    model = transformers.AutoModelForCausalLM.from_config(config, **eager).eval()
    architecture = language_model(config.to_dict(), tied=config.tie_word_embeddings)
    stored = {parameter.data_ptr(): parameter.numel() for parameter in model.parameters()}
    assert architecture.parameters == sum(stored.values())
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False, logits_to_keep=1)
    masked = sum(layers.work(0, 9 - layers.pairs(3)).flops for layers in architecture.layers)
    assert counter.get_total_flops() == architecture.prefill(3).flops + masked


def test_layers_with_a_window_are_those_of_the_configuration() -> None:
    gemma = language_model({**TEXT_DEFAULTS["gemma3_text"], "model_type": "gemma3_text"}, tied=True)
    assert [(layers.count, layers.window) for layers in gemma.layers] == [(22, 4096), (4, None)]
    qwen = {**TEXT_DEFAULTS["qwen2"], "model_type": "qwen2", "sliding_window": 100}
    assert [layers.window for layers in language_model(qwen, tied=False).layers] == [None]
    slides = language_model(qwen | {"use_sliding_window": True}, tied=False)
    assert [(layers.count, layers.window) for layers in slides.layers] == [(4, 100), (28, None)]


def test_states_of_llama_3_2_take_what_the_docs_say() -> None:
    """210 MB for the four tiles of an image, in bfloat16."""
    llama = language_model({**TEXT_DEFAULTS["mllama_text_model"], "model_type": "mllama_text_model"}, tied=False)
    assert llama.cross is not None
    assert 4 * 1601 * llama.cross.state_nbytes(DType.BF16) == pytest.approx(210e6, rel=0.01)
    assert (llama.depth, llama.cross.layers.count) == (32, 8)


@pytest.mark.parametrize("window", [None, 1, 4, 9])
def test_pairs_are_those_of_a_causal_mask(window: int | None) -> None:
    layers = Layers(1, Weights(), 1, 1, window)
    for new, cached in product(range(7), range(12)):
        seen = [
            sum(1 for key in range(query + 1) if window is None or query - key < window)
            for query in range(cached, cached + new)
        ]
        assert layers.pairs(new, cached) == sum(seen)
        assert not seen or layers.seen(cached + new) == seen[-1]


def test_a_pass_over_many_rows_reads_all_experts_and_over_one_row_its_own() -> None:
    layers = Layers(2, Weights(stored=1000, used=280), 1, 1, experts=Experts(count=9, active=1, each=100))
    assert layers.read_parameters(1) == pytest.approx(2 * 200)
    assert layers.read_parameters(1000) == pytest.approx(2 * 1000)


def test_a_type_whose_layers_are_not_known_is_named() -> None:
    with pytest.raises(BadModel, match=r"text_config.model_type is 'mamba': costs are known of gemma3_text, granite"):
        language_model({"model_type": "mamba"}, tied=False)


def test_layers_beyond_any_model_are_refused() -> None:
    with pytest.raises(BadModel, match="num_hidden_layers is 1180591620717411303424, at most 10000 are counted"):
        language_model({**TEXT_DEFAULTS["llama"], "model_type": "llama", "num_hidden_layers": 1 << 70}, tied=False)


@pytest.mark.parametrize("kind", [*TEXT_DEFAULTS, *VISION_DEFAULTS, *AUDIO_DEFAULTS])
def test_defaults_are_those_of_transformers(kind: str) -> None:
    defaults = {**TEXT_DEFAULTS, **VISION_DEFAULTS, **AUDIO_DEFAULTS}[kind]
    config = CONFIG_MAPPING[kind]()
    given = vars(config.vision_config if kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl") else config)
    for name, value in defaults.items():
        of_transformers = given.get(name, given.get("num_local_experts") if name == "num_experts" else None)
        if name == "supported_aspect_ratios":
            continue  # computed from the number of tiles
        assert _plain(of_transformers) == _plain(value), name


def test_defaults_of_the_projector_are_those_of_transformers() -> None:
    given = vars(CONFIG_MAPPING["blip_2_qformer"]())
    assert {name: given[name] for name in QFORMER_DEFAULTS} == QFORMER_DEFAULTS


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
