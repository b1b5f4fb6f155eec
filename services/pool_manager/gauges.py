"""The pool manager's gauges, read at every scrape."""

from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import Metric

from triptych.runtime.metrics import Metrics, gauge

from .control import Control


class State(Protocol):
    """The pool manager's current numbers."""

    @property
    def version(self) -> int: ...

    @property
    def watchers(self) -> int: ...

    @property
    def control(self) -> Control: ...

    def members_by_state(self) -> dict[tuple[str, ...], int]: ...


def watch(metrics: Metrics, state: State) -> None:
    """Read ``state`` at every scrape."""

    def read() -> Iterable[Metric]:
        yield gauge("triptych_pool_members", "Members by role and state", state.members_by_state(), ("role", "state"))
        yield gauge("triptych_pool_version", "Version of the list of members", state.version)
        yield gauge("triptych_pool_watchers", "Routers and gateways that watch", state.watchers)
        yield from state.control.metrics()

    metrics.watch(read)
