"""Metrics of orders to switch, as they end."""

from triptych.machine.pool_manager.member_events import SwitchEnded, SwitchOutcome, SwitchServed
from triptych.runtime.metrics import Metrics


class Record:
    """Receives what becomes of orders to switch. This one does nothing with it."""

    def switch_ended(self, switch: SwitchEnded) -> None: ...

    def switch_served(self, switch: SwitchServed) -> None: ...


NO_RECORD = Record()


class ManagerRecord(Record):
    """Writes to metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._switches = metrics.counter(
            "triptych_pool_switches",
            "Orders to an instance to switch to another role, by what came of them",
            ("model_name", "from_role", "to_role", "outcome"),
        )
        self._seconds = metrics.histogram(
            "triptych_pool_switch_seconds",
            "From an order to switch until the instance reports that it serves the new role",
        )
        self._first_requests = metrics.histogram(
            "triptych_pool_switch_first_request_seconds",
            "From an order to switch until each stage that it opened has served a request or item",
        )

    def switch_ended(self, switch: SwitchEnded) -> None:
        self._switches.labels(switch.model, switch.source.value, switch.target.value, switch.outcome.value).inc()
        if switch.outcome is SwitchOutcome.OBEYED:
            self._seconds.observe(switch.after_s)

    def switch_served(self, switch: SwitchServed) -> None:
        self._first_requests.observe(switch.after_s)
