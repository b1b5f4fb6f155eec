"""What slow encoders cost, with and without hedging and ejection, in virtual time.

The real services of a simulated cluster (``tests.simulation``) over engines that sleep; requests of one image arrive at
random. A row's encode time is that of a request's timeline: from its preparation until the image has its ticket,
waiting included. ``extra`` is the share of encodes that were hedges.

- ``slow``: one encoder of four takes ten times as long for everything. It is compared with ``without``, the pool of the
  other three. Loads are shares of what these three can do; the last one is twice that.
- ``pauses``: every few seconds one of three encoders answers nothing for half a second.

Equal seeds give equal results, on any machine.
"""

import argparse
import asyncio
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from benchmarks import machine
from benchmarks.figures import add_json_option, write_figures
from tests.simulation.cluster import SimCluster, World, running
from tests.simulation.workload import make_asks, play
from triptych.machine.router.cluster_limits import ClusterLimits
from triptych.virtual import virtual_time
from triptych.workload.report import percentile

POLICIES = {
    "neither": ClusterLimits(hedge_share=0.0, outlier_factor=0.0),
    "hedging": ClusterLimits(outlier_factor=0.0),
    "ejection": ClusterLimits(hedge_share=0.0),
    "both": ClusterLimits(),
}
_ENCODERS = 3
"""Of the pool without the slow one."""
_TOKEN_S = 0.005
_ENCODE_S = 0.005 + 6.25 * _TOKEN_S
"""Mean time of an image."""
_SLOWER = 10
_PAUSE_S, _BETWEEN_PAUSES_S = 0.5, 5.0
_ANSWERS_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Settings:
    requests: int = 3000
    loads: tuple[float, ...] = (0.5, 0.8, 2.0)
    seed: int = 7
    policies: tuple[str, ...] = tuple(POLICIES)


QUICK = Settings(requests=300, loads=(0.5,))


@dataclass(frozen=True, slots=True)
class Row:
    """Times in milliseconds."""

    pool: str
    load: float
    policy: str
    answered: int
    encode_p50_ms: float
    encode_p99_ms: float
    encode_max_ms: float
    settled_p99_ms: float
    """Without the first third, in which the encoders are not known yet."""
    hedges: int
    hedges_won: int
    extra: float
    slow_share: float
    """Of the encodes, those of the slow encoder."""


def run(pool: str, load: float, policy: str, settings: Settings) -> Row:
    """One row. Raises AssertionError if an answer is wrong or anything is still held afterwards."""
    encoders = _ENCODERS + (pool == "slow")
    world = World(
        seed=settings.seed,
        encoders=encoders,
        texts=2,
        encode_token_s=_TOKEN_S,
        router={"cluster": POLICIES[policy], "history_requests": settings.requests},
    )
    rate_per_s = load * _ENCODERS / _ENCODE_S
    asks = make_asks(
        settings.seed,
        settings.requests if load < 1 else settings.requests // 4,
        rate_per_s=rate_per_s,
        images=(1, 1),
        distinct_images=3 * settings.requests,
        timeout_s=_ANSWERS_WITHIN_S,
    )

    async def main() -> Row:
        async with running(world) as cluster:
            if pool == "slow":
                cluster.encoders[0].engine.token_s *= _SLOWER
                cluster.encoders[0].engine.batch_s *= _SLOWER
                cluster.encoders[0].engine.prepare_s *= _SLOWER
            async with asyncio.TaskGroup() as group:
                pausing = group.create_task(_pause(cluster, settings.seed)) if pool == "pauses" else None
                replies = await play(cluster.router, asks)
                if pausing is not None:
                    pausing.cancel()
            for node in cluster.processes.values():
                node.go_on()
            for reply in replies:
                reply.check_right()
            lines = [await cluster.router.timeline(ask.request.request_id) for ask in asks]
            encodes = {node.name: node.engine.encoded_items for node in cluster.encoders}
            await cluster.check_nothing_is_held()
        times = [1000 * line.encode_s for line in lines]
        items = [item for line in lines for item in line.items]
        hedges = sum(item.hedges for item in items)
        return Row(
            pool,
            load,
            policy,
            len(replies),
            percentile(times, 50),
            percentile(times, 99),
            max(times),
            percentile(times[len(times) // 3 :], 99),
            hedges,
            sum(item.hedge_won for item in items),
            hedges / (hedges + sum(item.encode_attempts for item in items)),
            encodes["e0"] / sum(encodes.values()) if pool == "slow" else 0.0,
        )

    return virtual_time.run(main(), seed=settings.seed, limit_s=3600)


async def _pause(cluster: SimCluster, seed: int) -> None:
    """Until cancelled."""
    rng = Random(f"{seed}/pauses")
    while True:
        await asyncio.sleep(rng.uniform(0.5, 1.5) * _BETWEEN_PAUSES_S)
        node = rng.choice(cluster.encoders)
        node.hang()
        await asyncio.sleep(_PAUSE_S)
        node.go_on()


def measure(settings: Settings) -> dict[str, Any]:
    rows: list[Row] = []
    for load in settings.loads:
        rows.append(_shown(run("without", load, "both", settings)))
        rows += [_shown(run("slow", load, policy, settings)) for policy in settings.policies]
    rows += [_shown(run("pauses", settings.loads[0], policy, settings)) for policy in settings.policies]
    return {"settings": asdict(settings), "rows": [asdict(row) for row in rows]}


def _shown(row: Row) -> Row:
    print(
        f"{row.pool:<8} {row.load:4.0%}  {row.policy:<9} encode {row.encode_p50_ms:7.0f} ms p50, "
        f"{row.encode_p99_ms:7.0f} p99, {row.encode_max_ms:7.0f} max, {row.settled_p99_ms:7.0f} p99 settled  hedges {row.hedges:>4} ({row.hedges_won} won), "
        f"extra {row.extra:5.2%}  slow encoder {row.slow_share:5.1%}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="few requests, one load: shows that it works")
    parser.add_argument("--requests", type=int, default=Settings().requests, help="of each row")
    parser.add_argument(
        "--loads", default="0.5,0.8,2.0", help="shares of what the encoders can do, separated by commas"
    )
    parser.add_argument("--policies", default=",".join(POLICIES), help=f"of {', '.join(POLICIES)}, separated by commas")
    arguments = parser.parse_args()
    print("; ".join(f"{key} {value}" for key, value in machine.describe().items()))
    loads, policies = tuple(map(float, arguments.loads.split(","))), tuple(arguments.policies.split(","))
    result = measure(QUICK if arguments.quick else Settings(arguments.requests, loads, policies=policies))
    write_figures(arguments.json, {"machine": machine.describe(), **result})


if __name__ == "__main__":
    main()
