"""Simulations never wait: what they take is the machine's time, a multiple of the usual where it is busy."""

from collections.abc import Iterable
from pathlib import Path

import pytest

TIMEOUT_S = 240


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """A longer limit for tests of this folder that have none of their own."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
