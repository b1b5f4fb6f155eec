"""``python -m tests.unit.client.serving``: a router as a process, whose first request hangs. Prints its address."""

import asyncio
import sys

from tests.unit.client.scripted import HELLO, ScriptedRouter, behind_grpc


async def serve() -> None:
    async with behind_grpc(ScriptedRouter([asyncio.Event()], HELLO)) as address:
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve())
