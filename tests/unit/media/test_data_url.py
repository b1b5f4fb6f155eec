import base64
import textwrap
from collections.abc import Callable
from urllib.parse import quote, unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import InvalidMedia
from triptych.media import data_url
from triptych.media.data_url import decode_base64, decode_data_url

DATA = bytes(range(256))
ENCODED = base64.b64encode(DATA).decode()
"""With ``+``, ``/`` and two characters of padding."""


@given(data=st.binary(min_size=1, max_size=100))
def test_bytes_are_decoded(data: bytes) -> None:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    assert decode_data_url(url, max_bytes=len(data)) == data
    with pytest.raises(InvalidMedia, match=f"holds {len(data)} bytes, the limit is {len(data) - 1}"):
        decode_data_url(url, max_bytes=len(data) - 1)


@pytest.mark.parametrize(
    "header",
    [
        "data:image/png;base64",
        "DATA:Image/PNG;BASE64",
        "data:;base64",
        "data:;charset=utf-8;base64",
        "data:image/png;name=x.png;base64",
        "data:image/svg+xml;charset=utf-8;base64",
        "data:image/png;" + "name=" + "n" * 300 + ".png;base64",
        "data:image/png; base64",
        "data:image/png;base64;charset=utf-8",
    ],
)
def test_every_form_of_a_base64_url_is_decoded(header: str) -> None:
    for url in (f"{header},{ENCODED}", memoryview(f"{header},{ENCODED}".encode())):
        assert decode_data_url(url, len(DATA)) == DATA


@pytest.mark.parametrize(
    "header", ["data:", "data:image/png", "data:;charset=US-ASCII", "DATA:text/plain;charset=utf-8"]
)
def test_a_url_without_base64_is_percent_decoded(header: str) -> None:
    assert decode_data_url(f"{header},{quote(DATA)}", len(DATA)) == DATA
    assert decode_data_url(f"{header},A%20b,c;base64", 100) == b"A b,c;base64"
    with pytest.raises(InvalidMedia, match="holds 256 bytes, the limit is 255"):
        decode_data_url(f"{header},{quote(DATA)}", len(DATA) - 1)


@pytest.mark.parametrize("piece_chars", range(3, 9))
def test_other_characters_and_escapes_may_lie_at_the_edge_of_a_piece(
    piece_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_url, "_PIECE_CHARS", piece_chars)
    text = "é€%C3%A9 %25a%e2%82%ac€%20é%"
    assert decode_data_url(f"data:,{text}", 100) == unquote_to_bytes(text)


@pytest.mark.parametrize("size", range(250, 256))
@pytest.mark.parametrize(
    "written",
    [
        lambda text: text,
        lambda text: text.rstrip("="),
        lambda text: text.replace("+", "-").replace("/", "_"),
        lambda text: text.replace("+", "-").replace("/", "_").rstrip("="),
        lambda text: "\n".join(textwrap.wrap(text, 76)) + "\n",
        lambda text: "\r\n".join(textwrap.wrap(text, 64)),
        lambda text: " ".join(textwrap.wrap(text, 5)),
    ],
    ids=["standard", "no padding", "URL-safe", "URL-safe without padding", "MIME lines", "PEM lines", "spaces"],
)
def test_base64_is_taken_as_encoders_write_it(
    written: Callable[[str], str], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_url, "_PIECE_CHARS", 16)  # a fault or an escape may lie at the edge of a piece
    text = written(base64.b64encode(DATA[-size:]).decode())
    assert decode_base64(text, size) == DATA[-size:]
    assert decode_base64(memoryview(text.encode()), size) == DATA[-size:]
    assert decode_data_url(f"data:image/png;base64,{text}", size) == DATA[-size:]
    assert decode_data_url(f"data:image/png;base64,{quote(text, safe='')}", size) == DATA[-size:]
    assert decode_data_url(f"data:image/png;base64,{quote(text, safe='').replace('%2B', '%2b')}", size) == DATA[-size:]
    with pytest.raises(InvalidMedia, match=f"holds {size} bytes, the limit is {size - 1}"):
        decode_base64(text, size - 1)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("", "not a data: URL"),
        ("data:", "no comma"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64;AAAA", "no comma"),
        ("data:" + "a" * 2000 + "/png;base64,AAAA", "no comma before its data, within 1024 characters"),
        ("data:image;base64,AAAA", "media type is not of the form"),
        ("data:base64,AAAA", "media type is not of the form"),
        ("http://example.org/a.png", "not a data: URL"),
        (" data:image/png;base64,AAAA", "not a data: URL"),
        ("data:image/png," + "a" * (5 << 20), "5242880 characters that are not base64, the limit is 4194304"),
    ],
)
def test_other_urls_are_refused_with_the_reason(url: str, match: str) -> None:
    with pytest.raises(InvalidMedia, match=match):
        decode_data_url(url, 100)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ("A", "1 letters are one too many or too few"),
        ("AAAAA", "5 letters are one too many or too few"),
        ("AA=A", "padding (=) before its end"),
        ("AA==AAAA", "padding (=) before its end"),
        ("A===", "ends with 3 padding characters"),
        ("AAAA?AAA", "character 5 is none of its alphabet"),
        ("AAé=", "character 3 is none"),
        ("AAAA\x00", "character 5 is none"),
        ("AAAA%41", "character 5 is none"),
        ("AAAA%2", "character 5 is none"),
        ("A%2BA%", "character 6 is none"),
        ("secret!", "character 7 is none"),
    ],
)
def test_broken_base64_is_refused_with_the_place_and_without_the_content(
    data: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_url, "_PIECE_CHARS", 4)
    with pytest.raises(InvalidMedia) as caught:
        decode_data_url("data:image/png;base64," + data, 100)
    assert caught.value.message.startswith("the data URL's base64 is broken: ")
    assert match in caught.value.message
    assert data not in caught.value.message


@pytest.mark.parametrize("data", ["", "\n", "=", "===="])
def test_a_data_url_without_data_is_refused(data: str) -> None:
    with pytest.raises(InvalidMedia, match=r"no data|padding characters"):
        decode_data_url("data:image/png;base64," + data, 100)
    with pytest.raises(InvalidMedia, match="no data"):
        decode_data_url("data:,", 100)


@given(url=st.text(max_size=60))
def test_any_text_raises_only_invalid_media(url: str) -> None:
    for text in (url, "data:image/png;base64," + url, "data:," + url):
        try:
            decode_data_url(text, 30)
        except InvalidMedia:
            continue
