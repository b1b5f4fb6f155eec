"""Send many requests at once, and cancel a stream.

Usage: python examples/sdk_async.py [HOST:PORT]
"""

import asyncio
import sys
from pathlib import Path

from triptych import AsyncClient
from triptych.errors import DeadlineExceeded

DIGITS = Path(__file__).parent / "digits"


async def main(target: str) -> None:
    async with AsyncClient(target, timeout_s=60) as client:
        # Ten questions at the same time; the router spreads their images over the encoders.
        async with asyncio.TaskGroup() as group:
            asked = {
                digit: group.create_task(
                    client.chat("What digits are shown?", [DIGITS / f"{digit}_a.png"], temperature=0, max_tokens=32)
                )
                for digit in range(10)
            }
        for digit, task in asked.items():
            print(f"{digit}_a.png: {task.result().text}")

        # Leaving a stream cancels the request at every stage.
        async with client.stream("Who are you?", temperature=0) as stream:
            async for chunk in stream:
                print("first words:", chunk.text)
                break

        # Every call has a deadline.
        try:
            await client.chat("Who are you?", timeout_s=0.001)
        except DeadlineExceeded as error:
            print("too late:", error.message)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
