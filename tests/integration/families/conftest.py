from collections.abc import Iterator

import pytest

from tests.integration.families.harness import Case, Encode, all_tiny_families, encoder_process

TINIES = all_tiny_families()


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
