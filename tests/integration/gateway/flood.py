"""A client process that posts large bodies on many connections.

``python -m tests.integration.gateway.flood PORT CONNECTIONS POSTS IMAGE_BYTES`` prints the statuses of the answers.
"""

import asyncio
import base64
import json
import os
import sys

HEAD = "{} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n"


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: str, body: bytes = b"") -> int:
    writer.write(HEAD.format(what, len(body)).encode())
    writer.write(body)
    await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return int(head.split()[1])


async def post(port: int, body: bytes, count: int) -> list[int]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    statuses = [await exchange(reader, writer, "POST /v1/chat/completions", body) for _ in range(count)]
    writer.close()
    return statuses


async def flood(port: int, connections: int, posts: int, image_bytes: int) -> None:
    url = "data:image/png;base64," + base64.b64encode(os.urandom(image_bytes)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": content}]}).encode()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(post(port, body, posts)) for _ in range(connections)]
    print(json.dumps([status for task in tasks for status in task.result()]))  # noqa: T201 - its result


if __name__ == "__main__":
    asyncio.run(flood(*map(int, sys.argv[1:])))
