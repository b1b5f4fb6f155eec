"""``python -m services.gateway``: read the settings, run until told to stop."""

import sys

from triptych.runtime.process import run
from triptych.runtime.settings import load_or_exit

from .app import app
from .settings import GatewaySettings


def main() -> None:
    settings = load_or_exit(GatewaySettings, sys.argv[1:])
    run("gateway", app(settings), log_level=settings.log_level, drain_s=settings.drain_s)


if __name__ == "__main__":
    main()
