"""Simulations never wait: what they take is the machine's time, a multiple of the usual where it is busy."""

import gc
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

TIMEOUT_S = 240
COLLECTED_AFTER = 50_000
"""Objects made since the last collection of garbage. The usual 700 take an eighth of the time, as little of what a cluster makes is garbage."""


@pytest.fixture(scope="package", autouse=True)
def _garbage_is_collected_rarely() -> Iterator[None]:
    usual = gc.get_threshold()
    gc.set_threshold(COLLECTED_AFTER, *usual[1:])
    yield
    gc.set_threshold(*usual)


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """A longer limit for tests of this folder that have none of their own."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
