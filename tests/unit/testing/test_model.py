from triptych.domain.chat import MediaPart, Message, TextPart
from triptych.domain.media import Modality
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.testing.fakes import FAKE_PLACEHOLDER_ID
from triptych.testing.media import png
from triptych.testing.model import SPECIAL, WORDS, FakeFamily, fake_prompt_builder, fake_tokenizer


def test_images_take_positions_according_to_their_size() -> None:
    images = [png(14, 14), png(30, 28)]
    message = Message("user", (TextPart("w5 w6"), *(MediaPart(Modality.IMAGE, image) for image in images)))
    infos = [inspect_media(image, MediaLimits()) for image in images]
    prompt = fake_prompt_builder().build((message,), infos)
    assert [run.tokens for run in prompt.runs] == [1, 6]
    for run in prompt.runs:
        assert set(prompt.token_ids[run.start : run.start + run.tokens]) == FakeFamily().placeholder_ids
    assert prompt.token_ids.count(FAKE_PLACEHOLDER_ID) == 7
    assert {5, 6} <= set(prompt.token_ids)
    assert SPECIAL.index("<unk>") not in prompt.token_ids


def test_every_token_of_the_vocabulary_has_text() -> None:
    tokenizer = fake_tokenizer()
    assert tokenizer.vocab_size == len(SPECIAL) + len(WORDS)
    assert tokenizer.decode([WORDS[0], WORDS[-1]]) == "w5w1004"
    assert tokenizer.encode("w5 w1004") == [WORDS[0], WORDS[-1]]
