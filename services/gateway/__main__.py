"""``python -m services.gateway``: read the settings, run until told to stop."""

import sys
from contextlib import AbstractAsyncContextManager

from triptych.runtime.process import App, run
from triptych.runtime.settings import load_or_exit
from triptych.runtime.telemetry import Telemetry

from .app import app
from .settings import GatewaySettings


def main() -> None:
    settings = load_or_exit(GatewaySettings, sys.argv[1:])
    telemetry = Telemetry.of("gateway", settings)
    run(
        "gateway",
        _app(settings, telemetry),
        log_level=settings.log_level,
        drain_s=settings.drain_s,
        log_format=settings.log_format,
        telemetry=telemetry,
    )


def _app(settings: GatewaySettings, telemetry: Telemetry) -> AbstractAsyncContextManager[App]:
    if not settings.mount_router:
        return app(settings, telemetry)
    try:
        from . import mounted  # what a router needs is not installed with every gateway
    except ModuleNotFoundError as error:
        raise SystemExit(f"gateway: --mount-router needs what a router needs (triptych[router]): {error}") from None
    return mounted.app(settings, telemetry)


if __name__ == "__main__":
    main()
