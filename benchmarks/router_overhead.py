"""Overhead of router and gateway, against a bare grpc.aio relay of the same hops and messages.

Side by side in one run, over fake engines in separate processes (``benchmarks.relay_peers``), with real gRPC and HTTP
on loopback, all on uvloop:

- ``direct``: the client calls encoders and text instance itself, the baseline. Only for the time to first token.
- ``relay``: client -> relay -> encoders, text. No templates, no tokens, no hashes, no decisions, no timelines.
- ``plain``: client -> router -> encoders, text; the client makes a gRPC call per request, like that of the relay.
- ``router``: the same with the client of this repository, whose calls share a stream (ADR 21).
- ``gateway``: REST client -> gateway -> router -> encoders, text.
- ``mounted``: REST client -> gateway with a router in its process -> encoders, text.

Time added to the first token is that of one request at a time, systems alternating, less the median of ``direct``. At
saturation a closed loop keeps ``concurrency`` requests open; requests per second *per core* are requests by the CPU
seconds that the system's own processes took for them (not clients, not peers), so they hold however many cores there
are. ``direct``, ``relay`` and the clients of ``relay`` and ``plain`` make a gRPC call for each request, item and
release; what runs between our own processes shares streams. All of it without coalescing in the text service and with
it (``--stream-interval-s``).

With ``--before DIR``, the root of another working tree, only its gateway and router are compared with these: CPU of a
request, both trees alternating in each round. The ratio is that of a round; the median and the quartiles are shown.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from itertools import count, product
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import grpc.aio
import uvloop

from benchmarks import ending, machine
from benchmarks.figures import Quartiles, add_before_options, add_json_option, quartiles, shown, write_figures
from benchmarks.relay_peers import HOST, IMAGE_TOKENS, PROMPT_TOKENS
from triptych.cli.child import child_command
from triptych.demo import MODEL_DIR
from triptych.domain.chat import ChatRequest, MediaPart, Message, TextPart
from triptych.domain.encoding import EncodeRequest
from triptych.domain.generation import Placement, Ready, TextRequest
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.sampling import SamplingParams
from triptych.errors import TriptychError
from triptych.rpc import calls, limits
from triptych.rpc.context import outgoing
from triptych.rpc.stubs import RouterStub
from triptych.runtime.tls import TlsIdentity
from triptych.testing.fakes import FAKE_MODEL, FAKE_PLACEHOLDER_ID
from triptych.testing.media import png
from triptych.v1 import encoder_pb2_grpc, router_pb2_grpc, text_pb2_grpc
from triptych.wire import encoder as encode
from triptych.wire import router, text
from triptych.workload.report import percentile

RELAY, PLAIN, ROUTER, GATEWAY, MOUNTED = "relay", "plain", "router", "gateway", "mounted"
DIRECT = "direct"
SYSTEMS = (RELAY, PLAIN, ROUTER, GATEWAY, MOUNTED)
_SIDE_PX = 56
_START_S = 100.0
_REQUEST_S = 60.0
_CPU_CLOCK = 2
"""Of Linux: the clock of a process that counts the time it was scheduled."""
_QUESTION = "What digits are shown, in order?"


@dataclass(frozen=True, slots=True)
class Settings:
    stream_intervals_s: tuple[float, ...] = (0.0, 0.02)
    outputs: tuple[int, ...] = (16, 128)
    images: tuple[int, ...] = (0, 4)
    first_tokens: int = 150
    """Requests per system for the time to first token."""
    seconds: float = 4.0
    """Duration of saturation per system."""
    concurrency: int = 32
    step_s: float = 0.002


QUICK = Settings(stream_intervals_s=(0.0,), outputs=(4,), images=(0, 2), first_tokens=3, seconds=0.3, concurrency=4)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Time added to the first token, in ms; ``ratio_p50`` is relative to the relay."""

    system: str
    images: int
    stream_interval_s: float
    added_p50_ms: float
    added_p99_ms: float
    ratio_p50: float
    ratio_p99: float


@dataclass(frozen=True, slots=True)
class Saturation:
    """``cpu_ms``: per request, for each process of the system; ``ratio``: requests per core relative to the relay."""

    system: str
    images: int
    output_tokens: int
    stream_interval_s: float
    requests: int
    requests_per_s: float
    requests_per_core_s: float
    cpu_ms: dict[str, float]
    ratio: float
    ratio_to_relay_per_token: float
    """The ratio to the relay with a message per token, whatever this row's coalescing."""


Ask = Callable[[int, int], Awaitable[float]]
"""(images, output tokens) -> seconds to the first token; returns after the whole answer."""


class Grpc:
    """A client of any server with the router's API. Its calls are ``rpc.stubs``' if ``shared``, else plain ones."""

    def __init__(self, port: int, *, shared: bool, tls: TlsIdentity | None = None) -> None:
        self._stub = RouterStub(f"{HOST}:{port}", tls)
        self._channel = _channel(port)
        self._plain = router_pb2_grpc.RouterStub(self._channel)
        self._shared = shared
        self._pictures = _pictures()

    async def __call__(self, images: int, output_tokens: int) -> float:
        media = (MediaPart(Modality.IMAGE, next(self._pictures)) for _ in range(images))
        request = ChatRequest(
            secrets.token_hex(8),
            FAKE_MODEL.model_id,
            (Message("user", (*media, TextPart(_QUESTION))),),
            SamplingParams(max_tokens=output_tokens, ignore_eos=True),
            timeout_s=_REQUEST_S,
        )
        began_s, first_s = time.perf_counter(), None
        async with aclosing(self._chat(request)) as events:
            async for _ in events:
                first_s = first_s or time.perf_counter()
        assert first_s is not None
        return first_s - began_s

    def _chat(self, request: ChatRequest) -> AsyncGenerator[Any]:
        if self._shared:
            return self._stub.chat(request)
        return calls.stream(
            self._plain.Chat(
                router.chat_request_to_wire(request), timeout=_REQUEST_S, metadata=outgoing(request.request_id)
            ),
            router.chat_events_from_wire,
        )

    async def close(self) -> None:
        await self._stub.close()
        await self._channel.close()


class Direct:
    """Calls encoders and text instance itself."""

    def __init__(self, encoder_ports: Sequence[int], text_port: int) -> None:
        self._channels = [_channel(port) for port in (*encoder_ports, text_port)]
        *encoders, last = self._channels
        self._encoders = [encoder_pb2_grpc.EncoderStub(channel) for channel in encoders]
        self._text = text_pb2_grpc.TextStub(last)
        self._pictures = _pictures()

    async def __call__(self, images: int, output_tokens: int) -> float:
        began_s, first_s = time.perf_counter(), None
        encoded = await asyncio.gather(*(self._encode(item) for item in range(images)))
        request = TextRequest(
            secrets.token_hex(8),
            FAKE_MODEL.model_id,
            (FAKE_PLACEHOLDER_ID,) * IMAGE_TOKENS * images + (70,) * PROMPT_TOKENS,
            tuple(Placement(item, item * IMAGE_TOKENS, ticket) for item, ticket in enumerate(encoded)),
            SamplingParams(max_tokens=output_tokens, ignore_eos=True),
            timeout_s=_REQUEST_S,
        )
        call = self._text.Generate(text.TEXT_REQUEST.to_wire(request), timeout=_REQUEST_S)
        async with aclosing(calls.stream(call, text.text_events_from_wire)) as events:
            async for ready in events:
                if not isinstance(ready[0], Ready):
                    first_s = first_s or time.perf_counter()
        assert first_s is not None
        return first_s - began_s

    async def _encode(self, item: int) -> Any:
        media = next(self._pictures)
        info = MediaInfo(Modality.IMAGE, "png", _SIDE_PX, _SIDE_PX, len(media), bytes(32))
        encoder = self._encoders[item % len(self._encoders)]
        request = EncodeRequest(
            "direct",
            item,
            FAKE_MODEL.model_id,
            media,
            info,
            IMAGE_TOKENS,
            b"",
            _REQUEST_S,
            _REQUEST_S,
            secrets.token_bytes(16),
            secrets.token_bytes(16),
        )
        call = encoder.Encode(encode.ENCODE_REQUEST.to_wire(request), timeout=_REQUEST_S)
        return (await calls.unary(call, encode.encode_result_from_wire)).ticket

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


class Rest:
    """Reads server-sent events with a minimal HTTP client over persistent connections."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._pictures = _pictures()

    async def __call__(self, images: int, output_tokens: int) -> float:
        body = json.dumps(self._body(images, output_tokens)).encode()
        reader, writer = await self._connection()
        began_s = time.perf_counter()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = bytearray(await reader.readuntil(b"\r\n\r\n"))
        assert answer.startswith(b"HTTP/1.1 200"), bytes(answer)
        answer += await reader.read(65536)
        first_s = time.perf_counter()
        while not answer.endswith(b"\r\n0\r\n\r\n"):
            got = await reader.read(65536)
            assert got, bytes(answer[-500:])
            answer += got
        assert b"data: [DONE]" in answer[-64:], bytes(answer[-500:])
        self._idle.append((reader, writer))
        return first_s - began_s

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():  # the server closes idle connections
                return reader, writer
            writer.close()
        return await asyncio.open_connection(HOST, self._port)

    def _body(self, images: int, output_tokens: int) -> dict[str, Any]:
        urls = (f"data:image/png;base64,{base64.b64encode(next(self._pictures)).decode()}" for _ in range(images))
        content = [*({"type": "image_url", "image_url": {"url": url}} for url in urls)]
        return {
            "model": FAKE_MODEL.model_id,
            "messages": [{"role": "user", "content": [*content, {"type": "text", "text": _QUESTION}]}],
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "stream": True,
        }

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


def _channel(port: int) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"{HOST}:{port}", options=limits.channel_options())


def _pictures() -> Iterator[bytes]:
    """An endless cycle of different images, since a router remembers where it has seen an image."""
    made = [png(_SIDE_PX, _SIDE_PX, seed=seed) for seed in range(64)]
    return (made[number % len(made)] for number in count())


@dataclass(frozen=True, slots=True)
class Running:
    """The systems of a run."""

    ask: dict[str, Ask]
    pids: dict[str, dict[str, int]]
    """Pids of the processes of each system."""


@contextlib.asynccontextmanager
async def running(settings: Settings, stream_interval_s: float, tree: Path | None = None) -> AsyncGenerator[Running]:
    """Start peers and all systems as processes, with the package of a working tree; they end with the context."""
    encoder_1, encoder_2, text_port, relay, router_port, own_router, gateway, mounted = free_ports(8)
    encoders = (encoder_1, encoder_2)
    numbers = ",".join(map(str, encoders))
    peers = "benchmarks.relay_peers"
    wiring = f"--model {MODEL_DIR} --instances {','.join(f'{HOST}:{port}' for port in (*encoders, text_port))}"
    quiet = ("--log-level", "WARNING")
    commands: dict[str, tuple[str, ...]] = {
        "peers": (peers, "peers", str(text_port), numbers, str(settings.step_s), str(stream_interval_s)),
        RELAY: (peers, "relay", str(relay), str(text_port), numbers),
        ROUTER: ("triptych.services.router", "--port", str(router_port), *quiet, *wiring.split()),
        GATEWAY: ("triptych.services.gateway", "--port", str(gateway), *quiet, "--router", f"{HOST}:{router_port}"),
        MOUNTED: (
            "triptych.services.gateway",
            *("--port", str(mounted), *quiet),
            f"--mount-router=--port {own_router} {wiring}",
        ),
    }
    with contextlib.ExitStack() as stack:
        processes = {name: stack.enter_context(process(command, tree)) for name, command in commands.items()}
        clients: tuple[Direct | Grpc | Rest, ...] = (
            Direct(encoders, text_port),
            Grpc(relay, shared=False),
            Grpc(router_port, shared=False),
            Grpc(router_port, shared=True),
            Rest(gateway),
            Rest(mounted),
        )
        ask: dict[str, Ask] = dict(zip((DIRECT, *SYSTEMS), clients, strict=True))
        pid = {name: process.pid for name, process in processes.items()}
        try:
            for name, client in ask.items():
                await until_it_answers(name, client)
            yield Running(
                ask,
                {
                    RELAY: {RELAY: pid[RELAY]},
                    PLAIN: {ROUTER: pid[ROUTER]},
                    ROUTER: {ROUTER: pid[ROUTER]},
                    GATEWAY: {GATEWAY: pid[GATEWAY], ROUTER: pid[ROUTER]},
                    MOUNTED: {MOUNTED: pid[MOUNTED]},
                },
            )
        finally:
            for client in clients:
                await client.close()


@contextlib.contextmanager
def process(command: Sequence[str], tree: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    variables = None
    if tree is not None:
        variables = {**os.environ, "PYTHONPATH": f"{Path.cwd()}:{tree / 'src'}"}  # noqa: TID251 - passed to the child
    with TemporaryFile() as log:
        process = subprocess.Popen(child_command(*command), stdout=log, stderr=log, env=variables)
        try:
            yield process
        except BaseException:
            log.seek(0)
            print(f"--- {command[0]}\n{log.read()[-2000:].decode(errors='replace')}", file=sys.stderr)
            raise
        finally:
            process.kill()
            process.wait()


async def until_it_answers(name: str, ask: Ask) -> None:
    last: Exception | None = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_START_S):
            while True:
                try:
                    await ask(1, 1)
                except (TriptychError, OSError, AssertionError, asyncio.IncompleteReadError) as error:
                    last = error
                    await asyncio.sleep(0.1)
                else:
                    return
    raise RuntimeError(f"{name} does not answer: {last}")


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for listener in sockets:
            listener.bind((HOST, 0))
        return [listener.getsockname()[1] for listener in sockets]


async def first_tokens(on: Running, settings: Settings, images: int, interval_s: float) -> list[FirstToken]:
    """One request at a time, systems alternating in varying order."""
    took: dict[str, list[float]] = {name: [] for name in on.ask}
    names = list(on.ask)
    for turn in range(settings.first_tokens):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            took[name].append(await on.ask[name](images, settings.outputs[0]))
    base_s = statistics.median(took[DIRECT])
    added = {name: [seconds - base_s for seconds in took[name]] for name in SYSTEMS}
    p50, p99 = ({name: percentile(added[name], q) for name in SYSTEMS} for q in (50, 99))
    return [
        FirstToken(
            name,
            images,
            interval_s,
            1e3 * p50[name],
            1e3 * p99[name],
            p50[name] / p50[RELAY],
            p99[name] / p99[RELAY],
        )
        for name in SYSTEMS
    ]


async def saturate(on: Running, settings: Settings, name: str, images: int, output_tokens: int) -> dict[str, Any]:
    """Keep one system busy. Returns requests, seconds, and CPU seconds per process."""
    pids = on.pids[name]
    ended = 0

    async def client(until_s: float) -> None:
        nonlocal ended
        while time.perf_counter() < until_s:
            await on.ask[name](images, output_tokens)
            ended += 1

    before = {process: _cpu_s(pid) for process, pid in pids.items()}
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(settings.concurrency):
            group.create_task(client(began_s + settings.seconds))
    seconds = time.perf_counter() - began_s
    cpu_s = {process: _cpu_s(pid) - before[process] for process, pid in pids.items()}
    return {"requests": ended, "seconds": seconds, "cpu_s": cpu_s}


def _cpu_s(pid: int) -> float:
    """CPU time of all threads of a process: its clock (``clock_getcpuclockid``) counts nanoseconds, /proc ticks of 10 ms."""
    return time.clock_gettime((~pid << 3) | _CPU_CLOCK)


async def saturations(
    on: Running, settings: Settings, images: int, output_tokens: int, interval_s: float, relay: dict[Any, float]
) -> list[Saturation]:
    """All systems, one after the other. ``relay`` records the relay's result with a message per token."""
    rows: list[Saturation] = []
    for name in SYSTEMS:
        got = await saturate(on, settings, name, images, output_tokens)
        per_core_s = got["requests"] / sum(got["cpu_s"].values())
        if name == RELAY:
            own_relay = per_core_s
            relay.setdefault((images, output_tokens), per_core_s)
        rows.append(
            Saturation(
                name,
                images,
                output_tokens,
                interval_s,
                got["requests"],
                got["requests"] / got["seconds"],
                per_core_s,
                {process: 1e3 * cpu_s / got["requests"] for process, cpu_s in got["cpu_s"].items()},
                per_core_s / own_relay,
                per_core_s / relay[images, output_tokens],
            )
        )
        _print_saturation(rows[-1])
    return rows


def _print_first_token(row: FirstToken) -> None:
    print(
        f"first token  {row.system:<8} {row.images} images  interval {row.stream_interval_s:g} s  "
        f"+{row.added_p50_ms:6.2f} ms p50 ({row.ratio_p50:4.2f}x)  +{row.added_p99_ms:6.2f} ms p99 ({row.ratio_p99:4.2f}x)"
    )


def _print_saturation(row: Saturation) -> None:
    cpu = ", ".join(f"{name} {ms:.2f}" for name, ms in row.cpu_ms.items())
    print(
        f"saturation   {row.system:<8} {row.images} images  {row.output_tokens:>3} tokens  "
        f"interval {row.stream_interval_s:g} s  {row.requests_per_core_s:7.1f} requests/s per core "
        f"({row.ratio:4.2f}x, {row.ratio_to_relay_per_token:4.2f}x)  CPU ms: {cpu}",
        flush=True,
    )


async def measure(settings: Settings) -> dict[str, Any]:
    """Run all measurements, in the order of printing."""
    first: list[FirstToken] = []
    saturated: list[Saturation] = []
    relay: dict[Any, float] = {}
    for interval_s in settings.stream_intervals_s:
        async with running(settings, interval_s) as on:
            for images in settings.images:
                rows = await first_tokens(on, settings, images, interval_s)
                first += rows
                for row in rows:
                    _print_first_token(row)
                for output_tokens in settings.outputs:
                    saturated += await saturations(on, settings, images, output_tokens, interval_s, relay)
    return {
        "machine": machine.describe(),
        "settings": asdict(settings),
        "first_token": [asdict(row) for row in first],
        "saturation": [asdict(row) for row in saturated],
    }


@dataclass(frozen=True, slots=True)
class Compared:
    """CPU of a request in all processes of a system, in ms; ``ratio`` is to that of the tree before."""

    system: str
    images: int
    output_tokens: int
    before_cpu_ms: float
    now_cpu_ms: float
    ratio: Quartiles | None


async def compare(settings: Settings, before: Path, rounds: int) -> dict[str, Any]:
    """The gateway with a router, and the gateway with one in its process, of two trees."""
    rows: list[Compared] = []
    async with running(settings, 0.0, before) as then, running(settings, 0.0) as now:
        for images, output_tokens, name in product(settings.images, settings.outputs, (GATEWAY, MOUNTED)):
            pairs: list[tuple[float, float]] = []
            for number in range(rounds):
                trees = (then, now) if number % 2 else (now, then)
                took = {tree is now: await _cpu_ms(tree, settings, name, images, output_tokens) for tree in trees}
                pairs.append((took[False], took[True]))
            before_ms, now_ms = (statistics.median(figures) for figures in zip(*pairs, strict=True))
            ratio = quartiles(new / old for old, new in pairs)
            rows.append(Compared(name, images, output_tokens, before_ms, now_ms, ratio))
            row = rows[-1]
            print(
                f"{name:<8} {images} images  {output_tokens:>3} tokens  CPU ms: {row.before_cpu_ms:.3f}, "
                f"now {row.now_cpu_ms:.3f}{shown(row.ratio)}",
                flush=True,
            )
    return {"machine": machine.describe(), "settings": asdict(settings), "compared": [asdict(row) for row in rows]}


async def _cpu_ms(on: Running, settings: Settings, name: str, images: int, output_tokens: int) -> float:
    got = await saturate(on, settings, name, images, output_tokens)
    return float(1e3 * sum(got["cpu_s"].values()) / got["requests"])


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="a few requests of each kind: shows that it works")
    defaults = Settings()
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="busy time of each system and case")
    parser.add_argument("--first-tokens", type=int, default=defaults.first_tokens, help="requests per system and case")
    parser.add_argument("--concurrency", type=int, default=defaults.concurrency, help="requests open at saturation")
    add_before_options(parser, 8)
    arguments = parser.parse_args()
    settings = Settings(
        seconds=arguments.seconds, first_tokens=arguments.first_tokens, concurrency=arguments.concurrency
    )
    settings = QUICK if arguments.quick else settings
    if arguments.before is None:
        result = uvloop.run(measure(settings))
    else:
        result = uvloop.run(compare(settings, arguments.before, arguments.rounds))
    write_figures(arguments.json, result)


if __name__ == "__main__":
    main()
