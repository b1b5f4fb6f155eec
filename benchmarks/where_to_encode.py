"""Where to encode a single image: at an encoder or at a text instance that encodes as well, in virtual time.

The real services of a simulated cluster (``tests.simulation``) over engines that sleep; requests of one image and a short
prompt arrive at random. Four devices each:

- ``apart``: two encoders and two text instances, so that every embedding is pulled.
- ``tokens`` and ``predicted``: two encoders and two instances that do all, routed by pending tokens and by predicted time.

Instances that do all take turns on one device. While there are prompts or answers, images get half of its time (``encode_share``), which
routing does not know: that makes their P99. With all of it (1.0) it is about half as high, and answers wait for images.

Rows are for a time that a pull takes, and a load: the share of what two encoders can do. ``here`` is the share of images that were
encoded at the instance that computed their prompts. Equal seeds give equal results, on any machine.
"""

import argparse
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from tests.simulation.cluster import SimCluster, World, running
from tests.simulation.workload import Ask, make_asks, play
from triptych.domain.timeline import Timeline
from triptych.policy.policies import PolicyNames
from triptych.virtual import virtual_time
from triptych.workload.report import percentile

CLUSTERS = ("apart", "tokens", "predicted")
_TOKEN_S = 0.002
_ENCODE_S = 0.005 + 6.25 * _TOKEN_S
"""Mean time of an image alone."""
_EMBEDDING_NBYTES = 256
"""About that of a mean image, to which ``pull_ms`` refers."""


@dataclass(frozen=True, slots=True)
class Settings:
    requests: int = 600
    loads: tuple[float, ...] = (0.1, 0.5, 0.9)
    pulls_ms: tuple[float, ...] = (0.5, 5.0, 20.0)
    seed: int = 3


QUICK = Settings(requests=60, loads=(0.5,), pulls_ms=(5.0,))


@dataclass(frozen=True, slots=True)
class Row:
    """Times in milliseconds."""

    cluster: str
    pull_ms: float
    load: float
    ttft_mean_ms: float
    ttft_p99_ms: float
    here: float


def run(cluster: str, pull_ms: float, load: float, settings: Settings) -> Row:
    """One row. Raises AssertionError if an answer is wrong or anything is still held afterwards."""
    routing = "predicted" if cluster == "predicted" else "least-loaded"
    world = World(
        seed=settings.seed,
        encoders=2,
        texts=2 if cluster == "apart" else 0,
        hybrids=0 if cluster == "apart" else 2,
        encode_token_s=_TOKEN_S,
        pull_byte_s=pull_ms / 1000 / _EMBEDDING_NBYTES,
        profiled=True,
        router={
            "policies": PolicyNames(encoder_routing=routing, text_routing=routing),
            "history_requests": settings.requests,
        },
    )
    asks = make_asks(
        settings.seed,
        settings.requests,
        rate_per_s=load * 2 / _ENCODE_S,
        images=(1, 1),
        distinct_images=3 * settings.requests,
    )
    lines = virtual_time.run(_timelines(world, asks), seed=settings.seed, limit_s=3600)
    times = [1000 * line.ttft_s for line in lines]
    here = mean(line.items[0].encoder == line.text_instance for line in lines)
    return Row(cluster, pull_ms, load, mean(times), percentile(times, 99), here)


async def _timelines(world: World, asks: list[Ask]) -> list[Timeline]:
    async with running(world) as cluster:
        for reply in await play(cluster.router, asks):
            reply.check_right()
        lines = await _lines(cluster, asks)
        await cluster.check_nothing_is_held()
    return lines


async def _lines(cluster: SimCluster, asks: list[Ask]) -> list[Timeline]:
    return [await cluster.router.timeline(ask.request.request_id) for ask in asks]


def measure(settings: Settings) -> dict[str, Any]:
    rows = [
        _shown(run(cluster, pull_ms, load, settings))
        for pull_ms in settings.pulls_ms
        for load in settings.loads
        for cluster in CLUSTERS
    ]
    return {"machine": machine.describe(), "settings": asdict(settings), "rows": [asdict(row) for row in rows]}


def _shown(row: Row) -> Row:
    print(
        f"pull {row.pull_ms:4.1f} ms  load {row.load:4.0%}  {row.cluster:<10} TTFT {row.ttft_mean_ms:6.1f} ms mean, "
        f"{row.ttft_p99_ms:6.1f} p99  encoded here {row.here:4.0%}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="few requests, one load: shows that it works")
    arguments = parser.parse_args()
    result = measure(QUICK if arguments.quick else Settings())
    write_figures(arguments.json, result)


if __name__ == "__main__":
    ending.by_sigterm()
    main()
