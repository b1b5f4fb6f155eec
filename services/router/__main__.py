"""``python -m services.router``: read the settings, run until told to stop."""

import sys

from triptych.runtime.process import run
from triptych.runtime.settings import load_or_exit
from triptych.runtime.telemetry import Telemetry

from .app import app
from .settings import RouterSettings


def main() -> None:
    settings = load_or_exit(RouterSettings, sys.argv[1:])
    telemetry = Telemetry.of("router", settings)
    run(
        "router",
        app(settings, telemetry),
        log_level=settings.log_level,
        drain_s=settings.drain_s,
        log_format=settings.log_format,
        telemetry=telemetry,
    )


if __name__ == "__main__":
    main()
