"""Simulations never wait: what they take is the machine's time."""

import gc
from collections.abc import Iterator

import pytest

COLLECTED_AFTER = 50_000
"""Objects made since the last collection of garbage. The usual 700 take an eighth of the time, as little of what a cluster makes is garbage."""


@pytest.fixture(scope="package", autouse=True)
def _garbage_is_collected_rarely() -> Iterator[None]:
    usual = gc.get_threshold()
    gc.set_threshold(COLLECTED_AFTER, *usual[1:])
    yield
    gc.set_threshold(*usual)
