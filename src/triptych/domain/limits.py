"""Limits that are groups of settings: frozen dataclasses of whole numbers, each declared with what keeps to it."""

from dataclasses import fields
from typing import Any


def check_positive(limits: Any) -> None:
    """Raises ValueError, which names the first that is below 1."""
    for name in (field.name for field in fields(limits)):
        if getattr(limits, name) < 1:
            raise ValueError(f"{name} is {getattr(limits, name)}, it has to be at least 1")
