from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image as PillowImage

from triptych.client.images import Image, image_bytes
from triptych.errors import InvalidMedia

DIGIT = Path(__file__).parents[3] / "examples" / "digits" / "3_a.png"
BYTES = DIGIT.read_bytes()


@pytest.mark.parametrize("image", [DIGIT, str(DIGIT), BYTES, bytearray(BYTES), memoryview(BYTES)], ids=type)
def test_a_file_and_its_bytes_are_sent_as_they_are(image: Image) -> None:
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
        ("https://example.org/cat.png", "fetches nothing"),
        ("HTTP://example.org/cat.png", "fetches nothing"),
        ("data:image/png,cat", "does not have the form"),
        ("nowhere.png", "cannot read the image nowhere.png: No such file"),
        (DIGIT.parent, "cannot read the image digits: Is a directory"),
        ("a\0b", "cannot read the image"),
        (PillowImage.new("CMYK", (2, 2)), "convert it to RGB"),
        (7, "not int"),
        (None, "not NoneType"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_its_name(image: Image, said: str) -> None:
    with pytest.raises(InvalidMedia, match=said):
        image_bytes(image)
