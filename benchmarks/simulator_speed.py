"""CPU of a simulated request, by the real services in virtual time, by their machines alone and by queues, at pools of several sizes.

Requests have 1.9 images of 576 tokens, 64 tokens of text and answers of 100 tokens on average; three in ten have no image. Of the
instances 12 in 17 are encoders, the others text instances, and each size bears the same load: 60 requests/s at 48 encoders and 20 text
instances, which keep encoders busy for 84 % of the time. Load reports come as the defaults of the services say, every 20 ms while something
changes. The CPU of a run is divided by its requests; the median over rounds with other seeds is shown, with the least and the most.
"""

import argparse
import os
import random
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from triptych.domain.scaling import Kind
from triptych.domain.stage import ModelPart, Role
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.delay import synthetic_decoder_profile, synthetic_encoder_profile
from triptych.machine.encoder.batch_queue import BatchLimits
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.pool_manager.settings import PoolManagerSettings
from triptych.services.router.settings import RouterSettings
from triptych.services.text.settings import TextSettings
from triptych.sim.machines.run import simulate as by_machines
from triptych.sim.network import LinkSpeed
from triptych.sim.queues.run import simulate as by_queues
from triptych.sim.run import Simulate
from triptych.sim.run import simulate as by_services
from triptych.sim.scenario import Deployment, InstanceKind
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.model import FakeFamily
from triptych.workload.requests import Distribution, Mix, Plan, Size, synthetic
from triptych.workload.traces import Span, load

RATE, INSTANCES = 60.0, 68
"""Requests per second of so many instances."""
MIX = Mix(
    Distribution.parse("0:0.3,1:0.2625,2:0.175,3:0.0875,4:0.0875,8:0.0875"),
    Distribution.parse("64"),
    Distribution.parse("50,100,150"),
    Size(672, 672),
)
FAMILY = FakeFamily(patch_px=28, max_tokens_per_item=4096, context_length=16_384)
IMAGE_TOKENS = 576
LINK = LinkSpeed(12.5e9, 1e-4)
PROFILES = {
    Role.E: (
        ModelPart.ENCODER,
        synthetic_encoder_profile(pass_s=0.035, token_s=0.315 / IMAGE_TOKENS, prepare_s=0.01, load_s=1.0),
    ),
    Role.PD: (
        ModelPart.DECODER,
        synthetic_decoder_profile(step_s=0.015, sequence_s=1e-4, prefill_token_s=1e-4, load_s=1.0),
    ),
}


@dataclass(frozen=True, slots=True)
class Settings:
    rounds: int = 5
    sizes: tuple[int, ...] = (8, 64, INSTANCES, 256)
    """Instances, of both kinds together."""
    services: int = 400
    """Requests of a round, by the services ..."""
    machines: int = 4000
    """... by the machines ..."""
    queues: int = 8000
    """... and by queues."""
    hour_s: float = 3600.0
    trace_rate: float = 10.0
    """Requests per second of the trace."""


QUICK = Settings(rounds=1, sizes=(8,), services=20, machines=20, queues=20, hour_s=2.0)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU in us per request: the median over rounds, the least and the most."""

    fidelity: str
    encoders: int
    texts: int
    requests: int
    images: float
    """Mean of a request."""
    tokens: float
    """Mean of an answer."""
    request_us: float
    least_us: float
    most_us: float


def deployment(encoders: int, texts: int) -> Deployment:
    """A deployment of that many of both, with memory for what the load needs."""
    part = {Kind(role): InstanceKind("device", 1, dict([PROFILES[role]]), 4, 8e9, LINK, LINK) for role in PROFILES}
    text = TextSettings(
        model=Path("model"),
        image_cache_bytes=1 << 30,
        engine=EngineOptions(max_sequences=64, kv_cache_bytes=1 << 34),
    )
    encoder = EncoderSettings(model=Path("model"), arena_bytes=1 << 30, batches=BatchLimits(max_batch_items=1))
    return Deployment(
        model=replace(FAKE_MODEL, context_length=FAMILY.context_length),
        family=FAMILY,
        sizes={Kind(Role.E): encoders, Kind(Role.PD): texts},
        kinds=part,
        router=RouterSettings(),
        encoder=encoder,
        texts={Kind(Role.PD): text},
        manager=PoolManagerSettings(allow_network=True),
    )


def plan(instances: int, requests: int, seed: int) -> Plan:
    rate = RATE * instances / INSTANCES
    rng = random.Random(seed)
    return synthetic(MIX, rate=rate, duration_s=requests / rate, burstiness=1.0, rng=rng)


def measure_one(fidelity: str, simulate: Simulate, instances: int, requests: int, rounds: int) -> Cost:
    """Raises AssertionError unless every request is answered."""
    encoders = round(instances * 48 / INSTANCES)
    cluster, spent_us, images, tokens, count = deployment(encoders, instances - encoders), list[float](), 0, 0, 0
    for seed in range(rounds):
        outcome = simulate(cluster, plan(instances, requests, seed))
        assert not any(record.error for record in outcome.records), "requests were refused"
        images += sum(len(record.planned.images) for record in outcome.records)
        tokens += sum(record.tokens for record in outcome.records)
        count += len(outcome.records)
        spent_us.append(1e6 * outcome.took_s / len(outcome.records))
    return Cost(
        fidelity,
        encoders,
        instances - encoders,
        count,
        round(images / count, 2),
        round(tokens / count, 1),
        statistics.median(spent_us),
        min(spent_us),
        max(spent_us),
    )


@dataclass(frozen=True, slots=True)
class Hour:
    """CPU of one run."""

    workload: str
    fidelity: str
    requests: int
    answered: int
    cpu_s: float
    request_us: float


def trace() -> Path | None:
    """ServeGen's image workload; None, with a line that says so, where a machine does not have it."""
    root = os.environ.get("TRIPTYCH_TEST_TRACES")  # noqa: TID251  # where a machine has them is not the project's to say
    if root:
        return Path(root) / "servegen-mm-image"
    print("NOT MEASURED: an hour of a trace, as TRIPTYCH_TEST_TRACES names no directory", file=sys.stderr, flush=True)
    return None


def hours(settings: Settings) -> list[Hour]:
    """An hour by machines takes minutes where the cluster is saturated: there it is simulated by queues alone."""
    saturated = plan(INSTANCES, round(RATE * settings.hour_s), 0)
    runs = [("saturated, 60 requests/s", saturated, "queues", by_queues)]
    if (path := trace()) is not None:
        hour = load(path, Span(43_200.0, settings.hour_s, settings.trace_rate), None, random.Random(0))
        name = f"ServeGen, {settings.trace_rate:g} requests/s"
        runs = [(name, hour, "queues", by_queues), (name, hour, "machines", by_machines), *runs]
    found = []
    for name, requests, fidelity, simulate in runs:
        outcome = simulate(deployment(48, 20), requests)
        count, answered = len(outcome.records), sum(record.ok for record in outcome.records)
        found.append(Hour(name, fidelity, count, answered, outcome.took_s, 1e6 * outcome.took_s / count))
        row = found[-1]
        print(
            f"{name:<26} {fidelity:<9} {count:>7} requests, {answered} answered  {row.cpu_s:6.1f} s "
            f"({row.request_us:.0f} us per request)",
            flush=True,
        )
    return found


def measure(settings: Settings) -> dict[str, Any]:
    rows: list[Cost] = []
    for instances in settings.sizes:
        for fidelity, simulate, requests in (
            ("services", by_services, settings.services),
            ("machines", by_machines, settings.machines),
            ("queues", by_queues, settings.queues),
        ):
            row = measure_one(fidelity, simulate, instances, requests, settings.rounds)
            rows.append(row)
            print(
                f"{row.fidelity:<9} {row.encoders:>3} encoders {row.texts:>3} text instances  "
                f"{row.request_us:8.0f} us ({row.least_us:.0f} to {row.most_us:.0f})",
                flush=True,
            )
    return {
        "machine": machine.describe(),
        "settings": asdict(settings),
        "costs": [asdict(row) for row in rows],
        "hours": [asdict(hour) for hour in hours(settings)],
    }


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="a few requests: shows that it works")
    parser.add_argument("--rounds", type=int, default=Settings().rounds, help="runs of each, with other seeds")
    arguments = parser.parse_args()
    settings = QUICK if arguments.quick else Settings(rounds=arguments.rounds)
    write_figures(arguments.json, measure(settings))


if __name__ == "__main__":
    main()
