from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image as PillowImage

from triptych.client import user
from triptych.client.images import Image, Media, image_bytes
from triptych.domain.chat import MediaPart, TextPart
from triptych.domain.media import Modality
from triptych.errors import InvalidMedia, InvalidRequest

DIGIT = Path(__file__).parents[3] / "examples" / "digits" / "3_a.png"
BYTES = DIGIT.read_bytes()


@pytest.mark.parametrize("image", [DIGIT, str(DIGIT), BYTES, bytearray(BYTES), memoryview(BYTES)], ids=type)
def test_a_file_and_raw_bytes_are_sent_unchanged(image: Image) -> None:
    assert image_bytes(image) == BYTES


def test_a_data_url_is_decoded() -> None:
    assert image_bytes("data:image/png;base64,cGl4ZWxz") == b"pixels"


def test_a_pillow_image_is_sent_losslessly() -> None:
    picture = PillowImage.effect_noise((9, 7), 50)
    with PillowImage.open(BytesIO(image_bytes(picture))) as got:
        assert got.format == "PNG"
        assert got.tobytes() == picture.tobytes()


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("/dev/zero", "the image /dev/zero is a device, a pipe or a socket"),
        ("https://example.org/cat.png", "fetches nothing"),
        ("HTTP://example.org/cat.png", "fetches nothing"),
        ("data:image,cat", "media type is not of the form"),
        ("nowhere.png", "the image nowhere.png does not exist"),
        (DIGIT.parent, f"the image {DIGIT.parent} is a directory"),
        ("a\0b", "does not exist"),
        (PillowImage.new("CMYK", (2, 2)), "convert it to RGB"),
        (7, "not int"),
        (None, "not NoneType"),
    ],
)
def test_an_invalid_image_is_refused_by_name(image: Image, said: str) -> None:
    with pytest.raises(InvalidMedia, match=said):
        image_bytes(image)


def test_a_turn_may_have_videos_and_audio(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"sound")
    turn = user("What?", [b"i"], videos=["data:video/mp4;base64,cGl4ZWxz"], audio=[tmp_path / "a.wav", b"more"])
    assert turn.parts == (
        MediaPart(Modality.IMAGE, b"i"),
        MediaPart(Modality.VIDEO, b"pixels"),
        MediaPart(Modality.AUDIO, b"sound"),
        MediaPart(Modality.AUDIO, b"more"),
        TextPart("What?"),
    )


@pytest.mark.parametrize(
    ("video", "said"),
    [
        ("https://example.org/cat.mp4", "the video's bytes and fetches nothing"),
        ("nowhere.mp4", "the video nowhere.mp4 does not exist"),
        (7, "video is a path, bytes or a data URL, not int"),
    ],
)
def test_an_invalid_video_is_refused_by_name(video: Media, said: str) -> None:
    with pytest.raises(InvalidMedia, match=said):
        user("What?", videos=[video])


@pytest.mark.parametrize("name", ["videos", "audio"])
def test_a_single_clip_in_place_of_a_list_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is a list, not one of them"):
        user("What?", **{name: "a.mp4"})
