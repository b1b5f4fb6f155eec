"""``python -m triptych.services.router``: read the settings and run until stopped."""

from triptych.runtime.process import main

from .app import app
from .settings import RouterSettings

if __name__ == "__main__":
    main("router", RouterSettings, app)
