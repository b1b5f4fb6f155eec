"""``python -m triptych.services.text``: read the settings and run until stopped."""

from triptych.runtime.process import main

from .app import app
from .settings import TextSettings

if __name__ == "__main__":
    main("text", TextSettings, app)
