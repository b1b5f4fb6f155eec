"""``python -m services.gateway``: read the settings, run until told to stop."""

from contextlib import AbstractAsyncContextManager

from triptych.runtime.process import App, main
from triptych.runtime.telemetry import Telemetry

from .app import app
from .settings import GatewaySettings


def _app(settings: GatewaySettings, telemetry: Telemetry) -> AbstractAsyncContextManager[App]:
    if not settings.mount_router:
        return app(settings, telemetry)
    try:
        from . import mounted  # what a router needs is not installed with every gateway
    except ModuleNotFoundError as error:
        raise SystemExit(f"gateway: --mount-router needs what a router needs (triptych[router]): {error}") from None
    return mounted.app(settings, telemetry)


if __name__ == "__main__":
    main("gateway", GatewaySettings, _app)
