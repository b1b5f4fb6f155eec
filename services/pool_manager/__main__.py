"""``python -m triptych.services.pool_manager``: read the settings and run until stopped."""

from triptych.runtime.process import main

from .app import app
from .settings import PoolManagerSettings

if __name__ == "__main__":
    main("pool_manager", PoolManagerSettings, app)
