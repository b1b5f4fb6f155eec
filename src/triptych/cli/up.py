"""``triptych up``: a local cluster in the foreground."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live

from triptych.cli.cluster import Event, Exit, LocalCluster
from triptych.cli.decisions import follow
from triptych.cli.live import LiveView, keep_fresh
from triptych.cli.running import noted
from triptych.machine.process_pool_events import (
    GaveUp,
    KillProcess,
    ProcessEnded,
    ProcessReady,
    StartProcess,
    StopProcess,
)
from triptych.runtime.tasks import TaskScope


async def up(cluster: LocalCluster, console: Console, *, live: bool = False) -> int:
    """Run the cluster until a signal, or until the gateway or the router cannot be started again; return the exit status: 0
    after a signal, but 128 plus its number if the cluster was not ready yet, and 1 if it cannot run.

    ``live`` shows a live view on a terminal; otherwise each event is a line.

    The first SIGINT, SIGTERM or SIGHUP stops the cluster in order; a second SIGINT or SIGTERM stops it at once. SIGHUP
    does not: a closed terminal sends two, one by the system and one by the shell. A SIGHUP that is ignored when this
    begins, as by ``nohup``, stays ignored. Raises ClusterError.
    """
    loop = asyncio.get_running_loop()
    started_s = loop.time()

    def show_ready(name: str) -> None:
        console.print(_process(cluster, name, loop.time() - started_s), soft_wrap=True)

    cluster.on_ready = show_ready
    cluster.on_start = lambda: console.print(f"starting {', '.join(cluster.targets)} ...", soft_wrap=True)
    ready = False
    for line in cluster.overridden_variables:
        console.print(line, soft_wrap=True)
    with _stopped_by_signals(cluster, console) as signals:
        try:
            async with cluster:
                ready = True
                _show(cluster, console, loop.time() - started_s)
                with noted(cluster):
                    if live and console.is_terminal:
                        return await _watch_live(cluster, console)
                    return await _watch(cluster, console)
        except asyncio.CancelledError:
            if not signals:
                raise
            if cluster.kept_logs is not None:
                console.print(f"a process failed: the logs of all are in {cluster.kept_logs}", soft_wrap=True)
            console.print("stopped")
            return 0 if ready else 128 + signals[0]


@contextlib.contextmanager
def _stopped_by_signals(cluster: LocalCluster, console: Console) -> Iterator[Sequence[int]]:
    """The numbers of the signals that have come; the first cancels the task."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    come: list[int] = []

    def on_signal(number: signal.Signals) -> None:
        come.append(number)
        if len(come) == 1 and task is not None:
            task.cancel()
            console.print("\nstopping; press Ctrl-C again to stop at once")
        elif number is not signal.SIGHUP:
            cluster.kill_all()

    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        signals.append(signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield come
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        if come:  # the process ends; the second signal of a closed terminal may come as late as this
            signal.signal(signal.SIGHUP, signal.SIG_IGN)


async def _watch(cluster: LocalCluster, console: Console) -> int:
    def tell(line: str) -> None:
        console.print(line, soft_wrap=True)

    async with TaskScope("watch", limit=1) as scope:
        scope.spawn(follow(cluster.manager_target, tell), name="decisions")
        while True:
            event = await cluster.next_event()
            for line in _told(cluster, event):
                tell(line)
            if isinstance(event, Exit):
                tell(f"{len(cluster.processes)} processes continue: {', '.join(cluster.processes)}")
            elif (ending := _ending(cluster, event)) is not None:
                tell(ending)
                return 1


async def _watch_live(cluster: LocalCluster, console: Console) -> int:
    view = LiveView(cluster)
    async with TaskScope("live", limit=2) as scope:
        with Live(view, console=console, auto_refresh=False, transient=True) as live:
            scope.spawn(keep_fresh(view, live), name="refresh")
            scope.spawn(follow(cluster.manager_target, view.event), name="decisions")
            while True:
                event = await cluster.next_event()
                for line in _told(cluster, event):
                    view.event(line)
                live.refresh()
                if (ending := _ending(cluster, event)) is not None:
                    break
    for line in (*_told(cluster, event), ending):
        console.print(line, soft_wrap=True)
    return 1


def _told(cluster: LocalCluster, event: Event) -> Iterator[str]:
    """An event as lines."""
    match event:
        case Exit():
            yield f"{event}; its log is {cluster.log_dir / event.name}.log" if event.code else f"{event}"
            if consequence := cluster.consequence(event):
                yield consequence
        case StartProcess(_, process, reason):
            yield f"starting {process} ({reason})"
        case ProcessReady(process):
            yield f"{process} is ready"
        case StopProcess(process, reason):
            yield f"stopping {process} ({reason})"
        case ProcessEnded(process, _):
            yield f"{process} has stopped"
        case KillProcess(process, reason):
            yield f"killing {process} ({reason})"
        case GaveUp(pool, reason):
            yield f"{pool}: {reason}; logs are in {cluster.log_dir}"


def _ending(cluster: LocalCluster, event: Event) -> str | None:
    """Why the cluster stops after this event, if it does."""
    if isinstance(event, GaveUp) and event.pool in cluster.vital:
        return f"the cluster cannot run without the {event.pool}: stopping"
    return None


def _process(cluster: LocalCluster, name: str, took_s: float) -> str:
    where = f"pid {cluster.processes.get(name, 0):<8} {cluster.targets[name]:<16} metrics {cluster.admin_urls[name]}/metrics"
    width = max(map(len, cluster.targets))
    return f"  {name:<{width}} ready after {took_s:>5.1f} s  {where}"


def _show(cluster: LocalCluster, console: Console, took_s: float) -> None:
    console.print(f"ready in {took_s:.1f} s at {cluster.url}", style="bold")
    routers = cluster.router_targets
    several = len(routers) > 1
    at = ", ".join(f"{target} ({model})" if several else target for model, target in routers.items())
    console.print(f"gRPC, for the SDK, at {at}", soft_wrap=True)
    console.print(f'try: triptych chat "Hello!" --url {cluster.url}', soft_wrap=True)
