"""``triptych workload record``: follows the routers of a cluster, and writes a line for each request that has ended."""

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, TextIO

import httpx
from rich.console import Console

from triptych.cli import running
from triptych.cli.files import make_directory_of
from triptych.cli.outcome import CliError
from triptych.workload.recorded import clip_of, line_of, seconds_of, size_of
from triptych.workload.requests import MAX_CLIPS, MAX_IMAGES, TEMPLATE_TOKENS, Planned

_EVERY_S = 1.0
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Job:
    """Options of a recording. ``admin`` are addresses of routers' admin ports; without any, those of the local cluster at ``url``."""

    out: Path
    url: str
    admin: Sequence[str]
    duration_s: float | None
    patience_s: float = 15.0
    """How long no router may answer until the recording ends: one that is restarted answers again sooner."""

    def check(self) -> None:
        """Raises CliError for a file that cannot be written, or has something in it."""
        if not self.out.name.endswith(".jsonl"):
            raise CliError(f"{self.out}: recordings are JSON lines; name a file that ends in .jsonl", caller=True)
        if self.out.exists() and self.out.stat().st_size:
            raise CliError(f"{self.out} exists: name another file, or remove it", caller=True)
        make_directory_of(self.out)


@dataclass(slots=True)
class _Source:
    """A router that is followed by its admin port."""

    url: str
    epoch: int = -1
    position: int = 0
    totals: Mapping[str, int] = field(default_factory=dict)
    """The source's own counts at the last look."""
    running: Sequence[float] = ()
    """When those came that ran at the last look, seconds since the recording's start."""
    silent_since_s: float | None = None


class _Recording:
    """Counts of what has been written so far, and of what could not be."""

    def __init__(
        self, file: TextIO, sources: Sequence[_Source], start_s: float, duration_s: float | None, console: Console
    ) -> None:
        self._file = file
        self._console = console
        self._sources = sources
        self._start_s = start_s
        self._lasts_s = inf if duration_s is None else duration_s
        self._tenants: dict[str, str] = {}
        self.written: Counter[str] = Counter()
        """By outcome."""
        self.left_out: Counter[str] = Counter()
        """Requests that are not in the file, by the reason; in the words of the summary."""
        self.missed = 0
        self.faults: list[str] = []

    async def look(self, http: httpx.AsyncClient) -> None:
        """Write what has ended at each router since the last look."""
        for source in self._sources:
            await self._look_at(source, http)
        self._file.flush()

    async def _look_at(self, source: _Source, http: httpx.AsyncClient) -> None:
        now_s = asyncio.get_running_loop().time
        while True:
            asked_s = now_s()
            document = await _recent(http, source.url, source.position)
            if isinstance(document, str):
                if source.silent_since_s is None:
                    source.silent_since_s = asked_s
                    self._say(f"the router at {source.url} does not answer; it is asked again")
                return
            if source.silent_since_s is not None:
                source.silent_since_s = None
                self._say(f"the router at {source.url} answers again")
            answered_s = (asked_s + now_s()) / 2
            if document["epoch"] != source.epoch:
                fault = f"the router at {source.url} was restarted: what had ended there since the last look is missing"
                self.faults.append(fault)
                self._say(fault)
                source.epoch, source.position, source.totals = document["epoch"], 0, {}
                continue
            self._take(source, document, answered_s)
            if not document["left"]:
                return

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def silent_s(self, now_s: float) -> float:
        """For how long no router has answered; 0 while one does."""
        since_s = [source.silent_since_s for source in self._sources]
        return max(0.0, min(now_s - (now_s if at_s is None else at_s) for at_s in since_s))

    def _take(self, source: _Source, document: dict[str, Any], answered_s: float) -> None:
        totals = {reason: document[name] for reason, name in _COUNTED.items()}
        for reason, total in totals.items():
            self.left_out[reason] += total - source.totals.get(reason, 0)
        self.missed += document["missed"]
        source.totals, source.position = totals, document["position"]
        source.running = [answered_s - for_s - self._start_s for for_s in document["running_for_s"]]
        for entry in document["requests"]:
            arrival_s = answered_s - entry["came_s"] - self._start_s
            if arrival_s < 0:
                self.left_out[_EARLIER] += 1
            elif arrival_s <= self._lasts_s:
                planned = self._planned(entry, arrival_s)
                self._file.write(line_of(planned, entry["outcome"]))
                self.written[entry["outcome"]] += 1

    def _planned(self, entry: dict[str, Any], arrival_s: float) -> Planned:
        """Tenants are numbered in the order in which they appear, as their names are those of API keys."""
        name = entry["tenant"]
        tenant = self._tenants.setdefault(name, f"tenant-{len(self._tenants) + 1}") if name else ""
        return Planned(
            arrival_s,
            max(1, entry["prompt_tokens"] - entry["item_tokens"] - TEMPLATE_TOKENS),
            tuple(size_of(*size) for size in entry["images"][:MAX_IMAGES]),
            entry["output_tokens"] // max(1, entry["choices"]),
            tuple(
                clip_of(size_of(*clip["size"]), clip["seconds"], clip["frames"]) for clip in entry["videos"][:MAX_CLIPS]
            ),
            tuple(seconds_of(seconds) for seconds in entry["sounds_s"][:MAX_CLIPS]),
            tenant,
        )

    @property
    def running(self) -> int:
        """Requests of the recorded time that had not ended at the last look."""
        answering = [source for source in self._sources if source.silent_since_s is None]
        return sum(0 <= arrival_s <= self._lasts_s for source in answering for arrival_s in source.running)

    def close(self) -> None:
        """Note what is still open."""
        if self.running:
            self.left_out[_RUNNING] += self.running
        for source in self._sources:
            if source.silent_since_s is not None:
                self.faults.append(
                    f"the router at {source.url} no longer answers: what ended there since "
                    f"{max(0.0, source.silent_since_s - self._start_s):.0f} s is missing"
                )


_COUNTED = {"were refused": "refused", "failed or left before their sizes were known": "unprepared"}
_EARLIER, _RUNNING = "had come before", "still ran"


async def record(job: Job, console: Console) -> bool:
    """Record until the duration is over, or SIGINT or SIGTERM, which cancel it. Returns whether nothing was missed. Raises CliError.

    After the duration it waits for the requests that came within it. Without one, a signal is the end; else it raises CancelledError. It
    also ends once no router has answered for ``patience_s``.
    """
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S) as http:
        sources = await _sources(job, http)
        try:
            with job.out.open("w") as file:
                recording = _Recording(file, sources, loop.time(), job.duration_s, console)
                names = ", ".join(source.url for source in sources)
                until = "" if job.duration_s is None else f", for {job.duration_s:g} s"
                console.print(f"recording the requests of {names}{until}; Ctrl-C ends it", soft_wrap=True)
                with _cancelled_by_signals():
                    is_whole = await _follow(recording, http, console, job)
        except OSError as error:
            raise CliError(f"cannot write {job.out}: {error.strerror}", caller=False) from None
    _summarize(recording, job.out, console)
    if not is_whole and job.duration_s is not None:
        raise asyncio.CancelledError
    return not (recording.missed or recording.faults)


@contextmanager
def _cancelled_by_signals() -> Iterator[None]:
    """SIGINT cancels the task where a shell's background jobs ignore it too."""
    loop, task, signals = asyncio.get_running_loop(), asyncio.current_task(), (signal.SIGINT, signal.SIGTERM)
    assert task is not None  # noqa: S101 - in a task
    for number in signals:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _follow(recording: _Recording, http: httpx.AsyncClient, console: Console, job: Job) -> bool:
    """Returns whether it ended before a signal."""
    is_whole = True
    try:
        await _until(recording, http, console, job)
    except asyncio.CancelledError:
        is_whole = False
        if (current := asyncio.current_task()) is not None:
            current.uncancel()
        await recording.look(http)
    recording.close()
    return is_whole


async def _until(recording: _Recording, http: httpx.AsyncClient, console: Console, job: Job) -> None:
    loop = asyncio.get_running_loop()
    end_s = inf if job.duration_s is None else loop.time() + job.duration_s
    while loop.time() < end_s:
        await asyncio.sleep(min(_EVERY_S, end_s - loop.time()))
        await recording.look(http)
        if recording.silent_s(loop.time()) >= job.patience_s:
            console.print(f"no router has answered for {job.patience_s:g} s: the recording ends")
            return
    if recording.running:
        console.print(f"waiting for {recording.running} requests that still run; Ctrl-C leaves them out")
    while recording.running:
        await asyncio.sleep(_EVERY_S)
        await recording.look(http)


async def _sources(job: Job, http: httpx.AsyncClient) -> list[_Source]:
    """The routers to follow, each at its present position. Raises CliError if there is none, or one does not answer."""
    local = {} if job.admin else await running.find(job.url, http)
    given = list(job.admin) or [
        process.admin for name, process in local.items() if name.endswith(("router", "gateway"))
    ]
    sources = []
    for url in dict.fromkeys(address.rstrip("/") for address in given):
        document = await _recent(http, url)
        if not isinstance(document, str):
            totals = {reason: document[name] for reason, name in _COUNTED.items()}
            sources.append(_Source(url, document["epoch"], document["position"], totals))
        elif job.admin:
            raise CliError(f"--admin {url}: {document}", caller=False)
    if not sources:
        raise CliError(
            f"no router of a local cluster at {job.url} is found: name its admin port, --admin http://HOST:PORT",
            caller=True,
        )
    return sources


async def _recent(http: httpx.AsyncClient, url: str, position: int | None = None) -> dict[str, Any] | str:
    """Ask what a router's admin port says of requests since a position, or why there is no such answer."""
    try:
        response = await http.get(f"{url}/requests", params={} if position is None else {"after": position})
        if response.status_code == httpx.codes.NOT_FOUND:
            return "it is not the admin port of a router"
        response.raise_for_status()
        document = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return f"it does not answer as the admin port of a router does: {error or type(error).__name__}"
    is_known = isinstance(document, dict) and {"epoch", "position", "left", "requests"} <= document.keys()
    return document if is_known else "it is not the admin port of a router"


def _summarize(recording: _Recording, out: Path, console: Console) -> None:
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(recording.written.items())) or "none"
    console.print(f"{recording.written.total()} requests are in {out} ({outcomes})", soft_wrap=True)
    for line in _lacking(recording):
        console.print(line, soft_wrap=True)


def _lacking(recording: _Recording) -> Iterator[str]:
    left_out = {reason: count for reason, count in recording.left_out.items() if count}
    if left_out:
        yield "not in it: " + ", ".join(f"{count} that {reason}" for reason, count in left_out.items())
    if recording.missed:
        yield (
            f"missed: {recording.missed} that a router no longer kept when it was asked; "
            "--history-requests of the router keeps more"
        )
    yield from recording.faults
