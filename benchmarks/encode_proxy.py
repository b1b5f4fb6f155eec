"""A minimal proxy for vLLM's encoder disaggregation: ``python -m benchmarks.encode_proxy PORT ENCODER_URL TEXT_URL``.

What vLLM's example proxy does for one encoder: each image goes to the encoder in a request of its own, all at once; then
the whole request goes to the text server, whose answer is passed on as it comes.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

CHAT = "/v1/chat/completions"
_HEADERS = {"content-type": "application/json"}
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=256)


def app(encoder: str, text: str) -> Starlette:
    client = httpx.AsyncClient(timeout=None, trust_env=False, limits=_LIMITS)  # noqa: S113 - the benchmark's client has a timeout

    async def encode(model: str, image: dict[str, Any]) -> None:
        asked = {"model": model, "messages": [{"role": "user", "content": [image]}], "max_tokens": 1}
        (await client.post(encoder + CHAT, json=asked)).raise_for_status()

    async def chat(request: Request) -> Response:
        body = await request.body()
        asked = json.loads(body)
        parts = [part for message in asked["messages"] for part in message["content"] if isinstance(part, dict)]
        images = [part for part in parts if part["type"] == "image_url"]
        await asyncio.gather(*(encode(asked["model"], image) for image in images))
        answer = await client.send(
            client.build_request("POST", text + CHAT, content=body, headers=_HEADERS), stream=True
        )

        async def passed_on() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            finally:
                await answer.aclose()

        return StreamingResponse(passed_on(), answer.status_code, media_type=answer.headers["content-type"])

    async def health(_: Request) -> Response:
        return JSONResponse({})

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    routes = [Route(CHAT, chat, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes, lifespan=lifespan)


def main() -> None:
    port, encoder, text = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    uvicorn.run(app(encoder, text), host="127.0.0.1", port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
