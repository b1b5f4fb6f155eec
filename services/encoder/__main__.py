"""``python -m triptych.services.encoder``: read the settings and run until stopped."""

from triptych.runtime.process import main

from .app import app
from .settings import EncoderSettings

if __name__ == "__main__":
    main("encoder", EncoderSettings, app)
