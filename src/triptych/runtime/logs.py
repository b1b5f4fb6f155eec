"""Logs: one line per event on standard error, never with media, prompts or secrets in them."""

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def configure(level: str) -> None:
    """Set up the process's logging; ``level`` as in the settings."""
    logging.basicConfig(level=level, format=FORMAT, stream=sys.stderr, force=True)
