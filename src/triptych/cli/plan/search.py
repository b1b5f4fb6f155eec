"""Makes a plan from options, shows it, and writes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.progress import Progress as Bar

from triptych.cli.files import make_room
from triptych.cli.outcome import CliError
from triptych.cli.plan import page, show
from triptych.cli.plan.factory import ModelFactory
from triptych.cli.profile.first_use import cache_directory
from triptych.cli.simulate.deployment import Hardware
from triptych.domain.slo import Metric, Slo
from triptych.planning.calibration import FILE_NAME, BadCalibration, Calibration, beside
from triptych.planning.conclusion import conclude
from triptych.planning.modes import try_modes
from triptych.planning.planner import Findings, Prefers, Progress, Question, search
from triptych.planning.search import ROUNDS, Round
from triptych.policy.roofline import DoesNotFit
from triptych.runtime.plans import Made, Options, PlanRecord, write
from triptych.sim.runs import CannotSimulate
from triptych.workload.report import Objectives
from triptych.workload.workload import Workload

_MOST_DEVICES = 4096
_ONE_RATE = "plan takes one rate: leave out --sweep"


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write."""

    json_file: Path | None
    report: Path | None

    @classmethod
    def checked(cls, json_file: Path | None, report: Path | None) -> "Outputs":
        """Make their directories, so that errors show before the search. Raises CliError."""
        make_room({"--json": json_file, "--report": report}, drawn=("--report",))
        return cls(json_file, report)

    def write(self, plan: PlanRecord) -> None:
        """Raises CliError."""
        try:
            if self.json_file is not None:
                write(self.json_file, plan)
            if self.report is not None:
                self.report.write_text(page.page(plan))
        except OSError as error:
            raise CliError(f"cannot write {error.filename}: {error.strerror}", caller=True) from None


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of ``triptych plan``."""

    model: str
    devices: str | None
    max_price: str | None
    prefer: Prefers | None
    hardware: Hardware
    common: Options
    """Options of the simulation beside ``settings`` that all placements share."""
    settings: Options
    """Options of services."""
    workload: Workload
    workload_options: Options
    objectives: Objectives
    attainment: float
    timeout_s: float
    contenders: int
    rounds: Sequence[Round] = ROUNDS


def plan(options: Asked, outputs: Outputs, console: Console) -> None:
    """Raises CliError and WorkloadError. Interrupted, it shows and writes the best so far, and raises KeyboardInterrupt."""
    began_s = perf_counter()
    objectives, settings = _objectives(options)
    factory = ModelFactory(options.model, options.hardware, settings)
    if len(options.workload.asked_rates) > 1:
        raise CliError(_ONE_RATE, caller=True)
    rate = options.workload.asked_rates[0] if options.workload.asked_rates else None
    question = Question(
        workload=options.workload,
        objectives=objectives,
        attainment=options.attainment,
        devices=_devices(options, factory, rate),
        usd_per_hour=None if options.max_price is None else _dollars(options.max_price),
        rate=rate,
        prefers=options.prefer or ("goodput" if rate is None else "cheapest"),
        timeout_s=options.timeout_s,
        control_s=options.hardware.control_s,
        contenders=options.contenders,
        rounds=options.rounds,
        calibration=_calibration(options, factory),
    )
    findings = _searched(question, factory, console)
    concluded = conclude(
        findings,
        model=options.model,
        model_id=factory.model_id,
        common={**options.common, **settings},
        workload=options.workload_options,
        made=_made(findings, factory, perf_counter() - began_s),
    )
    show.show(concluded, console)
    outputs.write(concluded)
    if findings.interrupted:
        raise KeyboardInterrupt
    if concluded.chosen is None:
        raise CliError("no placement meets the objectives", caller=True)


def _calibration(options: Asked, factory: ModelFactory) -> Calibration:
    """What was verified of earlier plans of the model. Raises CliError."""
    profiles = options.hardware.profiles
    path = cache_directory() / FILE_NAME if profiles is None else beside(profiles)
    try:
        calibration = Calibration.read(path).of(factory.model_id)
    except BadCalibration as error:
        raise CliError(f"{path}: {error}", caller=True) from None
    if count := len(calibration.verified):
        factory.notes[f"times are corrected by what {count} verified clusters took ({path})"] = None
    return calibration


def _searched(question: Question, factory: ModelFactory, console: Console) -> Findings:
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("filtering placements", total=None)

        def note(progress: Progress) -> None:
            if not progress.round:
                bar.update(task, description=f"filtering placements: {progress.done}")
                return
            text = f"round {progress.round} of {progress.rounds}"
            best = f", best {progress.best}" if progress.best else ""
            bar.update(task, completed=progress.done, total=progress.known, description=text + best)

        try:
            findings = search(question, factory, note)
        except (DoesNotFit, CannotSimulate) as error:
            raise CliError(str(error), caller=True) from None
        try_modes(findings, factory, note)
        return findings


def _made(findings: Findings, factory: ModelFactory, took_s: float) -> Made:
    error, error_source = factory.expected_error()
    halving, question = findings.halving, findings.question
    seeds = max((each.seeds for each in question.rounds), default=0)
    return Made(
        version=version("triptych"),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        took_s=took_s,
        points=findings.shortlist.points,
        simulated=0 if halving is None else len(halving.contenders) + len(halving.rejected),
        seeds=tuple(range(question.workload.seed, question.workload.seed + seeds)),
        interrupted=findings.interrupted,
        sources=tuple(factory.notes),
        expected_error=error,
        error_source=error_source,
    )


# --- options ----------------------------------------------------------------------------------------------------------


def _objectives(options: Asked) -> tuple[Objectives, Options]:
    """Objectives of results, and the settings with those of the router: either may be given, and follows from the other. Raises CliError."""
    settings = dict(options.settings)
    objectives = options.objectives
    if not objectives.any and "slo" in settings:
        objectives = _of_router(settings["slo"])
    if not objectives.any:
        raise CliError(
            "plan needs objectives: --slo ttft=2s,tbt=100ms, or --slo-ttft-ms and --slo-tpot-ms", caller=True
        )
    if "slo" not in settings:
        named = (("ttft", objectives.ttft_s), ("tbt", objectives.tpot_s))
        settings["slo"] = ",".join(f"{name}={_plain(seconds)}s" for name, seconds in named if seconds is not None)
    return objectives, settings


def _plain(seconds: float) -> str:
    """Without an exponent."""
    return f"{seconds:.6f}".rstrip("0").rstrip(".")


def _of_router(text: str) -> Objectives:
    try:
        slo = Slo.parse(text.split(","))
    except ValueError as error:
        raise CliError(f"--slo {text}: {error}", caller=True) from None
    values: dict[Metric, float] = {}
    for metric in (Metric.TTFT, Metric.TBT):
        objective = slo.objective("", metric)
        if objective is not None and objective.relative:
            raise CliError(f"--slo {text}: plan needs objectives in seconds, such as ttft=2s,tbt=100ms", caller=True)
        if objective is not None:
            values[metric] = objective.value
    return Objectives(values.get(Metric.TTFT), values.get(Metric.TBT))


def _devices(options: Asked, factory: ModelFactory, rate: float | None) -> Mapping[str, int | None]:
    """Kinds of devices with their numbers, where they are limited. Raises CliError."""
    if options.devices is None:
        if options.max_price is None and rate is None:
            raise CliError(
                "plan needs a budget or a load: --devices h100=8, --max-price 40/h, or --rate 30", caller=True
            )
        return dict.fromkeys(factory.priced)
    devices: dict[str, int | None] = {}
    for entry in options.devices.split(","):
        name, equals, count = entry.strip().partition("=")
        if not name or (equals and not (count.isascii() and count.isdigit() and 1 <= int(count[:9]) <= _MOST_DEVICES)):
            raise CliError(
                f"--devices {options.devices}: {entry.strip()!r} is not NAME or NAME=COUNT with a count of 1 to {_MOST_DEVICES}",
                caller=True,
            )
        if name in devices:
            raise CliError(f"--devices {options.devices}: {name} is there more than once", caller=True)
        devices[name] = int(count) if equals else None
    factory.check_devices(list(devices))
    if None in devices.values() and options.max_price is None and rate is None:
        raise CliError(f"--devices {options.devices}: without numbers, plan needs --max-price or --rate", caller=True)
    return devices


def _dollars(text: str) -> float:
    """``40`` or ``40/h``. Raises CliError."""
    try:
        dollars = float(text.removesuffix("/h").removeprefix("$"))
    except ValueError:
        dollars = 0.0
    if not 0 < dollars < 1e9:
        raise CliError(f"--max-price {text}: write dollars per hour, for example 40/h", caller=True)
    return dollars


def options_of(params: Mapping[str, object], names: Sequence[str]) -> Options:
    """Values of a command's parameters as options by name, without those that are not given."""
    return {name.replace("_", "-"): str(value) for name in names if (value := params.get(name)) is not None}
