"""A body parses to the same value with its blobs extracted, whatever their position and spelling."""

import base64
import json
import textwrap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import InvalidMedia, InvalidRequest, RequestTooLarge
from triptych.services.gateway import blobs
from triptych.services.gateway.blobs import MIN_BLOB_BYTES, extract_blobs
from triptych.services.gateway.openai_api import MAX_JSON_BYTES, ParsedRequest, parse_chat

DATA = bytes(range(256)) * 400
LONG = base64.b64encode(DATA).decode()
URL = f"data:image/png;base64,{LONG}"
LIMIT = 1 << 20


def body(*parts: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": list(parts)}], **fields}).encode()


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def apart_and_at_once(text: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[ParsedRequest, ParsedRequest]:
    apart = parse_chat(text, LIMIT)
    with monkeypatch.context() as patched:
        patched.setattr(blobs, "MIN_BLOB_BYTES", 1 << 40)
        return apart, parse_chat(text, LIMIT)


PARTS = [
    image(URL),
    image("https://example.com/a.png"),
    {"type": "text", "text": f'{{"url": "{URL}"}}'},
    {"type": "text", "text": LONG},
    {"type": "input_audio", "input_audio": {"data": LONG, "format": "wav"}},
]


def test_large_items_are_not_parsed() -> None:
    extracted = extract_blobs(body(*PARTS[:2], PARTS[4]))
    assert len(extracted.rest) < 1000
    assert [bytes(item).decode() for item in extracted.blobs.values()] == [URL, LONG]
    json.loads(extracted.rest)
    assert not extracted.is_used_up


@pytest.mark.parametrize(
    ("text", "extracted"),
    [
        (body(*PARTS), 2),
        (body(*PARTS).replace(b'"url": ', b'"url" \n:\t'), 2),
        (body(*PARTS).replace(b"/", b"\\/"), 2),
        (body(image("\n".join(textwrap.wrap(URL, 76)))), 1),
        (body(image("\r\n".join(textwrap.wrap(URL, 76)))), 1),
        (body(*PARTS).replace(b"data:image", b"d\\u0061ta:image"), 1),
        (body(*PARTS, metadata={"url": URL}), 3),
        (body(*PARTS, tools=[{"type": "function", "function": {"name": "f", "parameters": {"url": URL}}}]), 3),
        (body({"type": "text", "text": "x", "data": LONG}), 1),
        (body(image(URL), image(URL)), 2),
    ],
)
def test_extraction_does_not_change_the_parsed_value(
    text: bytes, extracted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(extract_blobs(text).blobs) == extracted
    apart, at_once = apart_and_at_once(text, monkeypatch)
    assert apart == at_once
    assert all(
        part.data == DATA for message in apart.messages for part in message.parts if hasattr(part, "data") and part.data
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (body(image(URL + "===")), InvalidMedia),
        (body(image(URL[:-400] + "\t" + URL[-399:])), InvalidMedia),
        (body(image(URL)).replace(LONG[-40:].encode(), b"\n" * 40), InvalidRequest),
        (body(image("ftp:" + URL)), InvalidRequest),
        (body(image("https:" + URL)), InvalidRequest),
        (body(image(URL)).replace(b'"url": "', b'"url": "x"'), InvalidRequest),
        (body(image(URL))[:-1], InvalidRequest),
        (b'{"url": "' + LONG.encode(), InvalidRequest),
        (body(image(URL), n=99), InvalidRequest),
    ],
)
def test_malformed_bodies_are_refused_as_without_extraction(text: bytes, error: type[InvalidRequest]) -> None:
    with pytest.raises(error) as caught:
        parse_chat(text, LIMIT)
    assert "extracted:" not in caught.value.message
    assert len(caught.value.message) < 400


def test_padding_inside_base64_data_is_refused_at_any_piece_boundary() -> None:
    pieces = base64.b64encode(bytes(3 * (64 << 10))).decode()
    for text in (pieces[:-4] + "AA==" + pieces, pieces[:-4] + "AAA=" + pieces):
        with pytest.raises(InvalidMedia, match="broken"):
            parse_chat(body(image(f"data:image/png;base64,{text}")), 1 << 30)


def test_a_refusal_does_not_name_blobs_of_fields_that_hold_no_media() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(body({"type": "image_url", "image_url": URL}), LIMIT)
    assert "blob:" not in caught.value.message
    assert "data:image/png" in caught.value.message


def test_json_without_its_media_is_bounded() -> None:
    with pytest.raises(RequestTooLarge, match="without its media"):
        parse_chat(body({"type": "text", "text": "x" * MAX_JSON_BYTES}), LIMIT)


def test_a_caller_cannot_forge_blob_names() -> None:
    extracted = extract_blobs(body(image(URL)))
    (name,) = extracted.blobs
    assert extracted.get("extracted:0") == "extracted:0"
    assert name not in extract_blobs(body(image(URL))).blobs, "names are unpredictable"


FRAGMENTS = st.sampled_from(
    (
        b'"url"',
        b'"data"',
        b":",
        b" ",
        b'"',
        b"{",
        b"}",
        b",",
        b"[",
        b"]",
        b"\\",
        b'\\"',
        URL.encode(),
        LONG.encode(),
        b"x",
    )
)


@given(st.lists(FRAGMENTS, max_size=14))
def test_any_bytes_are_parsed_or_refused_and_valid_json_is_parsed(fragments: list[bytes]) -> None:
    text = b"".join(fragments)
    extracted = extract_blobs(text)
    rest = bytes(extracted.rest)
    for name, item in extracted.blobs.items():
        assert len(item) >= MIN_BLOB_BYTES
        rest = rest.replace(name.encode(), bytes(item))
    assert rest == text
    try:
        json.loads(text)
    except ValueError:
        return
    json.loads(extracted.rest)
