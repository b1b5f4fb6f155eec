"""``python -m services.text``: read the settings, run until told to stop."""

import sys

from triptych.runtime.process import run
from triptych.runtime.settings import load_or_exit
from triptych.runtime.telemetry import Telemetry

from .app import app
from .settings import TextSettings


def main() -> None:
    settings = load_or_exit(TextSettings, sys.argv[1:])
    telemetry = Telemetry.of("text", settings)
    run(
        "text",
        app(settings, telemetry),
        log_level=settings.log_level,
        drain_s=settings.drain_s,
        log_format=settings.log_format,
        telemetry=telemetry,
    )


if __name__ == "__main__":
    main()
