"""A cluster of real processes answers as transformers' ``generate`` does, and refuses invalid requests."""

import asyncio
import json
import statistics
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from tests.e2e.client import post, probed, rest, stream, text_of, timeline_of
from tests.e2e.reference import DIGITS, Question, answer, data_url, questions
from triptych.cli.cluster import LocalCluster
from triptych.rpc.stubs import RouterStub
from triptych.testing.media import png, png_header

pytestmark = pytest.mark.asyncio(loop_scope="module")

GOOD = Question("What digits are shown?", ("3_a", "1_a"))
EIGHT = Question("What digits are shown?", ("0_a", "1_a", "2_a", "3_a", "4_a", "5_a", "6_a", "7_a"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    logs = tmp_path_factory.mktemp("logs")
    async with LocalCluster(roles="E:2,PD:1", log_dir=logs) as running:
        yield running
    assert_no_stacks(logs)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster: LocalCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with rest(cluster.url) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(cluster: LocalCluster) -> AsyncIterator[RouterStub]:
    stub = RouterStub(cluster.router_target)
    yield stub
    await stub.close()


def assert_no_stacks(logs: Path) -> None:
    """No log of any process has a stack trace."""
    for log in sorted(logs.glob("*.log")):
        text = log.read_text(errors="replace")
        assert "Traceback" not in text, f"{log.name}:\n{text[text.index('Traceback') - 500 :][:4000]}"


@pytest.mark.parametrize("question", questions((0, 1, 2, 8), 8), ids=lambda question: f"{len(question.images)} images")
async def test_a_single_request_equals_generate_token_for_token(router: RouterStub, question: Question) -> None:
    got = await stream(router, f"alone-{hash(question)}", question)
    expected = answer(question)
    assert got.token_ids == expected.token_ids
    assert got.text == expected.text
    assert got.finished.usage.prompt_tokens == expected.prompt_tokens
    assert got.finished.usage.completion_tokens == len(expected.token_ids)


async def test_16_mixed_requests_at_once_equal_generate_token_for_token(router: RouterStub) -> None:
    asked = questions((0, 1, 2, 3, 5, 8), 16)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(router, f"mixed-{i}", question)) for i, question in enumerate(asked)]
    for question, task in zip(asked, tasks, strict=True):
        assert task.result().token_ids == answer(question).token_ids, question


def in_16_bits(name: str) -> dict[str, Any]:
    """A message part with a digit whose grey values are stored in 16 bits."""
    with Image.open(DIGITS / f"{name}.png") as digit:
        values = np.asarray(digit.convert("L")).astype(np.uint16) * 257
    out = BytesIO()
    Image.fromarray(values).save(out, "png")
    return {"type": "image_url", "image_url": {"url": data_url(out.getvalue())}}


@pytest.mark.parametrize("digit", range(10))
async def test_a_16_bit_digit_is_read_as_its_8_bit_version(http: httpx.AsyncClient, digit: int) -> None:
    question = Question("Which digit is this?", (f"{digit}_a",))
    body = question.body()
    body["messages"][0]["content"][0] = in_16_bits(f"{digit}_a")
    assert text_of(await post(http, body)) == answer(question).text


async def test_rest_streams_the_same_text(http: httpx.AsyncClient) -> None:
    assert text_of(await post(http, GOOD.body())) == answer(GOOD).text
    streamed = await post(http, GOOD.body(stream=True))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")


async def test_choices_differ_and_a_seed_reproduces_them(http: httpx.AsyncClient) -> None:
    greedy = (await post(http, GOOD.body(n=3, logprobs=True, top_logprobs=2))).json()
    assert [choice["index"] for choice in greedy["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in greedy["choices"]} == {answer(GOOD).text}
    tokens = len(answer(GOOD).token_ids)
    assert greedy["usage"]["completion_tokens"] == 3 * tokens
    for choice in greedy["choices"]:
        told = choice["logprobs"]["content"]
        assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] <= 0 for entry in told)
        assert "".join(entry["token"] for entry in told).startswith(answer(GOOD).text)
    drawn = [
        (await post(http, GOOD.body(n=3, temperature=2.0, frequency_penalty=2.0, seed=5, min_tokens=16))).json()[
            "choices"
        ]
        for _ in range(2)
    ]
    texts = [[choice["message"]["content"] for choice in choices] for choices in drawn]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


async def test_answers_follow_their_schema(http: httpx.AsyncClient) -> None:
    schema = {
        "type": "object",
        "properties": {"digits": {"type": "array", "items": {"enum": list(range(10))}, "maxItems": 2}},
        "required": ["digits"],
        "additionalProperties": False,
    }
    told = {"type": "json_schema", "json_schema": {"name": "digits", "schema": schema}}
    body = GOOD.body(n=4, temperature=1.0, seed=1, max_tokens=160, response_format=told)
    for choice in (await post(http, body)).json()["choices"]:
        assert choice["finish_reason"] == "stop"
        document = json.loads(choice["message"]["content"])
        assert set(document) == {"digits"}
        assert all(isinstance(digit, int) and digit <= 9 for digit in document["digits"])
    whole = (await post(http, GOOD.body(response_format={"type": "json_object"}, max_tokens=160))).json()["choices"][0]
    assert whole["finish_reason"] == "length" or isinstance(json.loads(whole["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}}}, None),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"min_tokens": 41}, "min_tokens"),
        ({"n": 17}, "n"),
    ],
    ids=["schema", "logit_bias", "min_tokens", "n"],
)
async def test_invalid_sampling_is_refused_before_encoding(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str | None
) -> None:
    refused = await post(http, GOOD.body(**fields))
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == (param or "response_format")


async def test_images_of_one_request_are_spread_over_both_encoders(http: httpx.AsyncClient) -> None:
    names = tuple(f"{digit}_c" for digit in range(8))
    timeline = await timeline_of(http, await post(http, Question("What digits are shown?", names).body()))
    assert timeline["outcome"] == "done"
    assert len(timeline["items"]) == 8
    assert {item["encoder"] for item in timeline["items"]} == {"encoder-1", "encoder-2"}
    assert timeline["text_instance"] == "text-1"
    pulled = [item for item in timeline["items"] if not item["text_cached"]]
    assert {item["pull_backend"] for item in pulled} <= {"shm", "nixl", "tcp"}
    assert all(item["pull_bytes"] > 0 for item in pulled)


async def test_a_text_only_request_calls_no_encoder(http: httpx.AsyncClient) -> None:
    timeline = await timeline_of(http, await post(http, Question("Hello!").body()))
    assert timeline["outcome"] == "done"
    assert timeline["items"] == []
    assert timeline["encode_s"] < 0.05


async def test_a_1x1_image_is_answered(http: httpx.AsyncClient) -> None:
    body = with_image(png(1, 1))
    assert text_of(await post(http, body))


# Polls /health until its input ends, in a separate process, since the one that makes the load is busy.
def with_image(image: bytes) -> dict[str, Any]:
    return with_url(data_url(image))


def with_url(url: object) -> dict[str, Any]:
    body = Question("What digits are shown?").body()
    body["messages"][0]["content"].insert(0, {"type": "image_url", "image_url": {"url": url}})
    return body


def many_images(count: int) -> dict[str, Any]:
    body = with_image(png(8, 8))
    body["messages"][0]["content"] = [body["messages"][0]["content"][0]] * count
    return body


WHOLE = (DIGITS / "3_a.png").read_bytes()
BAD: dict[str, tuple[object, int]] = {
    "not JSON": (b"{", 400),
    "not an object": ([1], 400),
    "no messages": ({"model": "triptych-demo"}, 400),
    "wrong type": (GOOD.body(max_tokens="many"), 400),
    "out of bounds": (GOOD.body(temperature=9), 400),
    "unknown model": (GOOD.body(model="gpt-9"), 404),
    "broken base64": (with_url("data:image/png;base64,***"), 400),
    "not a data URL": (with_url("http://127.0.0.1/a.png"), 400),
    "not an image": (with_image(b"I am no image"), 400),
    "empty image": (with_image(b""), 400),
    "truncated image": (with_image(WHOLE[: len(WHOLE) // 2]), 400),
    "header alone": (with_image(png_header(64, 64)), 400),
    "50,000 x 50,000 pixels": (with_image(png_header(50_000, 50_000)), 400),
    "too many images": (many_images(65), 400),
    "prompt over the context": (Question("Hello! " * 5000).body(), 400),
    "images over the context": (many_images(64), 400),
    "placeholder in the text": (Question("What is <image> here?").body(), 400),
}


@pytest.mark.parametrize("name", BAD)
async def test_invalid_input_is_refused_at_once_and_the_next_request_works(http: httpx.AsyncClient, name: str) -> None:
    body, status = BAD[name]
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    if isinstance(body, bytes):
        refused = await http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    else:
        refused = await http.post("/v1/chat/completions", json=body)
    took_s = loop.time() - began_s
    assert refused.status_code == status, refused.text
    error = refused.json()["error"]
    assert error["message"]
    assert error["code"]
    assert refused.headers["x-request-id"]
    for leak in ("Traceback", "0x", "/src/", ".py"):
        assert leak not in error["message"]
    assert took_s < 10, "a request may take 100 s"
    assert text_of(await post(http, GOOD.body())) == answer(GOOD).text


async def test_health_answers_at_once_under_load(cluster: LocalCluster, http: httpx.AsyncClient) -> None:
    async def keep_busy() -> None:
        for _ in range(6):
            await post(http, EIGHT.body())

    async with probed(cluster) as probes, asyncio.TaskGroup() as clients:
        for _ in range(24):
            clients.create_task(keep_busy())
    assert len(probes) >= 20
    assert statistics.quantiles(probes, n=10)[-1] < 0.1, f"health took {sorted(probes)[-5:]} s"
