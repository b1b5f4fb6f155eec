"""Each kind of process is killed, paused and restarted under 200 mixed requests, with a spare: every answer is right.

`make soak` does it again and again, each time at another moment.
"""

import asyncio
from collections.abc import AsyncIterator
from random import Random

import pytest
import pytest_asyncio

from tests.e2e.pairs import KINDS, Asked, Hit, Pairs, mixture, survived

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

PAUSE_S = 2.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pairs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pairs]:
    asyncio.get_running_loop().set_debug(False)  # debug mode would take most of the clients' time
    async with Pairs.running(tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mixed(pairs: Pairs) -> tuple[Asked, ...]:
    return await mixture(pairs)


@pytest.mark.parametrize("hit", Hit, ids=lambda hit: hit.name.lower())
@pytest.mark.parametrize("kind", KINDS)
async def test_no_answer_is_lost_or_wrong_while_a_process_is_hit(
    pairs: Pairs, mixed: tuple[Asked, ...], kind: str, hit: Hit
) -> None:
    await survived(pairs, mixed, f"{kind}-1", hit, Random(f"{kind} {hit.value}"), pause_s=PAUSE_S)
