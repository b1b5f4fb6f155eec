"""Searches for a better placement in a process of its own, at the lowest priority: ``triptych plan again``."""

import asyncio
import json
import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import cast

from pydantic import TypeAdapter, ValidationError

from triptych.domain.replanning import PlanQuestion, Proposal
from triptych.errors import Unavailable

_MODULE = "triptych.cli.child"
_COMMAND = ("triptych.cli", "plan", "again")
_MOST_NBYTES = 1 << 20
_SHOWN = 300
"""Characters of what a search that fails has said."""


class ChildReplanner:
    """``ports.Replanner``. The process ends with this one, and with the call."""

    def __init__(self, plan: Path) -> None:
        """``plan``: the file of ``triptych plan --json`` that is followed."""
        self._plan = plan

    async def search(self, question: PlanQuestion) -> Proposal:
        command = (sys.executable, "-m", _MODULE, str(os.getpid()), *_COMMAND, str(self._plan))
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as error:
            raise Unavailable(f"the search cannot be started: {error.strerror}") from None
        stdin = cast(asyncio.StreamWriter, process.stdin)
        try:
            # Where it has ended already, uvloop refuses to write. Then its status says what is wrong.
            with suppress(OSError, RuntimeError):
                stdin.write(_questions().dump_json(question))
                stdin.close()
            out, err = await process.communicate()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            said = err.decode(errors="replace").strip().splitlines()
            raise Unavailable(f"the search ended with status {process.returncode}: {' '.join(said[-3:])[-_SHOWN:]}")
        try:
            return _proposals().validate_json(out[:_MOST_NBYTES])
        except (ValidationError, json.JSONDecodeError):
            raise Unavailable("the search gave no answer") from None


@cache
def _questions() -> TypeAdapter[PlanQuestion]:
    return TypeAdapter(PlanQuestion)


@cache
def _proposals() -> TypeAdapter[Proposal]:
    return TypeAdapter(Proposal)
