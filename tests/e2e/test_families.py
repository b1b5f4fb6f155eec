"""Videos, clips and shards through real processes are answered as by ``generate``."""

import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.e2e.client import post, rest, stream_message, text_of, timeline_of
from tests.integration.families.harness import Case, Item, Question, all_tiny_families, message_of
from triptych.cli.cluster import LocalCluster
from triptych.domain.media import Modality
from triptych.rpc.stubs import RouterStub

pytestmark = [pytest.mark.extended, pytest.mark.asyncio(loop_scope="module")]

ANSWER_TOKENS = 12
MODEL_ID = "tiny"
TINIES = all_tiny_families()
CUT = frozenset({"qwen2_5_vl", "internvl", "voxtral"})
"""Families whose items are sharded here; each represents others of its kind."""


@dataclass
class Served:
    """A tiny model behind a cluster of real processes; ``case`` has the reference answers of ``generate``."""

    case: Case
    router: RouterStub
    http: httpx.AsyncClient


def never(*_: object) -> Any:
    raise AssertionError("the cluster encodes")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[*sorted(CUT), "mllama", "qwen2_audio", "whisper"])
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """One family after the other, with items split into as many shards as possible."""
    tiny = TINIES[request.param]
    directory = tmp_path_factory.mktemp(tiny.name) / MODEL_ID
    directory.mkdir()
    tiny.make(directory)
    options = {"router": ("--min-shard-tokens", "1")}
    async with LocalCluster(directory, options=options, log_dir=tmp_path_factory.mktemp("logs")) as cluster:
        router = RouterStub(cluster.router_target)
        async with rest(cluster.url) as http:
            yield Served(Case(tiny, directory, never), router, http)
        await router.close()


async def test_every_modality_equals_generate_token_for_token(served: Served) -> None:
    for number, (modality, _) in enumerate(served.case.tiny.targets):
        question = served.case.question_of(300 + number, modality, modality)
        got = await stream_message(served.router, modality.value, MODEL_ID, message_of(question), ANSWER_TOKENS)
        assert list(got.token_ids) == served.case.answer(question, ANSWER_TOKENS), modality


async def test_rest_gives_the_same_answers_and_the_timeline_has_the_shards(served: Served) -> None:
    shards = set[str]()
    encoders = set[str]()
    for number, (modality, _) in enumerate(served.case.tiny.targets):
        question = served.case.question_of(320 + number, modality, modality)
        whole = await stream_message(
            served.router, f"{modality.value}-2", MODEL_ID, message_of(question), ANSWER_TOKENS
        )
        other = served.case.question_of(340 + number, modality, modality)
        for asked in (question, other):
            response = await post(served.http, body(asked))
            said = text_of(response)
            items = (await timeline_of(served.http, response))["items"]
            assert {item["modality"] for item in items} == {modality.value}
            assert sum(item["pull_bytes"] for item in items) > 0 or asked is question, "no event arrived"
            shards |= {item["shard"] for item in items}
            encoders |= {item["encoder"] for item in items}
            if asked is question:
                assert said == whole.text
    assert (shards != {""}) == (served.case.tiny.name in CUT), shards
    assert len(encoders) == (1 if served.case.tiny.items == 1 else 2), encoders


def body(question: Question) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part_of(part) for part in question]
    return {
        "model": MODEL_ID,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
    }


def part_of(item: Item) -> dict[str, Any]:
    data = base64.b64encode(item.media).decode()
    match item.info.modality:
        case Modality.IMAGE:
            return {"type": "image_url", "image_url": {"url": f"data:image/{item.info.format};base64,{data}"}}
        case Modality.VIDEO:
            return {"type": "video_url", "video_url": {"url": f"data:video/{item.info.format};base64,{data}"}}
        case Modality.AUDIO:
            return {"type": "input_audio", "input_audio": {"data": data, "format": item.info.format}}
