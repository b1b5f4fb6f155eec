"""What a pool manager that makes its plan again saves when the mix of requests drifts, in virtual time: from text to images to videos.

The real services of a simulated cluster serve Qwen3-VL-4B on L4s, whose costs are computed (``triptych simulate``). The plan is that of
``triptych plan`` for the first mix. Rows:

``fixed``      the plan with the fewest instances, of those with the whole model on each (EPD) or encoders apart (E, PD), that has at least the
               attainment of ``replan`` over the whole run: found by queues, and confirmed by the services
``autoscaled`` EPD instances that follow their load, without a plan
``replan``     follows the plan (``--plan --replan --autoscale``), with instances that can switch roles

Instances count from their order to their end. A search takes 20 s of virtual time, an instance its computed start. Equal seeds give equal
results, on any machine. ``--seeds`` gives the mean and range of the ratio to ``fixed``, and of differences in attainment.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from benchmarks.papers.vllm_blog import CONFIG
from triptych.cli.plan.again import proposal_for
from triptych.cli.plan.reading import hardware_of, settings_of
from triptych.cli.plan.search import Asked, Outputs
from triptych.cli.plan.search import plan as make_plan
from triptych.cli.service_options import by_name, parse
from triptych.cli.simulate.deployment import CostedModel, Hardware
from triptych.domain.replanning import PlanQuestion, Proposal, in_letters
from triptych.machine.pool_manager.plan import ReplanLimits
from triptych.planning.search import Round
from triptych.runtime.cores import usable_cores
from triptych.runtime.plans import PlanRecord, read, words, write
from triptych.sim.outcome import Outcome
from triptych.sim.queues.run import simulate as by_queues
from triptych.sim.run import simulate
from triptych.sim.scenario import Deployment
from triptych.workload.report import Objectives, summarize
from triptych.workload.requests import Clip, Distribution, Mix, Plan, Planned, Size, synthetic
from triptych.workload.workload import Workload

DEVICE, MOST, CORES = "l4", 16, 8
OBJECTIVES, ATTAINMENT = Objectives(4.0, 0.5), 0.9
SEARCH_S = 20.0
CONTROL_S, TIMEOUT_S = 0.0003, 300.0
FIXED, AUTOSCALED, REPLAN = "fixed", "autoscaled", "replan"
_SETTINGS = ("--max-sequences=64", "--max-batch-items=8", "--slo=ttft=4s,tbt=1s")
_TEXT, _IMAGE, _VIDEO = "text", "images", "videos"


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests that are alike for a time."""

    name: str
    options: Mapping[str, str]
    """As ``triptych bench`` and ``triptych plan`` take them."""


PHASES = (
    Phase(_TEXT, {"images": "0", "text-tokens": "1500,2500", "output-tokens": "8,24"}),
    Phase(_IMAGE, {"images": "3:0.5,5:0.5", "image-size": "1024x1024", "text-tokens": "64", "output-tokens": "8,24"}),
    Phase(
        _VIDEO,
        {
            "images": "0",
            "videos": "12:0.5,20:0.5",
            "video-size": "448x336",
            "video-seconds": "8",
            "text-tokens": "64",
            "output-tokens": "8,24",
        },
    ),
)


@dataclass(frozen=True, slots=True)
class Settings:
    rate: float = 2.7
    phase_s: float = 600.0
    seed: int = 0
    rows: tuple[str, ...] = (REPLAN, FIXED, AUTOSCALED)


QUICK = Settings(phase_s=150.0, rows=(REPLAN,))


@dataclass(frozen=True, slots=True)
class Row:
    row: str
    roles: str
    """At the start."""
    instance_s: float
    attainment: float
    by_phase: Mapping[str, float]
    """Attainment of the requests that came in each phase."""
    errors: Mapping[str, int]
    """Requests without a whole answer, by what the client got instead."""
    failed: int
    """Those of them that broke. The others were refused, or too late, under load (``workload.report``)."""
    changes: Sequence[tuple[float, str]]
    """What was started, stopped and switched, with seconds since the start."""


def mix_of(phase: Phase) -> Mix:
    options = phase.options
    return Mix(
        Distribution.parse(options["images"]),
        Distribution.parse(options["text-tokens"]),
        Distribution.parse(options["output-tokens"], least=1),
        Size.parse(options.get("image-size", "336x336")),
        videos=Distribution.parse(options.get("videos", "0")),
        clip=Clip(Size.parse(options.get("video-size", "224x224")), float(options.get("video-seconds", "4"))),
    )


def load_of(settings: Settings) -> Plan:
    """The requests of all phases, one after the other."""

    def requests() -> Iterator[Planned]:
        for number, phase in enumerate(PHASES):
            rng = random.Random(f"{settings.seed} {phase.name}")
            part = synthetic(mix_of(phase), rate=settings.rate, duration_s=settings.phase_s, burstiness=1.0, rng=rng)
            for planned in part.requests:
                yield replace(planned, arrival_s=planned.arrival_s + number * settings.phase_s)

    return Plan(list(requests()), len(PHASES) * settings.phase_s)


def made_plan(config: Path, settings: Settings, out: Path) -> PlanRecord:
    """The plan for the first mix, whose instances have as many cores as other mixes need. Found by queues alone."""
    options = PHASES[0].options
    asked = Asked(
        model=str(config),
        devices=f"{DEVICE}={MOST}",
        max_price=None,
        prefer=None,
        hardware=Hardware(DEVICE, "1", None, None, None, CORES, CONTROL_S),
        common={},
        settings=by_name(_SETTINGS),
        workload=Workload(mix_of(PHASES[0]), None, None, (settings.rate,), 0.0, settings.phase_s, 1.0, settings.seed),
        workload_options=options,
        objectives=OBJECTIVES,
        attainment=ATTAINMENT,
        timeout_s=TIMEOUT_S,
        contenders=6,
        rounds=(Round(150, 4, 1, 0.2, "queues", keeps=0),),
    )
    make_plan(asked, Outputs(out, None), Console(file=StringIO()))
    plan = read(out)
    chosen = plan.candidates[0]
    placement = replace(chosen.placement, prepare_cores=CORES)
    plan = replace(plan, candidates=(replace(chosen, placement=placement), *plan.candidates[1:]))
    write(out, plan)
    return plan


class InlineReplanner:
    """``ports.Replanner`` in this process: a search takes no time of the simulation, and then ``SEARCH_S``."""

    def __init__(self, plan: PlanRecord) -> None:
        self._plan = plan
        self.found: list[tuple[float, str, str, str]] = []
        """When, from what, to what, and why."""

    async def search(self, question: PlanQuestion) -> Proposal:
        proposal = proposal_for(self._plan, question)
        await asyncio.sleep(SEARCH_S)
        found = in_letters(question.present), in_letters(proposal.wanted), proposal.reason
        self.found.append((round(asyncio.get_running_loop().time(), 1), *found))
        return proposal


class Bench:
    """Makes the deployments of a plan, and serves the load by them."""

    def __init__(self, plan: PlanRecord, path: Path, settings: Settings) -> None:
        self._plan, self._path, self._settings = plan, path, settings
        placement = plan.candidates[0].placement
        self._hardware = hardware_of(plan, placement)
        self._given = parse(words(settings_of(plan, placement)))
        self._costed = CostedModel(plan.model, self._hardware)
        self._load = load_of(settings)
        self.first = placement.roles_text
        self.replanner = InlineReplanner(plan)

    def deployment(self, roles: str, *, scales: bool = False, switches: bool = False) -> Deployment:
        given = {**self._given, "pool_manager": ("--max-instances=32",)}
        return self._costed.deployment(
            self._hardware, roles, None, autoscale=scales, switch_roles=switches, given=given, faults=()
        ).deployment

    def following(self) -> Deployment:
        """The deployment that follows the plan."""
        made = self.deployment(self.first, scales=True, switches=True)
        update = {"plan": self._path, "replan": True, "switch_roles": False}
        return replace(made, manager=made.manager.model_copy(update=update), replanner=self.replanner)

    def served(self, row: str, roles: str, deployment: Deployment) -> Row:
        outcome = simulate(deployment, self._load, seed=self._settings.seed, timeout_s=TIMEOUT_S)
        return self.row(row, roles, outcome)

    def row(self, row: str, roles: str, outcome: Outcome) -> Row:
        phase_s = self._settings.phase_s
        met: dict[str, list[bool]] = {phase.name: [] for phase in PHASES}
        for record in outcome.records:
            phase = PHASES[min(len(PHASES) - 1, int(record.planned.arrival_s // phase_s))]
            met[phase.name].append(OBJECTIVES.met(record))
        every = [is_met for of_phase in met.values() for is_met in of_phase]
        report = summarize(outcome.records, OBJECTIVES, self._settings.rate)
        return Row(
            row,
            roles,
            round(sum(use.lasted_s for use in outcome.instances)),
            round(sum(every) / len(every), 4),
            {name: round(sum(of_phase) / len(of_phase), 4) for name, of_phase in met.items()},
            report.errors,
            report.failed,
            [(round(decision.at_s, 1), decision.text) for decision in outcome.decisions],
        )

    def best_fixed(self, attainment: float) -> Row:
        """The fewest instances that reach the attainment. Raises AssertionError if none of up to ``MOST`` does."""
        for count in range(1, MOST + 1):
            divided = [f"E:{encoders},PD:{count - encoders}" for encoders in range(1, count)]
            rows = [self._by_queues(roles) for roles in (f"EPD:{count}", *divided)]
            best = max(rows, key=lambda row: row.attainment)
            print(f"  queues: {best.roles} has {best.attainment:.1%}", flush=True)
            if best.attainment >= attainment - 0.02:
                confirmed = self.served(FIXED, best.roles, self.deployment(best.roles))
                if confirmed.attainment >= attainment:
                    return confirmed
        raise AssertionError(f"no fixed plan of up to {MOST} instances reaches {attainment:.1%}")

    def _by_queues(self, roles: str) -> Row:
        outcome = by_queues(self.deployment(roles), self._load, seed=self._settings.seed, timeout_s=TIMEOUT_S)
        return self.row(FIXED, roles, outcome)


def measured(settings: Settings) -> tuple[list[Row], dict[str, Any]]:
    with TemporaryDirectory() as folder:
        config, path = Path(folder) / "config.json", Path(folder) / "plan.json"
        config.write_text(json.dumps(CONFIG))
        plan = made_plan(config, settings, path)
        bench = Bench(plan, path, settings)
        print(f"the plan for {PHASES[0].name}: {bench.first}", flush=True)
        rows: list[Row] = []
        for name in settings.rows:
            match name:
                case "replan":
                    rows.append(bench.served(REPLAN, bench.first, bench.following()))
                case "fixed":
                    rows.append(bench.best_fixed(rows[0].attainment))
                case _:
                    roles = f"EPD:{sum(plan.candidates[0].placement.roles.values())}"
                    rows.append(bench.served(AUTOSCALED, roles, bench.deployment(roles, scales=True)))
            show(rows[-1])
        return rows, {"plan": bench.first, "searches": bench.replanner.found}


def show(row: Row) -> None:
    phases = ", ".join(f"{name} {share:.1%}" for name, share in row.by_phase.items())
    errors = ", ".join(f"{count} {error}" for error, count in row.errors.items())
    print(
        f"{row.row:>10} from {row.roles:<12} {row.instance_s:>7.0f} instance-seconds, attainment {row.attainment:.1%} ({phases}), "
        f"{row.failed} failed, no answer: {errors or 'none'}, {len(row.changes)} changes",
        flush=True,
    )


def conclude(rows: Sequence[Row], searches: Sequence[Sequence[object]]) -> dict[str, Any]:
    """The ratio to the best fixed plan, and where it loses."""
    by_row = {row.row: row for row in rows}
    for at_s, before, after, why in searches:
        print(f"  at {at_s} s: {before} -> {after}: {why}")
    if FIXED not in by_row or REPLAN not in by_row:
        return {}
    replan, fixed = by_row[REPLAN], by_row[FIXED]
    ratio = replan.instance_s / fixed.instance_s
    loses = {name: round(replan.by_phase[name] - fixed.by_phase[name], 4) for name in replan.by_phase}
    print(f"replan takes {ratio:.2f} of the instance-seconds of the best fixed plan ({fixed.roles})")
    for name, difference in loses.items():
        print(f"  {name}: attainment {difference:+.1%} beside it")
    if (autoscaled := by_row.get(AUTOSCALED)) is not None:
        print(
            f"replan takes {replan.instance_s / autoscaled.instance_s:.2f} of what autoscaling takes, which has {autoscaled.attainment:.1%}"
        )
    return {"ratio": round(ratio, 3), "by_phase": loses}


def of_seed(settings: Settings) -> dict[str, Any]:
    """The figures of one seed."""
    rows, said = measured(settings)
    return {"seed": settings.seed, **said, **conclude(rows, said["searches"]), "rows": [asdict(row) for row in rows]}


def of_seeds(settings: Settings, seeds: int) -> list[dict[str, Any]]:
    """The figures of so many seeds, from the settings' on."""
    every = [replace(settings, seed=settings.seed + number) for number in range(seeds)]
    if seeds == 1:
        return [of_seed(settings)]
    with ProcessPoolExecutor(min(seeds, len(usable_cores())), get_context("spawn")) as pool:
        return list(pool.map(of_seed, every))


def over_seeds(each: Sequence[Mapping[str, Any]]) -> Mapping[str, Sequence[float]]:
    """Mean, least and most of the ratio and of the differences in attainment."""
    figures = {"ratio": [seed["ratio"] for seed in each if "ratio" in seed]}
    figures |= {
        name: [seed["by_phase"][name] for seed in each if "by_phase" in seed] for name in (_TEXT, _IMAGE, _VIDEO)
    }
    found = {name: (round(fmean(values), 3), min(values), max(values)) for name, values in figures.items() if values}
    for name, (mean, least, most) in found.items():
        print(f"{name}: {mean:.3f} ({least:.3f} to {most:.3f}) over {len(figures[name])} seeds")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="short phases, and replan alone: shows that it works")
    parser.add_argument("--seed", type=int, default=Settings().seed, help="the first")
    parser.add_argument("--seeds", type=int, default=1, help="so many, side by side on the cores that there are")
    parser.add_argument("--rows", default=",".join(Settings().rows), help="of those above; replan comes first")
    parser.add_argument("--rate", type=float, default=Settings().rate)
    arguments = parser.parse_args()
    ending.by_sigterm()
    settings = replace(Settings(), rows=tuple(arguments.rows.split(",")))
    settings = replace(QUICK if arguments.quick else settings, seed=arguments.seed, rate=arguments.rate)
    each = of_seeds(settings, arguments.seeds)
    write_figures(
        arguments.json,
        {
            "machine": machine.describe(),
            "settings": asdict(settings),
            "objectives": asdict(OBJECTIVES),
            "limits": asdict(ReplanLimits()),
            **(each[0] if len(each) == 1 else {"over_seeds": over_seeds(each), "seeds": each}),
        },
    )


if __name__ == "__main__":
    main()
