"""``python -m tests.unit.client.serving``: a router as a process, whose first request hangs. Prints its address."""

import asyncio
import sys
from dataclasses import replace

from tests.unit.client.scripted import HELLO, MODEL, ScriptedRouter, behind_grpc


async def serve() -> None:
    router = ScriptedRouter([asyncio.Event()], HELLO)
    router.models_served = (MODEL, replace(MODEL, model_id="of-the-process"))
    async with behind_grpc(router) as address:
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve())
