"""Runs a plan: the command line of ``triptych up``, a file for docker compose, or an overlay for Kubernetes."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from triptych.cli import starting
from triptych.cli.outcome import CliError
from triptych.cli.plan import compose, kubernetes, up
from triptych.cli.plan.cluster import PlannedCluster, planned_cluster, write_profiles
from triptych.cli.plan.followed import followed_files
from triptych.cli.plan.manifests import as_yaml, write_files
from triptych.cli.plan.reading import option_names
from triptych.cli.planning import BASE, COMPOSE_FILE, Target
from triptych.runtime.plans import BadPlan, Candidate, PlanRecord, read

_OVERRIDE, _PROFILES, _PLAN = "docker-compose.plan.yml", "profiles", "plan"
"""What is written to the directory; files in the latter two have the same names in containers."""


@dataclass(frozen=True, slots=True)
class Application:
    """Options of ``triptych plan apply``."""

    plan: Path
    to: Target
    candidate: int | None = None
    out: Path | None = None
    model: str | None = None
    autoscale: bool = False
    start: bool = False
    compose_file: Path = COMPOSE_FILE
    base: Path = BASE
    given: Sequence[str] = ()
    """Further options, of services or of ``triptych up``."""

    @property
    def directory(self) -> Path:
        return self.out or self.plan.parent / f"{self.plan.stem}-{self.to}"


def read_plan(path: Path) -> PlanRecord:
    """Raises CliError."""
    try:
        return read(path)
    except BadPlan as error:
        raise CliError(f"{path}: {error}", caller=True) from None


def candidate_of(plan: PlanRecord, number: int | None) -> Candidate:
    """The candidate with a number from 1 on, or the chosen one. Raises CliError."""
    if number is not None:
        if not 1 <= number <= len(plan.candidates):
            raise CliError(f"--candidate {number}: the plan has {len(plan.candidates)}", caller=True)
        return plan.candidates[number - 1]
    if plan.chosen is None:
        raise CliError("no candidate of the plan meets the objectives: name one with --candidate", caller=True)
    return plan.chosen


def apply(application: Application, console: Console) -> None:
    """Write what the target needs, and print the command that starts it. With ``start`` run that. Raises CliError."""
    plan = read_plan(application.plan)
    placement = candidate_of(plan, application.candidate).placement
    if application.start and application.to != "up":
        raise CliError("--start goes with --to up: the commands of the others are printed", caller=True)
    own, of_services = _split(application.given)
    if own and application.to != "up":
        raise CliError(f"{own[0]} is an option of triptych up: leave it out", caller=True)
    cluster = planned_cluster(
        plan, placement, model=application.model, autoscale=application.autoscale, given=of_services
    )
    match application.to:
        case "up":
            _up(application, cluster, own, console)
        case "compose":
            _compose(application, cluster, console)
        case "kubernetes":
            _kubernetes(application, cluster, console)


def _split(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options of ``triptych up`` itself, and those of services. Raises CliError."""
    names = option_names(starting.up)
    if odd := next((word for word in given if not word.startswith("--")), None):
        raise CliError(f"{odd}: write further options in one word, as --NAME=VALUE", caller=True)
    own = [word for word in given if word.partition("=")[0] in names]
    return own, [word for word in given if word not in own]


def _profiles(application: Application, cluster: PlannedCluster) -> Sequence[Path]:
    """Files in the directory ``profiles``. Raises CliError."""
    try:
        return write_profiles(cluster.profiles, application.directory / _PROFILES)
    except OSError as error:
        raise CliError(f"cannot write {error.filename}: {error.strerror}", caller=True) from None


def _up(application: Application, cluster: PlannedCluster, own: Sequence[str], console: Console) -> None:
    line = up.up_line(cluster, application.directory / _PROFILES, own)
    if not up.has_profiles(cluster):
        _profiles(application, cluster)
    for note in up.notes(cluster):
        console.print(note, soft_wrap=True, style="dim")
    console.print(shlex.join(line), soft_wrap=True)
    if application.start:
        sys.stdout.flush()
        os.execv(sys.executable, (sys.executable, "-m", "triptych.cli", *line[1:]))  # noqa: S606 - the same command


def _compose(application: Application, cluster: PlannedCluster, console: Console) -> None:
    override = application.directory / _OVERRIDE
    _profiles(application, cluster)
    followed = followed_files(cluster)
    made = compose.compose_override(
        cluster,
        application.compose_file,
        application.directory / _PROFILES,
        application.directory / _PLAN if followed else None,
    )
    write_files(application.directory, {**followed, _OVERRIDE: as_yaml(made, comment=str(cluster.placement))})
    for note in compose.notes(cluster):
        console.print(note, soft_wrap=True, style="dim")
    console.print(compose.command(cluster, application.compose_file, override), soft_wrap=True)


def _kubernetes(application: Application, cluster: PlannedCluster, console: Console) -> None:
    profiles, followed = _profiles(application, cluster), followed_files(cluster)
    files = kubernetes.overlay(cluster, application.base, application.directory, profiles, followed)
    write_files(application.directory, {**followed, **files})
    console.print(shlex.join(("kubectl", "apply", "--kustomize", str(application.directory))), soft_wrap=True)
