from io import BytesIO

import pytest
from PIL import Image

from triptych.testing.media import png, png_header


@pytest.mark.parametrize(("width", "height"), [(1, 1), (28, 28), (30, 100)])
def test_a_png_is_valid_and_depends_only_on_its_seed(width: int, height: int) -> None:
    with Image.open(BytesIO(png(width, height, seed=1))) as image:
        image.load()
        assert image.size == (width, height)
    assert png(width, height, seed=1) == png(width, height, seed=1) != png(width, height, seed=2)


def test_a_header_claims_a_size_without_its_pixels() -> None:
    assert len(png_header(50_000, 50_000)) < 64
