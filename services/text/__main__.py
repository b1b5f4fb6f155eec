"""``python -m triptych.services.text``: read the settings and run until stopped."""

from contextlib import AbstractAsyncContextManager

from triptych.domain.stage import Stage
from triptych.runtime.process import App, main
from triptych.runtime.telemetry import Telemetry

from .app import app
from .settings import TextSettings


def _app(settings: TextSettings, telemetry: Telemetry) -> AbstractAsyncContextManager[App]:
    if not settings.widest.serves(Stage.ENCODE):
        return app(settings, telemetry)
    from .mounted import app as with_encoder  # the only module that imports the encoder

    return with_encoder(settings, telemetry)


if __name__ == "__main__":
    main("text", TextSettings, _app)
