"""Defaults of the catalogue for GPUs beside passes that were measured on an H200 (benchmarks/results/passes-h200.json and
unrecorded.md).
"""

from pathlib import Path
from statistics import median

from tests.unit.families.test_architecture import PUBLISHED
from triptych.domain.architecture import DecoderArchitecture
from triptych.domain.embedding import DType
from triptych.domain.media import MediaInfo, Modality
from triptych.families.architecture import Architecture
from triptych.families.defaults import TEXT_DEFAULTS
from triptych.families.language_models import language_model
from triptych.families.model_files import ModelFiles
from triptych.policy.roofline import Pass, Target, encode_pass, step_pass
from triptych.runtime.catalogue import load_catalogue

BF16 = DType.BF16
TARGET = Target(load_catalogue().device("h200"), BF16)


def qwen(hidden: int, inner: int, heads: int, kv_heads: int, *, tied: bool) -> DecoderArchitecture:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return language_model(
        {**TEXT_DEFAULTS["qwen2"], **sizes, "model_type": "qwen2", "num_hidden_layers": 28}, tied=tied
    )


def errors(measured_ms: dict[Pass, float]) -> list[float]:
    return [abs(1000 * TARGET.pass_s(step) / milliseconds - 1) for step, milliseconds in measured_ms.items()]


def test_steps_of_qwen() -> None:
    small, large = qwen(1536, 8960, 12, 2, tied=True), qwen(3584, 18944, 28, 4, tied=False)
    prompts = [(small, 32, 5.06), (small, 128, 5.27), (small, 500, 7.38), (small, 2048, 24.25), (large, 2048, 59.49)]
    decodes = [(small, 1, 4.11), (small, 8, 4.5), (small, 32, 5.16), (small, 128, 7.75)]
    decodes += [(large, 1, 7.32), (large, 8, 8.85), (large, 32, 9.66), (large, 128, 11.79)]
    measured = {step_pass(model, BF16, new=tokens): ms for model, tokens, ms in prompts}
    measured |= {step_pass(model, BF16, decodes=batch, context=256): ms for model, batch, ms in decodes}
    found = errors(measured)
    assert median(found) < 0.08
    assert max(found) < 0.16


def test_batches_of_clip() -> None:
    """LLaVA-1.5's encoder, without the projector that is counted here."""
    _, config = PUBLISHED["llava-1.5-7b"]
    image = MediaInfo(Modality.IMAGE, "png", 336, 336, 1, bytes(32))
    architecture = Architecture.load(ModelFiles(Path(), config, {}, {}, {}, {}, None))
    clip = architecture.encoder([image], BF16)
    found = errors(
        {
            encode_pass(clip, clip.items[0], images, BF16): ms
            for images, ms in ((1, 9.0), (4, 9.8), (8, 10.8), (32, 27.3))
        }
    )
    assert max(found) < 0.2
