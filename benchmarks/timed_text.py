"""A text instance that tells what it did when: its engine's steps, and the segments of keys and values that it sealed or pulled.

``Timed`` runs it in a process of its own, with the service's own code: only engine and record note times as well. Times are those of the
monotonic clock, which all processes of a machine share.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import uvloop

from benchmarks import ending
from benchmarks.talking_child import talking_child
from triptych.cli import ports
from triptych.domain.engine import EngineOutput
from triptych.domain.stage import Role
from triptych.engine.compute import ComputeOptions
from triptych.engine.decoder import text_engine
from triptych.engine.decoder.options import EngineOptions
from triptych.rpc.stubs import InstanceStub
from triptych.runtime.clock import monotonic
from triptych.services.text import app as text_app
from triptych.services.text.record import TextRecord
from triptych.services.text.settings import TextSettings

MIB = 1 << 20
STEP = "step"


@dataclass(frozen=True, slots=True)
class Happened:
    """``what`` is "step", or an outcome of ``Record.kv_segments``, for which both times are when it was recorded."""

    what: str
    began_s: float
    ended_s: float
    count: int
    """Tokens of answers that a step gave, or bytes of segments."""


_happened: list[Happened] = []


class _TimedEngine(text_engine.TransformersTextEngine):
    def step(self) -> list[EngineOutput]:
        began_s = monotonic()
        outputs = super().step()
        _happened.append(Happened(STEP, began_s, monotonic(), len(outputs)))
        return outputs


class _TimedRecord(TextRecord):
    def kv_segments(self, outcome: str, count: int = 1, nbytes: int = 0) -> None:
        now_s = monotonic()
        _happened.append(Happened(outcome, now_s, now_s, nbytes))
        super().kv_segments(outcome, count, nbytes)


@dataclass(frozen=True, slots=True)
class Options:
    """Of an instance."""

    model: Path
    role: str
    token_budget: int
    transport: str
    kv_mib: int = 256
    """Of the KV cache, of the arena that others pull from, and of the one to pull to, each."""

    @property
    def settings(self) -> TextSettings:
        return TextSettings(
            model=self.model,
            model_id="random",
            role=Role(self.role),
            host=ports.HOST,
            port=0,
            engine=EngineOptions(kv_cache_bytes=self.kv_mib * MIB, token_budget=self.token_budget),
            compute=ComputeOptions(torch_threads=1),
            kv_arena_bytes=self.kv_mib * MIB,
            image_cache_bytes=self.kv_mib * MIB,
            prefer_transport=self.transport,
        )


class Timed:
    """The instance, seen from another process."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.address = address
        self.stub = InstanceStub(address)
        self._process = process

    async def happened(self) -> Sequence[Happened]:
        """Since the last call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return [Happened(*fields) for fields in json.loads(await self._process.stdout.readline())]


@contextlib.asynccontextmanager
async def timed(options: Options) -> AsyncIterator[Timed]:
    said = json.dumps(asdict(options), default=str)
    async with talking_child("benchmarks.timed_text", said) as (process, port):
        instance = Timed(process, ports.address(port))
        try:
            yield instance
        finally:
            await instance.stub.close()


async def _serve(options: Options) -> None:
    """Print the port; then answer each line with what happened since the last."""
    async with text_app.app(options.settings) as running:
        print(json.dumps(running.port), flush=True)
        while await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
            told, _happened[:] = list(_happened), []
            print(json.dumps([astuple(happened) for happened in told]), flush=True)


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("options", help="as JSON")
    said = json.loads(parser.parse_args().options)
    for owner, name, instead in (
        (text_engine, "TransformersTextEngine", _TimedEngine),
        (text_app, "TextRecord", _TimedRecord),
    ):
        assert hasattr(owner, name), name
        setattr(owner, name, instead)
    uvloop.run(_serve(Options(**{**said, "model": Path(said["model"])})))


if __name__ == "__main__":
    main()
