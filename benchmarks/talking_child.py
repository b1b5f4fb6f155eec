"""A process of a benchmark that first prints a line of JSON, and then answers lines."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from triptych.cli.child import child_command


@contextlib.asynccontextmanager
async def talking_child(module: str, *arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Any]]:
    """The running module and what it printed. It is killed at the end. Raises RuntimeError if it did not start."""
    process = await asyncio.create_subprocess_exec(
        *child_command(module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )
    assert process.stdout is not None
    try:
        said = await process.stdout.readline()
        if not said:
            raise RuntimeError(f"a process of {module} did not start")
        yield process, json.loads(said)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
