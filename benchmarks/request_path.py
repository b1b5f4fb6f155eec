"""Cost of one image request in code: calls, files, records and record types, from REST body to released leases.

Gateway, router, encoder and text instance run on one event loop with HTTP and gRPC between them; the engines are fake
and the embedding is pulled from memory to memory. Requests run one at a time after a warm-up, each with a new
image and an answer of ``--tokens`` tokens. Counting begins when the client sends and ends when no service holds
anything of the request; each figure is the median over ``--requests``.

Only code of this project counts (``src/triptych`` without generated code, test kit and virtual time; ``services``):

- ``calls``: of its functions, in all threads; a generator or coroutine counts once, however often it is resumed.
- ``files``: that contain these functions.
- ``objects``: instances of its classes (dataclasses, NamedTuples, pydantic models, others), and the number of classes.
- ``messages``: protobuf messages sent or received, including nested ones, and the number of types.
- ``displays``: dicts and tuples that may serve as records (dict displays of at least two keys, tuple displays of at
  least three values), and the number of places in the code.
- ``records``: objects, messages and displays together, so that turning a record into a dict does not lower the count.
- ``background_calls``, ``background_records``: those of them that come with time, not with requests: load reports, of which an instance
  sends at most one in 20 ms, and the gateway's probe of its own event loop each 10 ms. The measurement slows requests down, so that more
  of them fall into the time of one.
"""

import argparse
import asyncio
import base64
import dis
import inspect
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx
from google.protobuf.message import Message
from pydantic import BaseModel
from pydantic_settings import BaseSettings

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from tests.integration.gateway.wired import Wired, wired
from tests.simulation.cluster import World
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.media import png
from triptych.v1 import common_pb2, encoder_pb2, router_pb2, text_pb2

_ROOT = Path(__file__).resolve().parents[1]
_COUNTED = (f"{_ROOT}/src/triptych/",)
_LEFT_OUT = tuple(f"{_ROOT}/src/triptych/{package}/" for package in ("v1", "testing", "virtual"))
_MODULES = ("triptych.",)
_MODULES_LEFT_OUT = ("triptych.v1.", "triptych.testing.", "triptych.virtual.")
_RESUMABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_DICT_KEYS, _TUPLE_VALUES = 2, 3
_GROUPS = {"message": "messages", "dict": "displays", "tuple": "displays"}
_BACKGROUND = frozenset(
    {"WatchedValue.watch", "InstanceServicer.WatchLoad", "Cluster._read_reports", "Shedding._measure"}
)
"""What load reports pass through on both sides, and the gateway's probe."""
_SETTLE_S = 10.0
_SIDE_PX = 56


@dataclass(frozen=True, slots=True)
class Settings:
    requests: int = 9
    warm_up: int = 3
    tokens: int = 4


QUICK = Settings(requests=1, warm_up=1, tokens=2)


@dataclass(frozen=True, slots=True)
class _Function:
    """Properties of a function's code: whether it counts, its file, and where it makes dicts and tuples."""

    counts: bool
    begins_at: int
    displays: dict[int, str]


@cache
def _function(code: CodeType) -> _Function:
    path = code.co_filename
    if code.co_name == "<module>" or not path.startswith(_COUNTED) or path.startswith(_LEFT_OUT):
        return _Function(counts=False, begins_at=0, displays={})
    displays, begins_at = {}, None
    for instruction in dis.get_instructions(code):
        name = f"{path.removeprefix(f'{_ROOT}/')}: {code.co_qualname} +{instruction.offset}"
        if instruction.opname == "RESUME" and begins_at is None:
            begins_at = instruction.offset
        elif instruction.opname in ("BUILD_CONST_KEY_MAP", "BUILD_MAP") and (instruction.arg or 0) >= _DICT_KEYS:
            displays[instruction.offset] = f"dict of {name}"
        elif instruction.opname == "BUILD_TUPLE" and (instruction.arg or 0) >= _TUPLE_VALUES:
            displays[instruction.offset] = f"tuple of {name}"
    return _Function(counts=True, begins_at=begins_at or 0, displays=displays)


def _is_background(frame: FrameType | None) -> bool:
    """Whether this comes with time."""
    while frame is not None:
        if frame.f_code.co_qualname in _BACKGROUND:
            return True
        frame = frame.f_back
    return False


class Tally:
    """Counts while ``on``. Objects are kept until the next ``start``, so that no id is reused."""

    def __init__(self) -> None:
        self.on = False
        self.calls: Counter[CodeType] = Counter()
        self.records: Counter[str] = Counter()
        self.background: Counter[str] = Counter()
        self._seen: dict[int, object] = {}

    def start(self) -> None:
        self.calls.clear()
        self.records.clear()
        self.background.clear()
        self._seen.clear()
        self.on = True

    def profile(self, frame: FrameType, event: str, value: Any) -> None:
        """Count calls and the objects they create, for ``sys.setprofile``."""
        if not self.on:
            return
        code = frame.f_code
        if event == "return":
            if code.co_name == "__init__":
                self._made(frame.f_locals.get(code.co_varnames[0]))
            elif isinstance(value, tuple | BaseModel) and not isinstance(value, BaseSettings):
                self._made(value)
        elif event == "call":
            function = _function(code)
            resumed = code.co_flags & _RESUMABLE and frame.f_lasti > function.begins_at
            if function.counts and not resumed:
                self.calls[code] += 1
                self.background["calls"] += _is_background(frame)

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        """Count dicts and tuples, for ``sys.settrace``."""
        if not (self.on and (function := _function(frame.f_code)).displays):
            return None
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode" and frame.f_lasti in function.displays:
            self.records[function.displays[frame.f_lasti]] += 1
            self.background["records"] += _is_background(frame)
        return self.trace

    def message(self, message: Message) -> None:
        """Count a sent or received message and its nested ones."""
        if not self.on:
            return
        self.records[f"message {message.DESCRIPTOR.full_name}"] += 1
        for field, value in message.ListFields():
            if field.message_type is not None:
                for nested in (value,) if isinstance(value, Message) else value:
                    if isinstance(nested, Message):
                        self.message(nested)

    def _made(self, value: object) -> None:
        kind = type(value)
        module = f"{kind.__module__}."
        if isinstance(value, BaseModel):
            for part in vars(value).values():
                for element in part if isinstance(part, list | tuple) else (part,):
                    if isinstance(element, BaseModel):
                        self._made(element)
        if module.startswith(_MODULES) and not module.startswith(_MODULES_LEFT_OUT) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self.records[f"{kind.__module__}.{kind.__qualname__}"] += 1
            self.background["records"] += _is_background(sys._getframe())  # noqa: SLF001 - what called this, by way of the profile

    def figures(self) -> dict[str, int]:
        made, kinds = Counter[str](), Counter[str]()
        for name, number in self.records.items():
            group = _GROUPS.get(name.partition(" ")[0], "objects")
            for key in (group, "records"):
                made[key] += number
                kinds[key] += 1
        records = {
            name: number
            for group in ("objects", "messages", "displays", "records")
            for name, number in ((group, made[group]), (f"{group}_types", kinds[group]))
        }
        return {
            "calls": self.calls.total(),
            "files": len({code.co_filename for code in self.calls}),
            **records,
            "background_calls": self.background["calls"],
            "background_records": self.background["records"],
        }


def count_messages(tally: Tally) -> None:
    """Count all messages of stubs and servers created from here on."""
    for module in (common_pb2, encoder_pb2, router_pb2, text_pb2):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Message):
                _show_messages(kind, tally)


def _show_messages(kind: Any, tally: Tally) -> None:
    serialize: Callable[[Message], bytes] = kind.SerializeToString
    parse: Callable[[bytes], Message] = kind.FromString

    def serialized(message: Message) -> bytes:
        tally.message(message)
        return serialize(message)

    def parsed(data: bytes) -> Message:
        message = parse(data)
        tally.message(message)
        return message

    kind.SerializeToString = serialized
    kind.FromString = staticmethod(parsed)


async def ask(client: httpx.AsyncClient, site: Wired, number: int, tokens: int, tally: Tally) -> None:
    """One request, from sending its body until no service holds anything of it."""
    image = png(_SIDE_PX, _SIDE_PX, seed=number)
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "w70 w71 w72"}]
    body = {
        "model": FAKE_MODEL.model_id,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
    }
    tally.start()
    answer = await client.post(f"http://127.0.0.1:{site.port}/v1/chat/completions", json=body)
    async with asyncio.timeout(_SETTLE_S):
        while True:
            tally.on = False
            if not site.held():
                break
            tally.on = True
            await asyncio.sleep(0.001)
    if answer.status_code != httpx.codes.OK:
        raise RuntimeError(f"HTTP {answer.status_code}: {answer.text}")


async def measure(settings: Settings) -> dict[str, Any]:
    """The figures, with details of the last request."""
    tally = Tally()
    count_messages(tally)
    sys.setprofile(tally.profile)
    threading.setprofile(tally.profile)
    sys.settrace(tally.trace)
    threading.settrace(tally.trace)
    rows: list[dict[str, int]] = []
    try:
        async with (
            wired(World(encoders=1, texts=1)) as site,
            httpx.AsyncClient(timeout=60.0, trust_env=False) as client,
        ):
            for number in range(settings.warm_up + settings.requests):
                await ask(client, site, number, settings.tokens, tally)
                if number >= settings.warm_up:
                    rows.append(tally.figures())
    finally:
        sys.settrace(None)
        sys.setprofile(None)
        threading.settrace(None)
        threading.setprofile(None)
    return {
        "machine": machine.describe(),
        "settings": asdict(settings),
        "figures": {name: int(statistics.median(row[name] for row in rows)) for name in rows[0]},
        "calls_by_file": _summed(tally.calls, _file),
        "calls_by_function": _summed(tally.calls, lambda code: f"{_file(code)}: {code.co_qualname}"),
        "records_by_type": dict(tally.records.most_common()),
    }


def _file(code: CodeType) -> str:
    return code.co_filename.removeprefix(f"{_ROOT}/")


def _summed(calls: Counter[CodeType], name: Callable[[CodeType], str]) -> dict[str, int]:
    """The calls by name, the most first."""
    sums: Counter[str] = Counter()
    for code, number in calls.items():
        sums[name(code)] += number
    return dict(sums.most_common())


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="one request: shows that it works")
    defaults = Settings()
    parser.add_argument("--requests", type=int, default=defaults.requests, help="of which the median is taken")
    parser.add_argument("--tokens", type=int, default=defaults.tokens, help="of each answer, 4 at most")
    parser.add_argument("--most", type=int, default=0, help="rows of each breakdown of the last request to print")
    arguments = parser.parse_args()
    settings = Settings(requests=arguments.requests, tokens=arguments.tokens)
    result = asyncio.run(measure(QUICK if arguments.quick else settings))
    for name, figure in result["figures"].items():
        print(f"{name:<14} {figure:>6,}")
    for breakdown in ("calls_by_file", "calls_by_function", "records_by_type"):
        for name, number in list(result[breakdown].items())[: arguments.most]:
            print(f"{number:>6,} {breakdown.rpartition('_')[2]:<8} {name}")
    write_figures(arguments.json, result)


if __name__ == "__main__":
    main()
