"""The generic family, with a processor that is known."""

from dataclasses import replace

import pytest

from triptych.domain.embedding import EMBEDS, DType, TensorSpec
from triptych.domain.media import MediaInfo, Modality
from triptych.errors import InvalidMedia
from triptych.families.base import Placeholders, as_in_request, count_tokens
from triptych.families.generic import BlankItem, GenericFamily, ModelFacts, Processed
from triptych.tokens.processor_process import (
    read_blank,
    read_facts,
    read_processed,
    written_blank,
    written_facts,
    written_processed,
)

IMAGE, AUDIO, VIDEO = 5, 6, 7
FACTS = ModelFacts(
    "next_vl",
    64,
    2048,
    {Modality.IMAGE: (IMAGE,), Modality.AUDIO: (AUDIO,), Modality.VIDEO: (VIDEO,)},
    frozenset({IMAGE, AUDIO}),
    {"mm_token_type_ids": {IMAGE: 1, AUDIO: 3}},
    {Modality.IMAGE: 2},
    16_000,
    frozenset({Modality.IMAGE}),
    "<s>",
)
CLIP = MediaInfo(Modality.AUDIO, "wav", 0, 0, 1, bytes(32), samples=24_000, sample_rate_hz=48_000)


class KnownProcessing:
    """One placeholder for 100 pixels, or for 1,600 samples; each image begins with its number."""

    facts = FACTS

    def __init__(self) -> None:
        self.asked: list[BlankItem] = []

    def processed(self, blank: BlankItem) -> Processed:
        self.asked.append(blank)
        if blank.width == 1:
            raise InvalidMedia("the model's processor refuses the image: it is too narrow")
        if blank.modality is Modality.AUDIO:
            return Processed((Placeholders(AUDIO, blank.samples // 1600),), ())
        if blank.modality is Modality.VIDEO:
            frames = tuple(range(0, blank.frames, 4))
            return Processed((Placeholders(IMAGE, 3),), (), frames, len(frames) * blank.width * blank.height)
        grid = TensorSpec("image_grid_thw", DType.I32, (1, 3))
        return Processed((f"{blank.place}:", Placeholders(IMAGE, blank.width * blank.height // 100)), (grid,))

    def close(self) -> None: ...


def image(width: int = 20, height: int = 10) -> MediaInfo:
    return MediaInfo(Modality.IMAGE, "png", width, height, 1, bytes(32))


def test_an_item_is_counted_by_the_processor_once_for_each_size() -> None:
    processing = KnownProcessing()
    family = GenericFamily(processing)
    assert [count_tokens(family, image()) for _ in range(3)] == [2, 2, 2]
    assert count_tokens(family, image(10, 20)) == 2
    assert processing.asked == [BlankItem(Modality.IMAGE, 20, 10), BlankItem(Modality.IMAGE, 10, 20)]


def test_audio_is_counted_at_the_rate_of_the_model() -> None:
    assert count_tokens(GenericFamily(KnownProcessing()), CLIP) == 5


def test_an_item_is_rows_for_its_placeholders_and_for_layers_and_what_positions_need() -> None:
    assert GenericFamily(KnownProcessing()).outputs(image(), DType.BF16) == (
        TensorSpec(EMBEDS, DType.BF16, (2, 64)),
        TensorSpec("deepstack_0", DType.BF16, (2, 64)),
        TensorSpec("deepstack_1", DType.BF16, (2, 64)),
        TensorSpec("image_grid_thw", DType.I32, (1, 3)),
    )


def test_the_processor_says_which_frames_of_a_video_are_sampled() -> None:
    family = GenericFamily(KnownProcessing())
    video = replace(image(), modality=Modality.VIDEO, frames=9, duration_s=4.5)
    assert family.sampled_frames(video) == (0, 4, 8)
    assert family.seen_pixels(video) == 600
    with pytest.raises(InvalidMedia, match="header"):
        count_tokens(family, replace(video, duration_s=0.0))


def test_items_whose_place_matters_know_it() -> None:
    family = GenericFamily(KnownProcessing())
    infos = as_in_request(family, [image(), image(), image()])
    assert [family.prompt_replacement(info)[0] for info in infos] == ["0:", "1:", "2:"]
    assert infos[0] == image(), "the first one is what it is alone"
    assert infos[1] != infos[2], "their embeddings are others"


def test_an_item_keeps_its_other_options_beside_those_of_its_request() -> None:
    processing = KnownProcessing()
    processing.facts = replace(FACTS, model_type="phi4_multimodal", numbered=frozenset({Modality.AUDIO}))
    family = GenericFamily(processing)
    clip = replace(CLIP, options=(("lora", "digest"),))
    first, second, picture = family.together([clip, clip, image()])
    assert [dict(info.options) for info in (first, second, picture)] == [
        {"lora": "digest", "beside_images": ""},
        {"lora": "digest", "beside_images": "", "place": "1"},
        {},
    ]
    assert family.is_beside_images(second)
    assert family.blank(second).place == 1


@pytest.mark.parametrize(("model_type", "item"), [("next_vl", CLIP), ("phi4_multimodal", image())])
def test_only_clips_of_models_that_it_matters_to_are_encoded_as_beside_images(model_type: str, item: MediaInfo) -> None:
    processing = KnownProcessing()
    processing.facts = replace(FACTS, model_type=model_type)
    assert not GenericFamily(processing).is_beside_images(replace(item, options=(("beside_images", ""),)))


def test_what_the_processor_or_the_model_does_not_take_is_refused() -> None:
    processing = KnownProcessing()
    processing.facts = replace(FACTS, targets={Modality.IMAGE: (IMAGE,), Modality.AUDIO: (AUDIO,)})
    family = GenericFamily(processing)
    with pytest.raises(InvalidMedia, match="too narrow"):
        family.prompt_replacement(image(1, 10))
    with pytest.raises(InvalidMedia, match="the model takes images and audio, not videos"):
        family.prompt_replacement(MediaInfo(Modality.VIDEO, "mp4", 8, 8, 1, bytes(32)))


def test_what_two_processes_tell_each_other_is_read_as_it_was_written() -> None:
    blank = BlankItem(Modality.AUDIO, 1, 2, 3, 4)
    processed = KnownProcessing().processed(BlankItem(Modality.IMAGE, 20, 10, place=3))
    assert read_blank(written_blank(blank)) == blank
    assert read_facts(written_facts(FACTS)) == FACTS
    assert read_processed(written_processed(processed)) == processed
    video = KnownProcessing().processed(BlankItem(Modality.VIDEO, 20, 10, frames=9, duration_s=4.5))
    assert read_processed(written_processed(video)) == video
