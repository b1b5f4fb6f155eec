"""What it costs that several routers send requests to the same instances, as each learns late what the others have sent: in virtual time.

The real services of a simulated cluster (``tests.simulation``): text instances whose engines sleep, and routers, of which
each request comes to one at random. Requests arrive at random, at shares of what one router can get out of the instances.
All rows of a load and pool get the same requests at the same times. ``untold`` is ``least-loaded`` of routers that do not
notice each other.

Equal seeds give equal results, on any machine.
"""

import argparse
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from benchmarks import machine
from benchmarks.figures import add_json_option, write_figures
from benchmarks.several_routers import Played, play_through
from tests.simulation.cluster import World, running
from tests.simulation.workload import make_asks
from triptych.machine.router.others_work import OthersWork
from triptych.policy.policies import PolicyNames
from triptych.virtual import virtual_time
from triptych.workload.report import percentile

UNTOLD = "untold"
POLICIES = ("least-loaded", UNTOLD, "power-of-two")
_CAPACITY_REQUESTS = 128
"""Per instance, to find the capacity with."""


@dataclass(frozen=True, slots=True)
class Settings:
    requests: int = 3000
    texts: tuple[int, ...] = (4, 16)
    routers: tuple[int, ...] = (1, 2, 4, 8)
    loads: tuple[float, ...] = (0.5, 0.95)
    seed: int = 7


QUICK = Settings(requests=400, texts=(8,), routers=(1, 4), loads=(0.8,))


@dataclass(frozen=True, slots=True)
class Row:
    texts: int
    load: float
    routers: int
    policy: str
    ttft_mean_ms: float
    ttft_p99_ms: float


def run(texts: int, routers: int, policy: str, requests: int, rate_per_s: float | None, *, seed: int) -> Played:
    """Raises AssertionError if an answer is wrong or anything is still held afterwards. ``rate_per_s`` None: all at once."""
    world = World(
        seed=seed,
        encoders=1,
        texts=texts,
        text_step_s=0.01,
        text_prefill_token_s=0.001,
        max_running=16,
        router={
            "history_requests": requests,
            "policies": PolicyNames(text_routing="least-loaded" if policy == UNTOLD else policy),
        },
    )
    asks = make_asks(seed, requests, rate_per_s=rate_per_s, images=(0, 0))

    async def main() -> Played:
        async with running(world) as cluster, _noticed(policy != UNTOLD):
            names = [f"router{number}" for number in range(routers)]
            return await play_through(cluster, names, asks, seed=seed)

    return virtual_time.run(main(), seed=seed, limit_s=3600)


@asynccontextmanager
async def _noticed(noticed: bool) -> AsyncGenerator[None]:
    observe = OthersWork.observe
    if not noticed:
        OthersWork.observe = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        OthersWork.observe = observe  # type: ignore[method-assign]


def measure(settings: Settings) -> dict[str, Any]:
    rows: list[Row] = []
    capacities: dict[int, float] = {}
    for texts in settings.texts:
        count = min(settings.requests, _CAPACITY_REQUESTS * texts)
        capacities[texts] = count / run(texts, 1, "least-loaded", count, None, seed=settings.seed).took_s
        print(f"{texts} instances: capacity {capacities[texts]:.0f} requests/s")
        for load in settings.loads:
            for policy in POLICIES:
                for routers in settings.routers:
                    rate_per_s = load * capacities[texts]
                    played = run(texts, routers, policy, settings.requests, rate_per_s, seed=settings.seed)
                    ttfts_ms = [1000 * line.ttft_s for line in played.lines]
                    row = Row(texts, load, routers, policy, mean(ttfts_ms), percentile(ttfts_ms, 99))
                    rows.append(row)
                    print(
                        f"{texts:2} instances  load {load:4.0%}  {routers} routers  {policy:<12}  "
                        f"TTFT mean {row.ttft_mean_ms:6.1f} ms  p99 {row.ttft_p99_ms:6.1f}",
                        flush=True,
                    )
    shown = asdict(settings) | {"capacity_per_s": capacities}
    return {"machine": machine.describe(), "settings": shown, "rows": [asdict(row) for row in rows]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="few requests, one pool: shows that it works")
    parser.add_argument("--requests", type=int, default=Settings().requests, help="of each row")
    arguments = parser.parse_args()
    write_figures(arguments.json, measure(QUICK if arguments.quick else Settings(requests=arguments.requests)))


if __name__ == "__main__":
    main()
