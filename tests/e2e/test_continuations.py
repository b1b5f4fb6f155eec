"""kill -9 of a text process in the middle of a stream: the client reads the whole right answer."""

import json
import signal
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.e2e.client import rest
from tests.e2e.reference import Question
from triptych.cli.cluster import LocalCluster

TOKENS = 700
"""Of each choice: long enough that its text process is stopped before the end."""
SEEN = 20
"""Tokens after which it is."""
QUESTION = Question("What digits are shown?", ("9_c", "3_a"), max_tokens=TOKENS)
BODY = QUESTION.body(
    temperature=1.2, seed=11, n=2, ignore_eos=True, frequency_penalty=0.3, logprobs=True, top_logprobs=1, stream=True
) | {"stream_options": {"include_usage": True}}


@dataclass
class Streamed:
    """By choice the text, the tokens with their log-probabilities, and the reason; then the usage, but for what the instances had cached."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[tuple[str, float]]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        if usage := chunk.get("usage"):
            usage["prompt_tokens_details"].pop("cached_tokens")
            self.usage = usage
        for choice in chunk["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + (choice["delta"].get("content") or "")
            said = (choice.get("logprobs") or {}).get("content") or []
            self.tokens.setdefault(index, []).extend((token["token"], token["logprob"]) for token in said)
            if choice["finish_reason"] is not None:
                assert index not in self.reasons, "a choice ends once"
                self.reasons[index] = choice["finish_reason"]


OnTokens = Callable[[str, int], Awaitable[None]]


async def stream(client: httpx.AsyncClient, on_tokens: OnTokens, body: Mapping[str, Any] = BODY) -> Streamed:
    """The whole answer. ``on_tokens`` gets the request's id and the number of tokens so far, after each event."""
    got = Streamed()
    ended = False
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                got.take(json.loads(line.removeprefix("data: ")))
                await on_tokens(response.headers["x-request-id"], sum(map(len, got.tokens.values())))
    assert ended
    return got


async def timeline(client: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(f"/v1/requests/{request_id}/timeline")).json()
    return found


@contextmanager
def stopped(cluster: LocalCluster, processes: Collection[str]) -> Iterator[None]:
    """Stop processes meanwhile, so that no answer ends before the one is killed that is found out about."""
    for process in processes:
        cluster.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            cluster.kill(process, signal.SIGCONT)


async def test_a_stream_goes_on_when_its_text_process_is_killed() -> None:
    async with LocalCluster(roles="E:1,PD:2") as cluster, rest(cluster.url) as client:

        async def nothing(request_id: str, tokens: int) -> None:
            """The reference is an answer that nothing happens to."""

        killed: dict[str, str] = {}

        async def kill(request_id: str, tokens: int) -> None:
            if tokens < SEEN or killed:
                return
            with stopped(cluster, {"text-1", "text-2"}):
                killed[request_id] = (await timeline(client, request_id))["text_instance"]
                cluster.kill(killed[request_id])

        whole = await stream(client, nothing)
        assert {choice: len(tokens) for choice, tokens in whole.tokens.items()} == {0: TOKENS, 1: TOKENS}
        broken = await stream(client, kill)
        ((request_id, lost),) = killed.items()
        told = await timeline(client, request_id)
    assert (told["outcome"], told["continuations"], told["text_attempts"]) == ("done", 1, 2)
    assert {told["text_instance"], lost} == {"text-1", "text-2"}
    assert 0 < told["interrupted_s"] < told["decode_s"]
    assert (broken.texts, broken.reasons, broken.usage) == (whole.texts, whole.reasons, whole.usage)
    assert broken.reasons == {0: "length", 1: "length"}
    for choice, tokens in whole.tokens.items():
        assert [token for token, _ in broken.tokens[choice]] == [token for token, _ in tokens]
        assert [logprob for _, logprob in broken.tokens[choice]] == pytest.approx(
            [logprob for _, logprob in tokens], abs=1e-3
        )
