from collections.abc import Iterator

import pytest

from tests.integration.families.harness import Case, Encode, all_tiny_families, encoder_process

TINIES = all_tiny_families()
USUAL = {"convolutions", "gemma3", "idefics3", "mllama", "qwen2_5_vl", "voxtral"}
"""One of each kind: caches of its own, spans that are seen whole, tiles, cross-attention, positions of three axes, audio."""
usual_families = pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name in USUAL else pytest.mark.extended) for name in TINIES],
    indirect=True,
)
"""Marks a test of which ``make test`` takes some families, and `make test-all` the others."""


@pytest.fixture(scope="session")
def encode() -> Iterator[Encode]:
    """One encoder process for all families."""
    with encoder_process() as encode:
        yield encode


@pytest.fixture(scope="session", params=TINIES)
def case(request: pytest.FixtureRequest, encode: Encode, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The tiny model of each family in turn. All tests of one come together, as it is made once."""
    tiny = TINIES[request.param]
    directory = tmp_path_factory.mktemp(tiny.name)
    tiny.make(directory)
    return Case(tiny, directory, encode)
