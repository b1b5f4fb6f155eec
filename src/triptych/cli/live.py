"""Live view of ``triptych up``: processes, load, requests and events."""

import asyncio
from collections import deque
from collections.abc import Mapping
from urllib.parse import urlsplit

import httpx
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from triptych.cli.cluster import LocalCluster
from triptych.cli.load import load_line
from triptych.cli.metrics import Samples, scrape
from triptych.domain.scaling import ProcessPhase

_REFRESH_S = 1.0
_EVENTS = 6


class LiveView:
    """The displayed state of a cluster. ``refresh`` polls the processes."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._loads: Mapping[str, Samples | None] = {}
        self._events: deque[str] = deque(maxlen=_EVENTS)
        self._finished: float | None = None
        self._rate = 0.0

    def event(self, line: str) -> None:
        """Show one more line below the processes; only the last ones stay."""
        self._events.append(line)

    async def refresh(self, http: httpx.AsyncClient, since_s: float) -> None:
        """Draw again. ``since_s`` is the time since the last refresh, for the rate of requests."""
        admin = {name: url for name, url in self._cluster.admin_urls.items() if name in self._cluster.processes}
        self._loads = dict(
            zip(admin, await asyncio.gather(*(scrape(http, url) for url in admin.values())), strict=True)
        )
        finished = self._over_routers("triptych_requests_total")
        if finished is not None and self._finished is not None:
            self._rate = max(0.0, finished - self._finished) / since_s
        self._finished = self._finished if finished is None else finished

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [
            Text.assemble(("triptych ", "bold"), f"at {self._cluster.url}, gRPC at {self._cluster.router_target}"),
            self._requests(),
            self._processes(),
        ]
        if self._events:
            parts.append(Text("events", style="bold"))
            parts += [Text(f"  {line}", overflow="fold") for line in self._events]
        parts.append(Text("Ctrl-C stops", style="dim"))
        return Group(*parts)

    def _over_routers(self, metric: str, **labels: str) -> float | None:
        """A metric's sum over all routers, or of the gateway where the router runs there; None if none answers."""
        routers = [samples for name, samples in self._loads.items() if name.endswith("router")]
        known = [samples for samples in routers or [self._loads.get("gateway")] if samples is not None]
        return sum(samples.total(metric, **labels) or 0.0 for samples in known) if known else None

    def _requests(self) -> Text:
        running = self._over_routers("triptych_requests_running")
        if running is None:
            return Text("requests   -", style="dim")
        failed = self._over_routers("triptych_requests_total", outcome="failed")
        refused = self._over_routers("triptych_requests_refused_total")
        line = f"requests   {running:g} running, {self._finished or 0:g} ended ({self._rate:.1f}/s)"
        return Text(f"{line}, {failed or 0:g} failed, {refused or 0:g} refused")

    def _processes(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        table.add_column("process", no_wrap=True)
        table.add_column("pid", justify="right", no_wrap=True)
        for name in ("address", "metrics", "state"):
            table.add_column(name, no_wrap=True)
        table.add_column("load")
        alive = self._cluster.processes
        targets, admin_urls = self._cluster.targets, self._cluster.admin_urls
        for name in targets:
            samples = self._loads.get(name)
            phase = self._cluster.scaler.phase(name)
            up = phase is ProcessPhase.RUNNING
            state = Text("up" if up else str(phase or "gone"), style="green" if up else "bold red")
            load = load_line(samples) if samples is not None and name in alive else ""
            metrics = f":{urlsplit(admin_urls[name]).port}"  # a whole URL leaves no room for the load
            table.add_row(name, str(alive.get(name, "")), targets[name], metrics, state, load)
        return table


async def keep_fresh(view: LiveView, live: Live) -> None:
    """Refresh until cancelled."""
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(trust_env=False) as http:
        last_s = loop.time()
        while True:
            await asyncio.sleep(_REFRESH_S)
            now_s = loop.time()
            await view.refresh(http, now_s - last_s)
            last_s = now_s
            live.refresh()
