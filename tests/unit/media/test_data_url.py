import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import InvalidMedia
from triptych.media.data_url import decode_data_url


@given(data=st.binary(min_size=1, max_size=100))
def test_bytes_are_decoded(data: bytes) -> None:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    assert decode_data_url(url, max_bytes=len(data)) == ("image/png", data)
    with pytest.raises(InvalidMedia, match=f"holds {len(data)} bytes, the limit is {len(data) - 1}"):
        decode_data_url(url, max_bytes=len(data) - 1)


def test_the_media_type_is_lower_case_and_parameters_are_ignored() -> None:
    assert decode_data_url("DATA:Image/JPEG;name=a.jpg;BASE64,AAAA", 3) == ("image/jpeg", bytes(3))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "data:",
        "data:,hello",
        "data:image/png,hello",
        "data:;base64,AAAA",
        "data:image;base64,AAAA",
        "data:image/png;base64",
        "data:image/png;base64;AAAA",
        "data:image/png;base64 ,AAAA",
        "data:" + "a" * 600 + "/png;base64,AAAA",
        "http://example.org/a.png",
        " data:image/png;base64,AAAA",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidMedia, match="does not have the form"):
        decode_data_url(url, 100)


@pytest.mark.parametrize(
    "data", ["AAA", "A", "AA=A", "A===", "AA AA===", "AAA\n", "AA-_", "AAé=", "%41AAA", "AAAA=", "===="]
)
def test_broken_base64_is_refused(data: str) -> None:
    with pytest.raises(InvalidMedia, match="base64 is broken"):
        decode_data_url("data:image/png;base64," + data, 100)


def test_an_empty_data_url_is_refused() -> None:
    with pytest.raises(InvalidMedia, match="no data"):
        decode_data_url("data:image/png;base64,", 100)


@given(url=st.text(max_size=60))
def test_any_text_raises_only_invalid_media(url: str) -> None:
    for text in (url, "data:image/png;base64," + url):
        try:
            decode_data_url(text, 30)
        except InvalidMedia:
            continue
