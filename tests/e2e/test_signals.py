"""Each kind of process is killed, paused and restarted under 200 mixed requests, with a spare: every answer is right.

One round per kind and signal; ``SOAK_ROUNDS=20`` in the environment makes it 20, each at another moment (``make soak-processes``).
"""

import asyncio
import os
from collections.abc import AsyncIterator
from random import Random

import pytest
import pytest_asyncio

from tests.e2e.pairs import KINDS, Asked, Hit, Outcome, Pairs, Round, mixture
from tests.e2e.record import keep

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

ROUNDS = int(os.environ.get("SOAK_ROUNDS", "1"))  # noqa: TID251 - whoever runs the tests chooses how many
REQUESTS = 200
PAUSES_S = (2.0, 8.0)
"""A router takes an instance for lost that has been silent for 5 s."""

outcomes: list[Outcome] = []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pairs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pairs]:
    asyncio.get_running_loop().set_debug(False)  # debug mode would take most of the clients' time
    async with Pairs.running(tmp_path_factory.mktemp("logs")) as running:
        yield running
    keep("soak_processes", {"requests": REQUESTS, "rounds": [outcome.report() for outcome in outcomes]})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mixed(pairs: Pairs) -> tuple[Asked, ...]:
    return await mixture(pairs)


@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.parametrize("hit", Hit, ids=lambda hit: hit.name.lower())
@pytest.mark.parametrize("kind", KINDS)
async def test_no_answer_is_lost_or_wrong_while_a_process_is_hit(
    pairs: Pairs, mixed: tuple[Asked, ...], kind: str, hit: Hit, number: int
) -> None:
    rng = Random(f"{kind} {hit.value} {number}")
    process = f"{kind}-{1 if kind == 'pool_manager' else 1 + number % 2}"
    round_ = Round(
        pairs,
        process,
        hit,
        rng,
        hit_at=rng.randint(REQUESTS // 10, REQUESTS // 2),
        pause_s=PAUSES_S[0] if not number else rng.uniform(*PAUSES_S),
    )
    outcome = await round_.play(mixed, REQUESTS)
    outcomes.append(outcome)
    assert (outcome.wrong, outcome.hung) == ([], 0)
    assert not outcome.errors
    assert outcome.answers == REQUESTS
    assert outcome.cut == 0 or (kind, hit) == ("gateway", Hit.KILL)
    await pairs.until_whole()
