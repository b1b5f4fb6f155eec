"""Expiry of a process's certificates: in its metrics, and in its log before it is too late."""

import asyncio
import logging
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric

from triptych.ports import Clock
from triptych.runtime.clock import unix_s
from triptych.runtime.metrics import Metrics, gauge
from triptych.runtime.tls import Validity

logger = logging.getLogger(__name__)

_WARN_FROM = 0.2
"""Share of its validity that a certificate has left when the first warning is logged. Whoever renews in time does so before."""
_LOOK_S = 5.0
_DAY_S = 86_400.0


class TlsExpiry:
    """Watches certificates. Another warning follows whenever half of the time has passed, and an error at the end."""

    def __init__(self, metrics: Metrics, *, clock: Clock = unix_s) -> None:
        self._clock = clock
        self._watched: dict[str, Callable[[], Validity]] = {}
        self._next: dict[str, tuple[Validity, float]] = {}
        """The time left at which the next line is due, of the certificate that is in use."""
        metrics.watch(self._read)

    def watch(self, name: str, validity: Callable[[], Validity]) -> None:
        """``name`` is what the certificate is for."""
        self._watched[name] = validity

    async def run(self) -> None:
        """Look now and then, which also takes new files into use, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_S)

    def look(self) -> None:
        for name, current in self._watched.items():
            validity = current()
            left_s = validity.ends_s - self._clock()
            known, due_s = self._next.get(name, (None, 0.0))
            if known != validity:
                due_s = _WARN_FROM * (validity.ends_s - validity.begins_s)
            if left_s <= due_s:
                if left_s > 0:
                    logger.warning("the certificate for %s expires in %s", name, _shown(left_s))
                else:
                    logger.error("the certificate for %s has expired: peers refuse it", name)
                due_s = left_s / 2 if left_s > 0 else float("-inf")
            self._next[name] = validity, due_s

    def _read(self) -> Iterable[Metric]:
        if self._watched:
            yield gauge(
                "triptych_tls_certificate_expiry_timestamp_seconds",
                "When a certificate of this process expires, in seconds since 1970",
                {(name,): validity().ends_s for name, validity in self._watched.items()},
                ("certificate",),
            )


def _shown(seconds: float) -> str:
    return f"{seconds / _DAY_S:.1f} days" if seconds >= _DAY_S else f"{seconds / 3600:.1f} hours"
