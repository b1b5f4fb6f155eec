"""Bytes at the cuts of models of several families, by hand, and what links make of them."""

from math import inf
from pathlib import Path

import pytest

from tests.unit.families.test_architecture import PUBLISHED
from triptych.domain.device import Link
from triptych.domain.embedding import DType
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.stage import Stage
from triptych.families.architecture import Architecture
from triptych.families.model_files import Json, ModelFiles
from triptych.policy.transfer_analysis import (
    EMBEDDINGS,
    KEYS_AND_VALUES,
    MEDIA,
    PIXELS,
    STATES,
    Cut,
    MovedItem,
    Verdict,
    cuts,
    moved,
    needed_nbytes_per_s,
)

F16 = DType.F16
MIB = 1 << 20
QWEN3_VL_8B: Json = {
    "model_type": "qwen3_vl",
    "text_config": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "vision_config": {"out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]},
}
LINK = Link("slow", "A slow link", 1e9, 0.001, "assumed")


def architecture(config: Json) -> Architecture:
    return Architecture.load(ModelFiles(Path(), config, {}, {}, {}, {}, None))


def image(width: int = 336, height: int = 336) -> MediaInfo:
    return MediaInfo(Modality.IMAGE, "jpeg", width, height, 20_000, bytes(32))


def cuts_of(
    config: Json, *infos: MediaInfo, text_tokens: int = 128, cached_tokens: int = 0, kv_dtype: DType = F16
) -> dict[str, Cut]:
    model = architecture(config)
    items = [MovedItem.of(model.family, info, F16) for info in infos]
    found = cuts(model.decoder, items, text_tokens=text_tokens, cached_tokens=cached_tokens, kv_dtype=kv_dtype)
    return {cut.name: cut for cut in found}


def test_cuts_of_llava_have_the_bytes_of_heteroserves_equations() -> None:
    found = cuts_of(PUBLISHED["llava-1.5-7b"][1], image())
    assert list(found) == [MEDIA, PIXELS, EMBEDDINGS, KEYS_AND_VALUES]
    assert found[MEDIA].nbytes == 20_000
    assert found[PIXELS].nbytes == 3 * 336 * 336
    assert found[EMBEDDINGS].nbytes == 576 * 4096 * 2 == 4.5 * MIB
    assert found[KEYS_AND_VALUES].nbytes == 2 * 32 * 32 * 128 * (576 + 128) * 2 == 352 * MIB
    stages = [found[name].stage for name in found]
    assert stages == [Stage.ENCODE, Stage.ENCODE, Stage.ENCODE, Stage.PREFILL]


def test_items_add_up_and_have_a_transfer_each() -> None:
    one, three = (cuts_of(PUBLISHED["llava-1.5-7b"][1], *[image()] * count) for count in (1, 3))
    for name in (MEDIA, PIXELS, EMBEDDINGS):
        assert (three[name].nbytes, three[name].transfers) == (3 * one[name].nbytes, 3)
    assert three[KEYS_AND_VALUES].transfers == 1
    assert three[KEYS_AND_VALUES].nbytes - one[KEYS_AND_VALUES].nbytes == 2 * 576 * 2 * 32 * 4096 * 2


def test_a_family_with_deepstack_moves_several_tensors_of_an_item() -> None:
    embeddings = cuts_of(QWEN3_VL_8B, image(1024, 1024))[EMBEDDINGS]
    names = ["embeds", "deepstack_0", "deepstack_1", "deepstack_2"]
    assert [embeddings.parts[name] for name in names] == [(992 // 32) ** 2 * 4096 * 2] * 4
    assert embeddings.parts.keys() - names == {"rotary"}
    assert embeddings.nbytes == sum(embeddings.parts.values())


def test_cross_attention_moves_states_beside_the_keys_and_values_of_text() -> None:
    found = cuts_of(PUBLISHED["llama3.2-11b-vision"][1], image(560, 560))
    states = 4 * 1601
    assert found[EMBEDDINGS].nbytes == states * 4096 * 2
    kept = found[KEYS_AND_VALUES]
    assert kept.parts[STATES] == found[EMBEDDINGS].nbytes
    assert kept.parts[KEYS_AND_VALUES] == (128 + 1) * 2 * 32 * 8 * 128 * 2, "an image is one position of the prompt"


def test_keys_and_values_of_another_dtype_and_of_known_tokens_are_fewer() -> None:
    config = PUBLISHED["qwen2.5-vl-7b"][1]
    whole, eighth, known = (
        cuts_of(config, image(), kv_dtype=dtype, cached_tokens=cached)[KEYS_AND_VALUES].nbytes
        for dtype, cached in ((F16, 0), (DType.U8, 0), (F16, 100))
    )
    assert whole == 2 * eighth
    assert whole - known == 100 * 2 * 28 * 4 * 128 * 2
    assert cuts_of(config, image(), cached_tokens=1 << 20)[KEYS_AND_VALUES].nbytes == 0


def test_text_alone_has_one_cut() -> None:
    assert list(cuts_of(PUBLISHED["llava-1.5-7b"][1])) == [KEYS_AND_VALUES]


def test_a_sound_is_decoded_to_samples() -> None:
    sound = MediaInfo(
        Modality.AUDIO, "wav", 0, 0, 160_000, bytes(32), duration_s=5.0, samples=80_000, sample_rate_hz=16_000
    )
    found = cuts_of(PUBLISHED["qwen2-audio-7b"][1], sound)
    assert (found[MEDIA].nbytes, found[PIXELS].nbytes) == (160_000, 320_000)


def test_a_video_is_decoded_to_the_frames_that_are_seen() -> None:
    video = MediaInfo(Modality.VIDEO, "mp4", 280, 280, 100_000, bytes(32), frames=32, duration_s=4.0)
    pixels = cuts_of(PUBLISHED["qwen2.5-vl-7b"][1], video)[PIXELS].nbytes
    assert 0 < pixels < 3 * 280 * 280 * 32, "two frames a second are sampled, of eight"


def test_a_transfer_takes_its_fixed_time_for_each_item_and_the_time_of_its_bytes() -> None:
    cut = Cut(EMBEDDINGS, Stage.ENCODE, {"embeds": 3_000_000, "deepstack_0": 1_000_000}, 2)
    found = moved(cut, LINK, 0.1)
    assert found.seconds == pytest.approx(2 * 0.001 + 0.004)
    assert found.share == pytest.approx(0.06)


@pytest.mark.parametrize(
    ("stage_s", "verdict"),
    [
        (0.06, Verdict.BEARS),
        (0.059, Verdict.SLOWS),
        (0.0061, Verdict.SLOWS),
        (0.006, Verdict.WORSE),
        (0.0, Verdict.WORSE),
    ],
)
def test_a_link_bears_what_takes_a_tenth_of_the_stages_time(stage_s: float, verdict: Verdict) -> None:
    cut = Cut(MEDIA, Stage.ENCODE, {MEDIA: 5_000_000}, 1)
    assert moved(cut, LINK, stage_s).verdict is verdict


def test_at_the_break_even_a_transfer_takes_as_long_as_the_stage() -> None:
    cut = Cut(KEYS_AND_VALUES, Stage.PREFILL, {KEYS_AND_VALUES: 10**9}, 1)
    rate = needed_nbytes_per_s(cut, 0.101, transfer_s=0.001)
    assert rate == pytest.approx(10e9)
    assert moved(cut, Link("", "", rate, 0.001, ""), 0.101).share == pytest.approx(1.0)
    assert needed_nbytes_per_s(cut, 0.101, transfer_s=0.001, share=0.1) > 10 * rate
    assert needed_nbytes_per_s(cut, 0.001, transfer_s=0.001) == inf
