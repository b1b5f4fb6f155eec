"""A burst of images at local clusters of real processes: with autoscaling, without, and as one pool that does everything.

The engines compute nothing: they sleep as a synthetic profile says, at start for five seconds too. The same workload is replayed at

- ``autoscaled``: an encoder and a text instance at first; the pool manager decides about both pools.
- ``unscaled``: the same without autoscaling. It is cut off 45 s after the burst began.
- ``monolithic``: two instances at first that encode and decode (role EPD), autoscaled: the same number of instances.

What a system costs is counted in devices: an encoder has one, an instance with a text engine four.

``autoscaled`` and ``unscaled`` run at the same time. The objective is 5 times the isolated TTFT, which each run measures before.
A request that fails misses it.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import ending, machine
from benchmarks.bursts import (
    DEVICES,
    FIRST_S,
    SLO_FACTOR,
    Delays,
    Outcome,
    Served,
    Shape,
    System,
    Workload,
    from_trace,
    poisson_burst,
    replayed,
)
from benchmarks.figures import add_json_option, write_figures
from triptych.domain.stage import Role
from triptych.testing.delay_models import Attention

MANAGER = ("--period-s", "5")
"""Pools shrink once in a period, after two that permit it: 5 s instead of 300 s, as time is compressed as well."""
_UNSCALED_S = 45.0
_NAMES = {Role.E: "encoders", Role.PD: "text", Role.EPD: "hybrid"}
_SHOWN_EVERY = 5


async def run(served: Served, workload: Workload, logs: Path) -> list[Outcome]:
    autoscaled, monolithic = System("autoscaled"), System("monolithic", "EPD:2")
    unscaled = System("unscaled", autoscale=False, until_s=workload.begins_s + _UNSCALED_S)

    async def outcome_of(system: System) -> Outcome:
        at = logs / f"{served.attention.value}-{system.name}"
        return await replayed(served, system, workload, manager_options=MANAGER, log_dir=at)

    async with asyncio.TaskGroup() as group:
        both = [group.create_task(outcome_of(system)) for system in (autoscaled, unscaled)]
    return [*(task.result() for task in both), await outcome_of(monolithic)]


def document(served: Served, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    workload = outcomes[0].workload
    return {
        "attention": served.attention.value,
        "workload": {
            "source": workload.source,
            "requests": len(workload.requests),
            "begins_s": workload.begins_s,
            "ends_s": workload.ends_s,
            "duration_s": workload.duration_s,
            "burst_per_s": round(workload.burst_per_s, 2),
            "before_per_s": round(workload.rate(0.0, workload.begins_s), 2),
        },
        "encoder_capacity_per_s": round(served.encoder_per_s, 3),
        "burst_over_initial_capacity": round(workload.burst_per_s / served.encoder_per_s, 2),
        "systems": [_system(outcome) for outcome in outcomes],
    }


def _system(outcome: Outcome) -> dict[str, Any]:
    phases = {name: outcome.attainment(*phase) for name, phase in outcome.phases.items()}
    return {
        "name": outcome.system.name,
        "isolated_ttft_s": round(outcome.isolated_s, 4),
        "ttft_slo_s": round(outcome.slo_s, 4),
        "attainment": {name: None if share is None else round(share, 4) for name, share in phases.items()},
        f"attainment_from_{FIRST_S:g}_s": None if outcome.settled is None else round(outcome.settled, 4),
        "requests": len(outcome.records),
        "failed": outcome.failed,
        "instance_s": round(outcome.instance_s, 1),
        "device_s": round(outcome.device_s, 1),
        "largest": {_NAMES[role]: outcome.largest(role) for role in _roles(outcome)},
        "ready_per_s": {_NAMES[role]: outcome.sizes(role) for role in _roles(outcome)},
        "processes_per_s": {
            _NAMES[role]: [sample.there.get(role, 0) for sample in outcome.samples] for role in _roles(outcome)
        },
        "generator_late_p99_s": round(outcome.late_s, 4),
        "generator_kept_up": outcome.kept_up,
    }


def _roles(outcome: Outcome) -> list[Role]:
    return [role for role in _NAMES if any(role in sample.ready or role in sample.there for sample in outcome.samples)]


def show(served: Served, outcomes: Sequence[Outcome]) -> None:
    workload = outcomes[0].workload
    print(f"\n{served.attention.value}: {workload.source}, {len(workload.requests)} requests")
    print(
        f"burst from {workload.begins_s:g} s to {workload.ends_s:g} s: {workload.burst_per_s:.1f} requests/s, "
        f"{workload.burst_per_s / served.encoder_per_s:.1f} times what one encoder bears within the objective"
    )
    for outcome in outcomes:
        print(f"\n  {outcome.system.name}: isolated TTFT {outcome.isolated_s:.3f} s, objective {outcome.slo_s:.3f} s")
        for role in _roles(outcome):
            sizes = " ".join(f"{size:>2}" for size in outcome.sizes(role)[::_SHOWN_EVERY])
            print(f"    {_NAMES[role]:<9} ready, every {_SHOWN_EVERY} s: {sizes}")
        for name, phase in outcome.phases.items():
            share = outcome.attainment(*phase)
            print(f"    attainment {name:<18} {'-' if share is None else f'{share:.3f}':>6}")
        print(
            f"    instance-seconds {outcome.instance_s:.0f}, device-seconds {outcome.device_s:.0f}; failed requests {outcome.failed or 'none'}"
        )
        if not outcome.kept_up:
            print(
                f"    the load generator did not keep up: P99 {outcome.late_s:.2f} s late; the load was lower than said"
            )


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument(
        "--trace", type=Path, help="directory of a ServeGen workload; by default the burst is synthetic"
    )
    parser.add_argument("--attention", choices=[kind.value for kind in Attention], help="one of the two models only")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one short burst at one model: shows that it works")
    options = parser.parse_args()
    shape, delays = Shape(), Delays()
    if options.quick:
        shape, options.attention = (
            Shape(before_s=4.0, burst_s=10.0, after_s=4.0),
            options.attention or Attention.DECODER_ONLY,
        )
    workload = (
        poisson_burst(shape, options.seed) if options.trace is None else from_trace(options.trace, shape, options.seed)
    )
    on = machine.describe()
    print("; ".join(f"{key} {value}" for key, value in on.items()))
    print("the engines compute nothing: they sleep as a synthetic profile says")
    models = []
    with tempfile.TemporaryDirectory(prefix="triptych-burst-") as directory:
        for attention in Attention if options.attention is None else [Attention(options.attention)]:
            served = Served.written(Path(directory), attention, delays)
            outcomes = asyncio.run(run(served, workload, Path(directory) / "logs"))
            show(served, outcomes)
            models.append(document(served, outcomes))
    settings = {
        "engines": "sleep as a synthetic profile says",
        "delays": asdict(delays),
        "shape": asdict(shape),
        "devices": {_NAMES[role]: count for role, count in DEVICES.items()},
        "slo": f"TTFT within {SLO_FACTOR:g} times the isolated TTFT",
        "manager": " ".join(MANAGER),
        "seed": options.seed,
    }
    write_figures(options.json, {"machine": on, "settings": settings, "models": models})


if __name__ == "__main__":
    main()
