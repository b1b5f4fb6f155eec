"""Requests with deadlines at several times the capacity: how many are answered in time, and how fast the others are refused.

A local cluster of real processes serves text only, or a mixture in which three of ten requests have one or two images. Its engines are the real ones
with the demo model (``demo``), or sleep as a synthetic profile says (``delay``), so that they take no CPU from gateway, router and clients.

The capacity is measured first: answers per second to clients that always have 64 requests open, without deadlines, and with 512, of which
most wait. Then requests arrive
at random (Poisson) at multiples of it, regardless of earlier ones, each with a deadline (``x-request-timeout``) of 3 to 5 s, or of the ranges of ``--deadlines``,
one series of loads for each. All are different.
An answer counts if its client has it before its deadline, counted from when the request was due, and before the load ends. ``kept`` is the rate of such answers
over the highest at any load; ``late`` are requests that were admitted and not answered in time; ``begun`` those of them that a text instance had, and
``encoded_in_vain`` the images that encoders have encoded without an answer to their request, or once more. An item whose request ends while its batch
is encoded is in no metric, and so not among these. The clients run in the benchmark's own process, on the same machine.

With ``--come-back`` a client that is refused waits its Retry-After, the whole seconds that HTTP has, and sends the same request once more with the same timeout, while others
come for the first time as before; who would come after the load has ended leaves. These tries count as requests as well, and are shown by themselves:
``admitted`` are those that are not refused again, ``unread`` those whose first try the gateway had refused by itself.

With ``--busy N`` other processes that compute without end, N of them at nice 0, take their part of the cores, while the capacity is measured as well. The clients then
go before all others (SCHED_FIFO) if the system allows it, as they would lag otherwise; the lag is shown. ``overdue`` are answers and errors that came after the deadline.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

import httpx
import psutil
import uvloop

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from triptych.cli.bench.payload import png
from triptych.cli.cluster import LocalCluster
from triptych.cli.metrics import scrape
from triptych.demo import MODEL_ID
from triptych.engine.delay import synthetic_decoder_profile, synthetic_encoder_profile
from triptych.runtime.profiles import write_profile
from triptych.workload.report import percentile
from triptych.workload.requests import Size

OPEN = 64
"""Requests that are open while the capacity is measured ..."""
MANY_OPEN = 512
"""... and while it is measured whether waiting requests cost others anything."""
IMAGES = (0, 0, 0, 0, 0, 0, 0, 1, 1, 2)
TOKENS = 16
PATIENT_S = 120.0
GRACE_S = 5.0
"""How long a client waits for the answer after its deadline."""
MOST_IDLE_S = 10.0
"""Connections that have been idle for longer are not used again, as the gateway closes them (``--head-timeout-s``)."""
SIDE_PX = 56
UNREAD = b"more come than can be looked at"
"""In the body of a refusal by the gateway itself."""
WORDS = ("What", "digits", "are", "shown", "here", "which", "one", "is", "the", "largest", "how", "many", "images")


@dataclass(frozen=True, slots=True)
class Settings:
    engines: tuple[str, ...] = ("demo",)
    mixes: tuple[str, ...] = ("text",)
    loads: tuple[float, ...] = (1.0, 5.0, 8.0)
    seconds: float = 20.0
    """Of each load above 1; up to the capacity half of it."""
    capacity_s: float = 10.0
    seed: int = 15
    deadlines_s: tuple[tuple[float, float], ...] = ((3.0, 5.0),)
    """Least and most of each series of loads."""
    come_back: bool = False
    """Whether a refused client waits its Retry-After and tries once more."""
    busy: tuple[int, ...] = (0, 4, 8)
    """Other processes that take the cores; one series of loads for each."""

    def seconds_of(self, load: float) -> float:
        return self.seconds if load > 1 else self.seconds / 2


QUICK = Settings(("delay",), ("mixed",), (1.0, 4.0), 6.0, 3.0, busy=(0,))


@dataclass(frozen=True, slots=True)
class Body:
    data: bytes
    images: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What the gateway said."""

    status: int
    """0 if the connection broke or nothing came."""
    retry_after_s: float = 0.0
    unread: bool = False
    """The gateway refused by itself."""

    @property
    def refused(self) -> bool:
        return self.status == httpx.codes.TOO_MANY_REQUESTS


@dataclass(frozen=True, slots=True)
class Sent:
    """A try's end. Times count from when it was due."""

    answer: Answer
    images: int
    took_s: float
    ended_s: float
    """Since the load began."""
    deadline_s: float
    sent_late_s: float
    first: Answer | None = None
    """Of a second try: what was said to the first."""

    @property
    def status(self) -> int:
        return self.answer.status

    @property
    def in_time(self) -> bool:
        return self.status == httpx.codes.OK and self.took_s <= self.deadline_s


@dataclass(slots=True)
class Gateway:
    """Requests over kept connections."""

    port: int
    _idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter, float]] = field(default_factory=list)
    """With the time of the last answer; the latest is last."""

    async def post(self, body: Body, timeout_s: float) -> Answer:
        """Once the whole answer is there; of status 0 if there is none within the timeout and a grace."""
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                return await self._post(body.data, timeout_s)
        except (OSError, EOFError, TimeoutError):
            return Answer(0)

    async def _post(self, body: bytes, timeout_s: float) -> Answer:
        reader, writer = await self._connection()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"x-request-timeout: {timeout_s:.3f}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        try:
            writer.write(head.encode() + body)
            told = (await reader.readuntil(b"\r\n\r\n")).lower()
            status, *lines = told.split(b"\r\n")
            headers = {name: value for name, _, value in (line.partition(b":") for line in lines)}
            content = await reader.readexactly(int(headers[b"content-length"]))
        except BaseException:
            writer.close()
            raise
        self._idle.append((reader, writer, time.perf_counter()))
        return Answer(int(status.split()[1]), float(headers.get(b"retry-after", 0)), UNREAD in content)

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer, answered_s = self._idle.pop()
            if not reader.at_eof() and time.perf_counter() - answered_s < MOST_IDLE_S:
                return reader, writer
            writer.close()
        return await asyncio.open_connection("127.0.0.1", self.port)

    def close(self) -> None:
        for _, writer, _ in self._idle:
            writer.close()


class Bodies:
    """Different requests of a mixture."""

    def __init__(self, mix: str, rng: random.Random) -> None:
        self._images = IMAGES if mix == "mixed" else (0,)
        self._rng = rng

    def next(self) -> Body:
        images = [png(Size(SIDE_PX, SIDE_PX), self._rng) for _ in range(self._rng.choice(self._images))]
        urls = ("data:image/png;base64," + base64.b64encode(image).decode() for image in images)
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content.append({"type": "text", "text": " ".join(self._rng.choices(WORDS, k=16))})
        ask = {"model": MODEL_ID, "messages": [{"role": "user", "content": content}], "temperature": 0}
        return Body(json.dumps(ask | {"max_tokens": TOKENS, "ignore_eos": True}).encode(), len(images))


@dataclass(frozen=True, slots=True)
class Seen:
    """Of the processes of the cluster, since the last look."""

    cpu_s: Mapping[str, float]
    """By kind of process."""
    begun: int
    """Requests that text instances had and did not answer."""
    encoded: int
    """Images."""


@dataclass(slots=True)
class Watch:
    """What the processes of the cluster have used and done, since the last look."""

    cluster: LocalCluster
    http: httpx.AsyncClient
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    begun: float = 0.0
    encoded: float = 0.0

    async def look(self) -> Seen:
        cpu_s: defaultdict[str, float] = defaultdict(float)
        for name, pid in (*self.cluster.processes.items(), ("clients", psutil.Process().pid)):
            spent = psutil.Process(pid).cpu_times()
            cpu_s[name.partition("-")[0]] += spent.user + spent.system
        begun = encoded = 0.0
        for name, url in self.cluster.admin_urls.items():
            if (samples := await scrape(self.http, url)) is None:
                continue
            if name.startswith("text"):
                begun += samples.total("triptych_text_failures_total") or 0
            if name.startswith("encoder"):
                encoded += samples.total("triptych_encoder_items_total", cached="no") or 0
        used = {name: round(spent_s - self.cpu_s.get(name, 0.0), 2) for name, spent_s in cpu_s.items()}
        seen = Seen(used, round(begun - self.begun), round(encoded - self.encoded))
        self.cpu_s, self.begun, self.encoded = cpu_s, begun, encoded
        return seen


@dataclass(frozen=True, slots=True)
class Again:
    """Second tries, of those that were refused and whose Retry-After ended while the load lasted."""

    tries: int
    admitted: int
    """Neither refused again nor broken."""
    answered_in_time: int
    unread: int
    """Of the tries, those whose first one the gateway had refused by itself ..."""
    unread_admitted: int
    """... and of those that were admitted."""
    retry_after_p50_s: float
    left: int
    """Refused requests that do not come again, as the load has ended by then."""

    @classmethod
    def of(cls, sent: Sequence[Sent]) -> Self:
        again = [request for request in sent if request.first is not None]
        admitted = [request for request in again if request.status and not request.answer.refused]
        told_s = [request.first.retry_after_s for request in again if request.first is not None]
        return cls(
            len(again),
            len(admitted),
            sum(request.in_time for request in again),
            _unread(again),
            _unread(admitted),
            median(told_s) if told_s else 0.0,
            sum(request.first is None and request.answer.refused for request in sent) - len(again),
        )


def _unread(again: Sequence[Sent]) -> int:
    return sum(request.first is not None and request.first.unread for request in again)


@dataclass(frozen=True, slots=True)
class Row:
    """A load. Rates are per second, times in milliseconds."""

    load: float
    offered: float
    sent: int
    answered_in_time: int
    goodput: float
    refused: int
    refusal_p50_ms: float
    refusal_p99_ms: float
    unread: int
    """Refused by the gateway itself ..."""
    unread_p99_ms: float
    """... after so long."""
    late: int
    begun: int
    """Requests that a text instance had and did not answer."""
    encoded_in_vain: int
    """Images that were encoded without an answer to their request, or once more."""
    broken: int
    """Neither an answer nor an error."""
    overdue: int
    """Answers and errors after the deadline; ``broken`` ones are not among these ..."""
    overdue_answers: int
    """... but those of status 200 are."""
    overdue_p99_ms: float
    """How long after the deadline these came."""
    statuses: dict[str, int]
    answer_p50_ms: float
    answer_p99_ms: float
    sent_late_p99_ms: float
    """Lag of the clients themselves."""
    cores: dict[str, float]
    """CPU seconds per second, by kind of process."""
    again: Again | None

    @classmethod
    def of(
        cls, load: float, rate: float, settings: Settings, sent: Sequence[Sent], seen: Seen, lasted_s: float
    ) -> Self:
        """The load with its answers and refusals lasted ``lasted_s``."""
        seconds = settings.seconds_of(load)
        good = [request for request in sent if request.in_time]
        refused = [1000 * request.took_s for request in sent if request.answer.refused]
        unread = [1000 * request.took_s for request in sent if request.answer.unread]
        took = [1000 * request.took_s for request in good]
        overdue = [request for request in sent if request.status and request.took_s > request.deadline_s]
        overdue_ms = [1000 * (request.took_s - request.deadline_s) for request in overdue]
        return cls(
            load,
            round(rate, 2),
            len(sent),
            len(good),
            round(sum(request.ended_s <= seconds for request in good) / seconds, 3),
            len(refused),
            round(median(refused), 2) if refused else 0.0,
            round(percentile(refused, 99), 2) if refused else 0.0,
            len(unread),
            round(percentile(unread, 99), 2) if unread else 0.0,
            len(sent) - len(good) - len(refused),
            seen.begun,
            seen.encoded - sum(request.images for request in sent if request.status == httpx.codes.OK),
            sum(not request.status for request in sent),
            len(overdue),
            sum(request.status == httpx.codes.OK for request in overdue),
            round(percentile(overdue_ms, 99), 1) if overdue else 0.0,
            {str(status): number for status, number in sorted(Counter(request.status for request in sent).items())},
            round(percentile(took, 50), 1) if took else 0.0,
            round(percentile(took, 99), 1) if took else 0.0,
            round(1000 * percentile([request.sent_late_s for request in sent], 99), 2),
            {name: round(spent_s / lasted_s, 2) for name, spent_s in seen.cpu_s.items()},
            Again.of(sent) if settings.come_back else None,
        )


async def capacity(gateway: Gateway, bodies: Bodies, seconds: float, requests: int = OPEN) -> float:
    """Answers per second while so many requests are open, without the first fifth of the time."""
    made = [bodies.next() for _ in range(requests)]
    began_s = time.perf_counter()
    ends: list[float] = []

    async def client(first: Body) -> None:
        body = first
        while time.perf_counter() - began_s < seconds:
            answer = await gateway.post(body, PATIENT_S)
            if answer.refused:  # what was refused just before the measurement counts for a few seconds
                await asyncio.sleep(answer.retry_after_s)
                continue
            assert answer.status == httpx.codes.OK, f"a request without a deadline was answered {answer.status}"
            ends.append(time.perf_counter() - began_s)
            body = bodies.next()

    async with asyncio.TaskGroup() as group:
        for body in made:
            group.create_task(client(body))
    return sum(0.2 * seconds <= at_s < seconds for at_s in ends) / (0.8 * seconds)


async def offered(
    gateway: Gateway,
    bodies: Bodies,
    rate: float,
    seconds: float,
    deadlines_s: tuple[float, float],
    rng: random.Random,
    *,
    come_back: bool,
) -> list[Sent]:
    """Open loop: every request is sent when it is due."""
    arrivals: list[tuple[float, float, Body]] = []
    at_s = rng.expovariate(rate)
    while at_s < seconds:
        arrivals.append((at_s, rng.uniform(*deadlines_s), bodies.next()))
        at_s += rng.expovariate(rate)
    sent: list[Sent] = []
    began_s = time.perf_counter()

    async def ask(due_s: float, deadline_s: float, body: Body, first: Answer | None = None) -> Answer:
        late_s = time.perf_counter() - began_s - due_s
        answer = await gateway.post(body, max(0.001, deadline_s - late_s))
        ended_s = time.perf_counter() - began_s
        sent.append(Sent(answer, body.images, ended_s - due_s, ended_s, deadline_s, late_s, first))
        return answer

    async def client(due_s: float, deadline_s: float, body: Body) -> None:
        answer = await ask(due_s, deadline_s, body)
        again_s = time.perf_counter() - began_s + answer.retry_after_s
        if come_back and answer.refused and again_s < seconds:
            await asyncio.sleep(answer.retry_after_s)
            await ask(again_s, deadline_s, body, answer)

    async with asyncio.TaskGroup() as group:
        for due_s, deadline_s, body in arrivals:
            await asyncio.sleep(began_s + due_s - time.perf_counter())
            group.create_task(client(due_s, deadline_s, body))
    return sent


@contextlib.contextmanager
def cores_taken(busy: int) -> Iterator[None]:
    """So many other processes compute without end."""
    code = f"from triptych.runtime.parent import end_with_parent\nend_with_parent({os.getpid()})\nwhile True: pass"
    with contextlib.ExitStack() as stack:
        for _ in range(busy):
            started = stack.enter_context(subprocess.Popen((sys.executable, "-c", code)))
            stack.callback(started.kill)
        yield


@contextlib.contextmanager
def clients_go_first(note: Callable[[str], None]) -> Iterator[None]:
    """The clients, which are the calling thread, get a core at once when they want one, else their own lag would be measured."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        note("  the clients may lag: they may not go before other processes (SCHED_FIFO)")
        yield
        return
    note("  the clients go before other processes (SCHED_FIFO)")
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


@contextlib.asynccontextmanager
async def serving(engine: str, folder: Path) -> AsyncIterator[LocalCluster]:
    """Two encoders and a text instance. The engines that sleep bear about 30 text requests/s, and 25 images/s."""
    options: dict[str, tuple[str, ...]] = {}
    if engine == "delay":
        profiles = folder / "profiles"
        encoder = synthetic_encoder_profile(pass_s=0.04, token_s=0.0025, load_s=0.1)
        write_profile(profiles / "encoder.json", encoder)
        decoder = synthetic_decoder_profile(step_s=0.005, sequence_s=0.001, prefill_token_s=0.0002, load_s=0.1)
        write_profile(profiles / "decoder.json", decoder)
        options = dict.fromkeys(("encoder", "text"), ("--delay-profile", str(profiles)))
    async with LocalCluster(roles="E:2,PD:1", options=options, log_dir=folder / "logs") as cluster:
        yield cluster


async def measured(engine: str, mix: str, settings: Settings, note: Callable[[str], None]) -> list[dict[str, Any]]:
    """One series of loads for each number of busy processes and range of deadlines."""
    rng = random.Random(f"{settings.seed} {engine} {mix}")
    bodies = Bodies(mix, rng)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
        async with serving(engine, Path(folder)) as cluster, httpx.AsyncClient(trust_env=False) as http:
            gateway = Gateway(int(cluster.targets["gateway"].rpartition(":")[2]))
            watch = Watch(cluster, http)
            for busy in settings.busy:
                with cores_taken(busy), clients_go_first(note) if busy else contextlib.nullcontext():
                    said = {"engine": engine, "mix": mix, "busy": busy}
                    found += [said | run for run in await series(said, gateway, bodies, watch, settings, rng, note)]
            gateway.close()
    return found


async def series(
    said: Mapping[str, object],
    gateway: Gateway,
    bodies: Bodies,
    watch: Watch,
    settings: Settings,
    rng: random.Random,
    note: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The capacity, then the loads, for each range of deadlines."""
    found: list[dict[str, Any]] = []
    await capacity(gateway, bodies, settings.capacity_s / 4)
    bears = await capacity(gateway, bodies, settings.capacity_s)
    # Beside busy processes so many at once are an overload.
    many_open = bears if said["busy"] else await capacity(gateway, bodies, settings.capacity_s, MANY_OPEN)
    note(
        f"{', '.join(f'{name} {value}' for name, value in said.items())}: capacity {bears:.1f} answers/s, "
        f"{many_open:.1f} with {MANY_OPEN} open"
    )
    for deadlines_s in settings.deadlines_s:
        note(f"  deadlines of {deadlines_s[0]:g} to {deadlines_s[1]:g} s")
        rows: list[Row] = []
        for load in settings.loads:
            await watch.look()
            seconds, began_s = settings.seconds_of(load), time.perf_counter()
            sent = await offered(gateway, bodies, load * bears, seconds, deadlines_s, rng, come_back=settings.come_back)
            seen = await watch.look()
            rows.append(Row.of(load, load * bears, settings, sent, seen, time.perf_counter() - began_s))
            note(_line(rows[-1]))
        bore = {"deadlines_s": deadlines_s, "capacity": round(bears, 2), "capacity_many_open": round(many_open, 2)}
        found.append(bore | _kept(rows, note) | {"rows": [asdict(row) for row in rows]})
    return found


def _kept(rows: Sequence[Row], note: Callable[[str], None]) -> dict[str, Any]:
    """The rates of answers in time, by load, over the highest of them."""
    peak = max(row.goodput for row in rows)
    kept = {f"{row.load:g}": round(row.goodput / peak, 3) for row in rows} if peak else {}
    note(
        f"  of the peak, {peak:.1f} in time/s: "
        + ", ".join(f"{share:.0%} at {load} times" for load, share in kept.items())
    )
    return {"peak": peak, "kept": kept}


def _line(row: Row) -> str:
    cores = " ".join(f"{name} {share:.2f}" for name, share in row.cores.items() if share >= 0.01)
    again = ""
    if (retried := row.again) is not None and retried.tries:
        again = (
            f"; of {retried.tries} that waited their Retry-After (P50 {retried.retry_after_p50_s:.0f} s) {retried.admitted / retried.tries:.1%} admitted and "
            f"{retried.answered_in_time / retried.tries:.1%} in time; of {retried.unread} refused unread {retried.unread_admitted} admitted"
        )
    return (
        f"  {row.load:g} times: {row.sent} sent, {row.goodput:.1f}/s in time (P50 {row.answer_p50_ms:.0f} ms, P99 {row.answer_p99_ms:.0f}), "
        f"{row.refused} refused after {row.refusal_p50_ms:.1f} ms (P99 {row.refusal_p99_ms:.0f}), of which {row.unread} unread (P99 {row.unread_p99_ms:.0f}), {row.late} late, of which {row.begun} begun, "
        f"{row.encoded_in_vain} images in vain, {row.broken} broken, {row.overdue} overdue (P99 {row.overdue_p99_ms:.0f} ms), of which {row.overdue_answers} answers{again}; clients lag {row.sent_late_p99_ms:.1f} ms (P99); cores: {cores}"
    )


def main() -> None:
    default = Settings()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="a few seconds of one mixture: shows that it works")
    parser.add_argument("--engines", default=",".join(default.engines), help="of demo and delay, separated by commas")
    parser.add_argument("--mixes", default=",".join(default.mixes), help="of text and mixed, separated by commas")
    parser.add_argument(
        "--loads",
        default=",".join(f"{load:g}" for load in default.loads),
        help="multiples of the capacity, separated by commas",
    )
    parser.add_argument("--seconds", type=float, default=default.seconds, help="of each load above 1; of others half")
    parser.add_argument(
        "--deadlines", default="3-5", help="in seconds, from least to most, separated by commas: 0.5-1,3-5"
    )
    parser.add_argument(
        "--come-back", action="store_true", help="who is refused waits its Retry-After and tries once more"
    )
    parser.add_argument(
        "--busy",
        help="other processes that take the cores at nice 0, separated by commas; by default 0,4,8, with --quick 0",
    )
    arguments = parser.parse_args()
    settings = Settings(
        tuple(arguments.engines.split(",")),
        tuple(arguments.mixes.split(",")),
        tuple(map(float, arguments.loads.split(","))),
        arguments.seconds,
    )
    if arguments.quick:
        settings = QUICK
    deadlines_s = [tuple(map(float, pair.split("-"))) for pair in arguments.deadlines.split(",")]
    settings = replace(
        settings,
        deadlines_s=tuple((least, most) for least, most in deadlines_s),
        come_back=arguments.come_back,
        busy=settings.busy if arguments.busy is None else tuple(map(int, arguments.busy.split(","))),
    )
    ending.by_sigterm()
    result = uvloop.run(run(settings))
    write_figures(arguments.json, result)


async def run(settings: Settings) -> dict[str, Any]:
    described = machine.describe()
    print(f"{described['cpu']}, {described['cores']} cores; {settings}", flush=True)

    def note(line: str) -> None:
        print(line, flush=True)

    found: list[dict[str, Any]] = []
    for engine in settings.engines:
        for mix in settings.mixes:
            found += await measured(engine, mix, settings, note)
    return {"machine": described, "settings": asdict(settings), "runs": found}


if __name__ == "__main__":
    main()
