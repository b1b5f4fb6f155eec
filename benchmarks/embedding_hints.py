"""How often an image that comes again is encoded again, with several routers, with and without encoders' hints, in virtual time.

The real services of a simulated cluster (``tests.simulation``) over engines that sleep; requests of one image arrive at
random, each at one of the routers at random. Images are drawn by Zipf's law. ``hits`` is the share of requests for which
nothing was encoded, ``best`` what it would be if each image were encoded once. Without hints (``--published-embeddings
0``) a router knows what it has sent itself. Arenas hold all images, or a share of them.

Equal seeds give equal results, on any machine.
"""

import argparse
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any

from benchmarks import machine
from benchmarks.figures import add_json_option, write_figures
from benchmarks.several_routers import play_through
from tests.simulation.cluster import MIB, World, running
from tests.simulation.workload import Ask, make_asks
from triptych.domain.chat import MediaPart, Message
from triptych.domain.instance import InstanceLoad
from triptych.domain.media import Modality
from triptych.testing.media import png
from triptych.virtual import virtual_time
from triptych.virtual.links import LinkedInstance
from triptych.wire.instance import LOAD
from triptych.workload.report import percentile

_ENCODERS = 4
_TOKEN_S = 0.00625
_IMAGE_TOKENS = 16
_ENCODE_S = 0.007 + _IMAGE_TOKENS * _TOKEN_S
_SLOT_NBYTES = 640
"""Of one image in an arena."""


@dataclass(frozen=True, slots=True)
class Settings:
    requests: int = 2000
    images: int = 400
    routers: tuple[int, ...] = (1, 2, 4)
    loads: tuple[float, ...] = (0.5, 0.9)
    """Shares of what the encoders could do if nothing came again."""
    seed: int = 7


QUICK = Settings(requests=200, images=40, routers=(2,), loads=(0.9,))


@dataclass(frozen=True, slots=True)
class Row:
    routers: int
    load: float
    arena: float
    """The arenas' size, as a share of all images, of all encoders together."""
    hints: bool
    hits: float
    best: float
    encode_p50_ms: float
    encode_p99_ms: float
    """From a request's preparation until its image has its ticket."""
    hints_per_request: float
    """To all routers."""
    wire_nbytes_per_request: float
    """Of these hints, in load reports."""


class _Counting(LinkedInstance):
    hints = 0
    nbytes = 0

    async def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        async with aclosing(super().watch_load()) as loads:
            async for load in loads:
                if load.hints is not None:
                    told = load.hints
                    _Counting.hints += len(told.held) + len(told.encoding) + len(told.dropped)
                    without = LOAD.to_wire(replace(load, hints=None)).ByteSize()
                    _Counting.nbytes += LOAD.to_wire(load).ByteSize() - without
                yield load


def run(routers: int, load: float, arena: float, settings: Settings, *, hints: bool) -> Row:
    """One row. Raises AssertionError if an answer is wrong or anything is still held afterwards."""
    world = World(
        seed=settings.seed,
        encoders=_ENCODERS,
        texts=2,
        encode_token_s=_TOKEN_S,
        encoder_arena_bytes=max(16 * _SLOT_NBYTES, round(arena * settings.images * _SLOT_NBYTES / _ENCODERS)),
        text_arena_bytes=8 * MIB,
        router={"history_requests": settings.requests},
        encoder={} if hints else {"published_embeddings": 0},
    )
    asks = _asks(settings, load * _ENCODERS / _ENCODE_S)
    _Counting.hints = _Counting.nbytes = 0

    async def main() -> Row:
        async with running(world) as cluster:
            names = [f"other{number}" for number in range(routers)]
            played = await play_through(cluster, names, asks, seed=settings.seed, instance=_Counting)
            times = [1000 * line.encode_s for line in played.lines]
            encoded = sum(node.engine.encoded_items for node in cluster.encoders)
            distinct = len({part.data for ask in asks for part in ask.request.media})
            return Row(
                routers,
                load,
                arena,
                hints,
                1 - encoded / len(asks),
                1 - distinct / len(asks),
                percentile(times, 50),
                percentile(times, 99),
                _Counting.hints / len(asks),
                _Counting.nbytes / len(asks),
            )

    return virtual_time.run(main(), seed=settings.seed, limit_s=3600)


def _asks(settings: Settings, rate_per_s: float) -> list[Ask]:
    rng = Random(f"{settings.seed}/images")
    weights = list(accumulate(1 / rank for rank in range(1, settings.images + 1)))
    stock = [png(56, 56, seed=number) for number in range(settings.images)]
    asks = make_asks(settings.seed, settings.requests, rate_per_s=rate_per_s, images=(0, 0))
    drawn = rng.choices(stock, cum_weights=weights, k=len(asks))
    return [
        replace(
            ask,
            request=replace(
                ask.request,
                messages=(Message("user", (MediaPart(Modality.IMAGE, image), *ask.request.messages[0].parts)),),
            ),
        )
        for ask, image in zip(asks, drawn, strict=True)
    ]


def measure(settings: Settings) -> dict[str, Any]:
    rows = [
        _shown(run(routers, load, arena, settings, hints=hints))
        for arena in (4.0, 0.5)
        for load in settings.loads
        for routers in settings.routers
        for hints in (False, True)
    ]
    return {"machine": machine.describe(), "settings": asdict(settings), "rows": [asdict(row) for row in rows]}


def _shown(row: Row) -> Row:
    print(
        f"{row.routers} routers  load {row.load:4.0%}  arenas {row.arena:4.0%}  {'hints' if row.hints else 'none ':<5}  hits {row.hits:6.1%} of {row.best:6.1%}  "
        f"encode {row.encode_p50_ms:6.0f} ms p50 {row.encode_p99_ms:6.0f} p99  "
        f"{row.hints_per_request:5.1f} hints, {row.wire_nbytes_per_request:6.0f} bytes per request",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="few requests, two routers: shows that it works")
    parser.add_argument("--requests", type=int, default=Settings().requests, help="of each row")
    parser.add_argument("--routers", default="1,2,4", help="numbers of routers, separated by commas")
    parser.add_argument("--loads", default="0.5,0.9", help="shares of what the encoders can do, separated by commas")
    arguments = parser.parse_args()
    routers, loads = tuple(map(int, arguments.routers.split(","))), tuple(map(float, arguments.loads.split(",")))
    result = measure(QUICK if arguments.quick else Settings(arguments.requests, routers=routers, loads=loads))
    write_figures(arguments.json, result)


if __name__ == "__main__":
    main()
