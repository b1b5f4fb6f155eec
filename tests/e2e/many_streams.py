"""A client process that opens many streams at once and reads each to its end.

``python -m tests.e2e.many_streams PORT STREAMS TOKENS`` prints how many answers were whole, how many were not, and the seconds taken, as JSON.
"""

import asyncio
import json
import sys
import time

import uvloop

from triptych.demo import MODEL_ID

HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    "x-request-timeout: 600\r\ncontent-length: {}\r\n\r\n"
)
"""With a deadline that no answer misses: on a slow machine a shorter one would be a reason to refuse."""
CONNECTING = 100
"""Connections that are opened at the same time."""


async def stream(port: int, body: bytes, tokens: int, slots: asyncio.Semaphore) -> str:
    """What is wrong with the answer; empty if nothing is."""
    async with slots:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD.format(len(body)).encode() + body)
    answer = await reader.read()
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200 "):
        return (answer[:12] + answer[-300:]).decode(errors="replace")
    if b"data: [DONE]" not in answer[-64:] or b'"error"' in answer:
        return f"no end: {answer[-200:]!r}"
    return "" if f'"completion_tokens":{tokens},'.encode() in answer else f"other usage: {answer[-400:]!r}"


async def run(port: int, streams: int, tokens: int) -> None:
    ask = {
        "model": MODEL_ID,
        "messages": [{"role": "user", "content": "What digits are shown?"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    slots = asyncio.Semaphore(CONNECTING)
    began_s = time.perf_counter()
    body = json.dumps(ask).encode()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(port, body, tokens, slots)) for _ in range(streams)]
    wrong = [task.result() for task in tasks if task.result()]
    took_s = time.perf_counter() - began_s
    print(json.dumps({"whole": streams - len(wrong), "wrong": wrong[:5], "took_s": took_s}))  # noqa: T201 - its result


if __name__ == "__main__":
    uvloop.run(run(*map(int, sys.argv[1:])))
