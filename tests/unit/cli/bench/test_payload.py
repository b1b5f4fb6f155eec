import json
import random
import wave
from base64 import b64decode
from io import BytesIO

import av
import pytest
from PIL import Image

from triptych.cli.bench.payload import Style, body, mp4, png, wav
from triptych.workload.requests import Clip, Planned, Size


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
    plain = json.loads(body(planned, Style("m"), random.Random(0)))
    assert not {"ignore_eos", "logit_bias"} & plain.keys()
    assert json.loads(body(planned, Style("m", only_token=7), random.Random(0)))["logit_bias"] == {"7": 100}


@pytest.mark.parametrize("clip", [Clip(Size(64, 48), 1.5), Clip(Size(33, 17), 0.1), Clip(Size(224, 224), 1.0, 25)])
def test_videos_have_the_requested_size_and_length(clip: Clip) -> None:
    with av.open(BytesIO(mp4(clip, random.Random(0))), "r") as container:
        frames = list(container.decode(video=0))
    assert len(frames) == max(1, round(clip.seconds * clip.frames_per_s))
    assert frames[0].width - clip.size.width in (0, 1)
    assert frames[0].height - clip.size.height in (0, 1)


def test_videos_and_sounds_differ() -> None:
    rng = random.Random(0)
    assert len({mp4(Clip(Size(64, 64), 0.5), rng) for _ in range(5)}) == 5
    assert len({wav(0.1, rng) for _ in range(5)}) == 5


def test_sounds_have_the_requested_length() -> None:
    with wave.open(BytesIO(wav(0.25, random.Random(0)))) as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels()) == (4000, 16_000, 1)


def test_a_body_has_the_videos_and_sounds_of_its_plan() -> None:
    planned = Planned(0, 2, (), 3, videos=(Clip(Size(32, 32), 0.5),), sounds_s=(0.1, 0.2))
    content = json.loads(body(planned, Style("m"), random.Random(0)))["messages"][0]["content"]
    assert [part["type"] for part in content] == ["video_url", "audio_url", "audio_url", "text"]
    assert content[0]["video_url"]["url"].startswith("data:video/mp4;base64,")
    assert content[1]["audio_url"]["url"].startswith("data:audio/wav;base64,")
