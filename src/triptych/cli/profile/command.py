"""Runs the measurements of a model's parts in child processes, and writes their profiles."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from triptych.cli.model import Model
from triptych.cli.outcome import CliError
from triptych.cli.profile import show
from triptych.cli.profile.transfers import measure_transfers
from triptych.domain.embedding import DType
from triptych.domain.profile import (
    TABLES,
    BadProfile,
    LoadRow,
    Measured,
    Origin,
    Profile,
    ProfileIdentity,
    dump_profile,
    parse_profile,
)
from triptych.domain.stage import ModelPart, Stage
from triptych.integrations.vllm.accepted import other_times
from triptych.policy.costs import MAX_DRIFT
from triptych.policy.interpolation import held_out_errors
from triptych.policy.transport import between_processes
from triptych.runtime.profiles import read_profile, write_profile

PARTIAL = ".partial"
"""Suffix of a profile whose measurement was interrupted."""
_MODULES = {"triptych": "triptych.engine.profiling", "vllm": "triptych.integrations.vllm.profiling"}
"""What measures a part with an engine."""
_SIZES = tuple(kib << 10 for kib in (16, 64, 256, 1024, 4096, 16384, 65536))
_QUICK_SIZES = _SIZES[1:6]


@dataclass(frozen=True, slots=True)
class PartEngine:
    """The engine of a part."""

    name: Literal["triptych", "vllm"] = "triptych"
    vllm_args: str = ""

    @classmethod
    def of_flags(cls, flags: Sequence[str]) -> "PartEngine":
        """That of a service with these flags."""
        values = {name: value for name, _, value in (flag.partition("=") for flag in flags)}
        return cls("vllm" if values.get("--engine") == "vllm" else "triptych", values.get("--vllm-args", ""))

    @property
    def by_vllm(self) -> bool:
        return self.name == "vllm"

    def other_times(self, profile: Profile) -> tuple[str, ...]:
        """Flags of vLLM that differ from the profile's and change times. Raises CannotStart."""
        if not self.by_vllm:
            return ()
        return other_times(profile.identity.part, profile.identity.options.get("vllm", ""), self.vllm_args)


@dataclass(frozen=True, slots=True)
class Job:
    """Options of ``triptych profile``."""

    model: str
    parts: tuple[ModelPart, ...]
    out: Path
    quick: bool
    dtype: str
    device: str
    threads: int
    kv_cache_bytes: int
    slo_factor: float
    plot: bool
    engines: Mapping[ModelPart, PartEngine] = field(default_factory=dict)
    """Of parts that Triptych's own engine does not measure."""


def profile(job: Job, console: Console) -> bool:
    """Measure each part, show and write its profile. Return whether the machine's speed was steady. Raises CliError.

    When interrupted, the rows so far are kept, and the next run goes on from there.
    """
    model = Model.named(job.model)
    steady = True
    for part in job.parts:
        run = PartRun(job, model.path, part, console)
        measured = run.measure()
        path = job.out / measured.file_name
        write(path, measured)
        run.partial.unlink(missing_ok=True)
        console.print(show.summary(measured))
        for table in show.tables(measured):
            console.print(table)
        if run.found:
            console.print(show.search_result(run.found, job.slo_factor), soft_wrap=True)
        console.print(f"profile written to {path}", soft_wrap=True)
        if job.plot:
            show.plot(path.with_suffix(".png"), measured)
        if abs(measured.measured.drift) > MAX_DRIFT:
            steady = False
            console.print(
                f"the machine's speed changed by {measured.measured.drift:+.0%} while the {part.value} was measured: the "
                "profile is marked, and its estimates have a warning. Measure again when nothing else runs.",
                soft_wrap=True,
            )
    return steady


class PartRun:
    """The measurement of one part."""

    def __init__(self, job: Job, model: Path, part: ModelPart, console: Console) -> None:
        self._job = job
        self._model = model
        self._part = part
        self._console = console
        self._engine = job.engines.get(part, PartEngine())
        self._profile: Profile | None = None
        self._controls: list[float] = []
        self._began_s = time.perf_counter()
        self._known_s = 0.0
        self.found: Mapping[str, Any] = {}
        effort = "quick" if job.quick else "full"
        name = "".join(letter if letter.isalnum() else "-" for letter in model.name)
        engine = "" if self._engine.name == "triptych" else f"-{self._engine.name}"
        self.partial = job.out / f"{name}-{part.value}-{job.dtype}{engine}-{effort}{PARTIAL}"

    def measure(self) -> Profile:
        """Raises CliError."""
        known = self._known()
        module = _MODULES[self._engine.name]
        command = [sys.executable, "-m", module, "--model", str(self._model), "--part", self._part.value]
        command += ["--dtype", self._job.dtype, "--device", self._job.device, "--threads", str(self._job.threads)]
        command += ["--kv-cache-bytes", str(self._job.kv_cache_bytes), "--slo-factor", str(self._job.slo_factor)]
        command += ["--effort", "quick" if self._job.quick else "full", f"--vllm-args={self._engine.vllm_args}"]
        if known is not None:
            command += ["--known", str(self.partial)]
        with tempfile.TemporaryFile("w+") as errors, _progress(self._console, self._part) as (bar, task):
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)  # noqa: S603
            with _ended_by_interrupts(child) as interrupted:
                assert child.stdout is not None  # noqa: S101  # it is a pipe
                for line in child.stdout:
                    if interrupted.is_set():
                        break  # the line may be cut
                    report = json.loads(line)
                    self._take(report, known)
                    if report["kind"] == "planned":
                        bar.update(task, total=report["rows"])
                    elif report["kind"] in {"row", "skipped"}:
                        bar.update(task, advance=1, description=f"{self._part.value}: {report['table']}")
                    elif report["kind"] == "load":
                        bar.update(task, description=f"{self._part.value}: load")
                code = child.wait()
            if interrupted.is_set():
                self._console.print(f"interrupted: the rows so far are in {self.partial}", soft_wrap=True)
                raise KeyboardInterrupt
            if code or self._profile is None:
                errors.seek(0)
                last = errors.read()[-2000:].strip().splitlines()
                raise CliError(f"the {self._part.value} cannot be measured: {last[-1] if last else code}", caller=False)
        if self._part is ModelPart.ENCODER and not self._profile.transfer:
            for row in measure_transfers(_QUICK_SIZES if self._job.quick else _SIZES):
                self._add("transfer", row)
            if missing := sorted({*between_processes()} - {row.backend for row in self._profile.transfer}):
                self._console.print(f"not measured, as they do not work here: {', '.join(missing)}")
        return self._finished()

    def _known(self) -> Profile | None:
        """The rows of an interrupted run."""
        if not self.partial.is_file():
            return None
        try:
            known = read_profile(self.partial)
        except BadProfile as error:
            raise CliError(f"{error}; delete it to start over", caller=True) from None
        self._console.print(f"going on from {self.partial}", soft_wrap=True)
        return known

    def _take(self, report: Mapping[str, Any], known: Profile | None) -> None:
        match report["kind"]:
            case "ready":
                self._profile = self._started(report, known)
            case "control":
                self._controls.append(report["seconds"])
            case "row":
                self._add(report["table"], TABLES[report["table"]](*report["place"], report["seconds"]))
            case "load":
                stage, *numbers = report["row"]
                self._add("load", LoadRow(Stage(stage), *numbers))
            case "found":
                self.found = report

    def _started(self, report: Mapping[str, Any], known: Profile | None) -> Profile:
        reported = report["identity"]
        identity = ProfileIdentity(
            part=ModelPart(reported["part"]),
            digest=reported["digest"],
            stages=frozenset(Stage(stage) for stage in reported["stages"]),
            hardware=reported["hardware"],
            dtype=DType(reported["dtype"]),
            tensor_parallel=reported["tensor_parallel"],
            software=reported["software"],
            options=reported["options"],
        )
        measured = Measured(
            Origin.MEASURED,
            datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            method=f"triptych profile{' --quick' if self._job.quick else ''}",
            start_s=time.perf_counter() - self._began_s,
            **report["facts"],
        )
        if known is None:
            return Profile(identity, measured)
        if known.identity != identity:
            raise CliError(
                f"{self.partial} was measured with another model, hardware, software or options; delete it to start over",
                caller=True,
            )
        self._known_s = known.measured.took_s
        return replace(known, measured=replace(measured, drift=known.measured.drift))

    def _add(self, table: str, row: Any) -> None:
        assert self._profile is not None  # noqa: S101  # rows come after "ready"
        rows: dict[str, Any] = {table: (*getattr(self._profile, table), row)}
        self._profile = self._timed(replace(self._profile, **rows))
        write(self.partial, self._profile)

    def _timed(self, profile: Profile) -> Profile:
        took_s = self._known_s + time.perf_counter() - self._began_s
        return replace(profile, measured=replace(profile.measured, took_s=took_s))

    def _finished(self) -> Profile:
        assert self._profile is not None  # noqa: S101  # checked by the caller
        before = self._profile.measured.drift
        first, *later = self._controls
        drift = max(before, *(rate / first - 1 for rate in later), key=abs)
        done = self._timed(replace(self._profile, measured=replace(self._profile.measured, drift=drift)))
        done = replace(done, errors=held_out_errors(done))
        return parse_profile(dump_profile(done))


def write(path: Path, profile: Profile) -> None:
    """Raises CliError."""
    try:
        write_profile(path, profile)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}", caller=True) from None


@contextlib.contextmanager
def _progress(console: Console, part: ModelPart) -> Iterator[tuple[Progress, Any]]:
    """A progress bar on a terminal, nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar, bar.add_task(f"{part.value}: loading", total=None)


@contextmanager
def _ended_by_interrupts(child: "subprocess.Popen[str]") -> Iterator[threading.Event]:
    """SIGINT ends the child and sets the event; leaving ends the child too. Unlike KeyboardInterrupt, a handler cannot be lost in a
    destructor or a callback.
    """
    interrupted = threading.Event()

    def stop(_: int, __: object) -> None:
        interrupted.set()
        child.kill()

    previous = signal.signal(signal.SIGINT, stop)
    with child:  # waits for it, and closes its pipe
        try:
            yield interrupted
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)
            child.kill()
