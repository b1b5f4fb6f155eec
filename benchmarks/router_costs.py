"""What metrics, tracing and mutual TLS cost: CPU of router and gateway per request, of variants that differ in one thing.

Load, clients and peers are those of ``benchmarks.router_overhead``. All variants run side by side, each with a router
and a gateway of its own, and are kept busy in turn, a slice of a third of a second each, in rotating order: what else
the machine does falls on all of them. A ratio is that of a slice to the base's slice of the same round; the median over
the rounds is reported, with the quartiles. Spans go to a collector in another process, which is not counted.

- ``no metrics``: nothing is counted, and nothing is looked at for it (``benchmarks.unmeasured``).
- ``metrics``: as services run by default, without tracing. The base.
- ``mutual TLS``: between client of the router, gateway, router and peers. REST stays plain.
- ``10 % traced``, ``all traced``: ``--trace-sampling 0.1`` and ``1``, with ``--otlp-endpoint``.
"""

import argparse
import contextlib
import statistics
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import ending, identity, machine
from benchmarks.figures import add_json_option, write_figures
from benchmarks.relay_peers import HOST
from benchmarks.router_overhead import (
    GATEWAY,
    ROUTER,
    Ask,
    Grpc,
    Rest,
    Running,
    free_ports,
    process,
    saturate,
    until_it_answers,
)
from benchmarks.router_overhead import Settings as Load
from triptych.demo import MODEL_DIR

SYSTEMS = (ROUTER, GATEWAY)


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    traced: float = 0.0
    """Share of the requests whose spans are recorded; 0 for no tracing at all."""
    wrapper: tuple[str, ...] = ()
    """A module that runs the services."""
    tls: bool = False

    def command(self, *command: str, collector: int, own: Path) -> tuple[str, ...]:
        tracing = ("--otlp-endpoint", f"http://{HOST}:{collector}", "--trace-sampling", str(self.traced))
        return (
            *self.wrapper,
            *command,
            "--log-level",
            "WARNING",
            *(tracing if self.traced else ()),
            *(identity.flags(own) if self.tls else ()),
        )


BASE = Variant("metrics")
VARIANTS = (
    Variant("no metrics", wrapper=("benchmarks.unmeasured",)),
    BASE,
    Variant("mutual TLS", tls=True),
    Variant("10 % traced", traced=0.1),
    Variant("all traced", traced=1.0),
)


@dataclass(frozen=True, slots=True)
class Settings:
    rounds: int = 40
    slice_s: float = 0.3
    concurrency: int = 32
    images: tuple[int, ...] = (0, 4)
    output_tokens: int = 16
    step_s: float = 0.002


QUICK = Settings(rounds=1, slice_s=0.1, concurrency=4)


@dataclass(frozen=True, slots=True)
class Cost:
    variant: str
    system: str
    images: int
    requests: int
    cpu_ms: float
    """Per request, over all rounds."""
    ratio: float
    """Of the CPU per request to the base's."""
    ratio_low: float
    ratio_high: float


@contextlib.asynccontextmanager
async def running(settings: Settings) -> AsyncGenerator[Running]:
    """Start peers, the collector and all variants; systems are named VARIANT/SYSTEM. All end with the context."""
    collector, *ports = free_ports(7 + 2 * len(VARIANTS))
    peers = {False: ports[:3], True: ports[3:6]}
    """Encoders and text instance, without TLS and with it."""
    ports = ports[6:]
    ask: dict[str, Ask] = {}
    pids: dict[str, dict[str, int]] = {}
    async with contextlib.AsyncExitStack() as stack:
        own = stack.enter_context(identity.certificate())
        listening = {tls: (str(text), ",".join(map(str, encoders))) for tls, (*encoders, text) in peers.items()}
        pace = (str(settings.step_s), "0")
        stack.enter_context(
            process(("benchmarks.relay_peers", "peers", *listening[False], *pace, str(own), *listening[True]))
        )
        stack.enter_context(process(("benchmarks.relay_peers", "collector", str(collector))))
        for variant, router, gateway in zip(VARIANTS, ports[::2], ports[1::2], strict=True):
            instances = ",".join(f"{HOST}:{port}" for port in peers[variant.tls])
            routing = (
                "triptych.services.router",
                "--port",
                str(router),
                "--model",
                str(MODEL_DIR),
                "--instances",
                instances,
            )
            edge = ("triptych.services.gateway", "--port", str(gateway), "--router", f"{HOST}:{router}")
            pid = {
                name: stack.enter_context(process(variant.command(*command, collector=collector, own=own))).pid
                for name, command in ((ROUTER, routing), (GATEWAY, edge))
            }
            caller = Grpc(router, shared=True, tls=identity.loaded(own) if variant.tls else None)
            clients: dict[str, Grpc | Rest] = {ROUTER: caller, GATEWAY: Rest(gateway)}
            for system, client in clients.items():
                stack.push_async_callback(client.close)
                ask[f"{variant.name}/{system}"] = client
            pids |= {f"{variant.name}/{ROUTER}": {ROUTER: pid[ROUTER]}, f"{variant.name}/{GATEWAY}": pid}
        for name, asking in ask.items():
            await until_it_answers(name, asking)
        yield Running(ask, pids)


async def costs(on: Running, settings: Settings, system: str, images: int) -> list[Cost]:
    """All variants of one system under one load."""
    load = Load(seconds=settings.slice_s, concurrency=settings.concurrency)
    cpu_s: dict[str, list[float]] = {variant.name: [] for variant in VARIANTS}
    requests: dict[str, list[int]] = {variant.name: [] for variant in VARIANTS}
    for round_ in range(settings.rounds + 1):
        for place in range(len(VARIANTS)):
            name = VARIANTS[(round_ + place) % len(VARIANTS)].name
            got = await saturate(on, load, f"{name}/{system}", images, settings.output_tokens)
            if round_:  # the first one warms up
                cpu_s[name].append(sum(got["cpu_s"].values()))
                requests[name].append(got["requests"])
    per_request = {
        name: [seconds / number for seconds, number in zip(cpu_s[name], requests[name], strict=True)] for name in cpu_s
    }
    found = []
    for name, own in per_request.items():
        ratios = sorted(seconds / base for seconds, base in zip(own, per_request[BASE.name], strict=True))
        found.append(
            Cost(
                name,
                system,
                images,
                sum(requests[name]),
                1e3 * sum(cpu_s[name]) / sum(requests[name]),
                statistics.median(ratios),
                ratios[len(ratios) // 4],
                ratios[(3 * len(ratios)) // 4],
            )
        )
    return found


async def measure(settings: Settings) -> dict[str, Any]:
    rows: list[Cost] = []
    async with running(settings) as on:
        for system in SYSTEMS:
            for images in settings.images:
                for row in await costs(on, settings, system, images):
                    rows.append(row)
                    print(
                        f"{row.variant:<12} {row.system:<8} {row.images} images  {row.requests:>6} requests  CPU "
                        f"{row.cpu_ms:6.2f} ms each  {row.ratio:5.3f}x ({row.ratio_low:5.3f} to {row.ratio_high:5.3f})",
                        flush=True,
                    )
    return {"machine": machine.describe(), "settings": asdict(settings), "costs": [asdict(row) for row in rows]}


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="a few requests of each kind: shows that it works")
    parser.add_argument("--rounds", type=int, default=Settings().rounds, help="slices of each variant and case")
    arguments = parser.parse_args()
    result = uvloop.run(measure(QUICK if arguments.quick else Settings(rounds=arguments.rounds)))
    write_figures(arguments.json, result)


if __name__ == "__main__":
    main()
