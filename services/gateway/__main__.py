"""``python -m triptych.services.gateway``: read the settings and run until stopped."""

import sys
from contextlib import AbstractAsyncContextManager

from triptych.runtime.process import App, main
from triptych.runtime.telemetry import Telemetry

from .app import app
from .settings import GatewaySettings


def _app(settings: GatewaySettings, telemetry: Telemetry) -> AbstractAsyncContextManager[App]:
    if not settings.mount_router:
        return app(settings, telemetry)
    try:
        from . import mounted  # the router's dependencies are optional
    except ModuleNotFoundError as error:
        raise SystemExit(f"gateway: --mount-router needs what a router needs (the extra 'router'): {error}") from None
    return mounted.app(settings, telemetry)


SWITCH_INTERVAL_S = 0.0005
"""How long a parsing thread may hold the GIL while the event loop waits for it, which it does after every system call.
With Python's default of 5 ms, ``/health`` can take a tenth of a second."""

if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    main("gateway", GatewaySettings, _app)
