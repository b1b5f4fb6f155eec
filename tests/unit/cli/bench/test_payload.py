import json
import random
from base64 import b64decode
from io import BytesIO

import pytest
from PIL import Image

from triptych.cli.bench.payload import Style, body, png
from triptych.workload.requests import Planned, Size


@pytest.mark.parametrize("size", [Size(1, 1), Size(16, 16), Size(37, 50), Size(336, 224)])
def test_images_have_the_requested_format_and_size(size: Size) -> None:
    with Image.open(BytesIO(png(size, random.Random(0)))) as image:
        image.load()
        assert (image.format, image.size, image.mode) == ("PNG", (size.width, size.height), "RGB")


def test_images_differ_and_are_small() -> None:
    rng = random.Random(0)
    images = {png(Size(336, 336), rng) for _ in range(50)}
    assert len(images) == 50
    assert max(map(len, images)) < 50_000


def test_a_request_body_matches_its_plan() -> None:
    planned = Planned(0, 12, (Size(20, 10), Size(5, 5)), 34)
    document = json.loads(body(planned, Style("m", ignore_eos=True), random.Random(0)))
    *images, text = document["messages"][0]["content"]
    assert len(text["text"].split()) == 12
    assert (document["model"], document["max_completion_tokens"], document["ignore_eos"]) == ("m", 34, True)
    assert document["stream_options"] == {"include_usage": True}
    for part, size in zip(images, planned.images, strict=True):
        data = b64decode(part["image_url"]["url"].removeprefix("data:image/png;base64,"))
        with Image.open(BytesIO(data)) as image:
            assert image.size == (size.width, size.height)
    assert "ignore_eos" not in json.loads(body(planned, Style("m"), random.Random(0)))
