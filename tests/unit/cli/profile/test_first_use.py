import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from triptych.engine.delay import synthetic_profiles

from triptych.cli.profile import first_use
from triptych.cli.profile.command import Job
from triptych.cli.profile.first_use import demo_profiles
from triptych.demo import MODEL_DIR
from triptych.domain.stage import ModelPart
from triptych.runtime.host import cpu_name
from triptych.runtime.profiles import read_profiles, write_profile


class Measuring:
    """Writes profiles as ``triptych profile`` would; ``hardware`` is what they are of."""

    def __init__(self, hardware: str = cpu_name(), drifts: Sequence[float] = (), takes_s: float = 20.0) -> None:
        """``drifts`` are the machine's changes of speed in the first measurements; each takes ``takes_s``."""
        self.takes_s = takes_s
        self.now_s = 0.0
        self.jobs: list[Job] = []
        self.hardware = hardware
        self.drifts = list(drifts)

    def __call__(self, job: Job, console: Console) -> bool:
        del console
        self.jobs.append(job)
        self.now_s += self.takes_s
        drift = self.drifts.pop(0) if self.drifts else 0.0
        for one in synthetic_profiles(MODEL_DIR):
            if one.identity.part in job.parts:
                options = {"device": "cpu", "threads": str(job.threads)}
                identity = replace(one.identity, hardware=self.hardware, options=options)
                measured = replace(one.measured, drift=drift)
                made = replace(one, identity=identity, measured=measured)
                write_profile(job.out / made.file_name, made)
        return abs(drift) < 0.1

    def clock(self) -> float:
        return self.now_s


def test_the_demo_model_is_measured_once(tmp_path: Path) -> None:
    measure = Measuring()
    first, second = (demo_profiles(Console(), threads=1, cache=tmp_path, measure=measure) for _ in range(2))
    assert first == second
    assert len(read_profiles(first)[0]) == 2
    assert all(job.quick for job in measure.jobs)
    assert [part for job in measure.jobs for part in job.parts] == list(ModelPart)


def test_other_threads_and_other_hardware_are_measured_anew(tmp_path: Path) -> None:
    measure, elsewhere = Measuring(), Measuring("another CPU")
    demo_profiles(Console(), threads=1, cache=tmp_path, measure=elsewhere)
    demo_profiles(Console(), threads=1, cache=tmp_path, measure=measure)
    demo_profiles(Console(), threads=2, cache=tmp_path, measure=measure)
    assert [job.threads for job in measure.jobs] == [1, 1, 2, 2]


def test_a_measurement_that_was_interrupted_goes_on_with_the_part_that_is_missing(tmp_path: Path) -> None:
    measure = Measuring()
    directory = demo_profiles(Console(), threads=1, cache=tmp_path, measure=measure)
    (decoder,) = directory.glob("decoder-*.json")
    decoder.unlink()
    demo_profiles(Console(), threads=1, cache=tmp_path, measure=measure)
    assert measure.jobs[-1].parts == (ModelPart.DECODER,)


def test_a_disturbed_measurement_is_repeated(tmp_path: Path) -> None:
    measure, said = Measuring(drifts=(0.3,)), StringIO()
    directory = demo_profiles(Console(file=said, width=200), threads=1, cache=tmp_path, measure=measure)
    assert [job.parts for job in measure.jobs] == [(ModelPart.ENCODER,), (ModelPart.ENCODER,), (ModelPart.DECODER,)]
    assert {one.measured.drift for one in read_profiles(directory)[0]} == {0.0}
    assert "while the encoder was measured (the same work took 30% longer later): measuring it again" in said.getvalue()
    demo_profiles(Console(), threads=1, cache=tmp_path, measure=measure)
    assert len(measure.jobs) == 3, "it is kept"


@pytest.mark.parametrize(("takes_s", "measured"), [(25.0, [2, 2]), (45.0, [2, 1]), (61.0, [1, 1])])
def test_repeating_what_was_disturbed_adds_about_a_minute_at_most(
    tmp_path: Path, takes_s: float, measured: list[int]
) -> None:
    measure, said = Measuring(drifts=(0.3,) * 4, takes_s=takes_s), StringIO()
    console = Console(file=said, width=300)
    demo_profiles(console, threads=1, cache=tmp_path, measure=measure, clock=measure.clock)
    assert [sum(job.parts == (part,) for job in measure.jobs) for part in ModelPart] == measured
    assert said.getvalue().count(f"measuring it again, which takes about {takes_s:.0f} s") == sum(measured) - 2
    assert said.getvalue().count("end what else runs") == 2


def test_a_measurement_that_stays_disturbed_serves_one_run_only(tmp_path: Path) -> None:
    measure, said = Measuring(drifts=(0.0, -0.3, 0.5)), StringIO()
    first = demo_profiles(Console(file=said, width=200), threads=1, cache=tmp_path, measure=measure)
    found = {one.identity.part: one.measured.drift for one in read_profiles(first)[0]}
    assert found == {ModelPart.ENCODER: 0.0, ModelPart.DECODER: 0.5}
    assert "the next start measures again" in said.getvalue()
    second = demo_profiles(Console(), threads=1, cache=tmp_path, measure=measure)
    assert [job.parts for job in measure.jobs][3:] == [(ModelPart.DECODER,)]
    assert second != first
    assert {one.measured.drift for one in read_profiles(second)[0]} == {0.0}
    assert {one.identity.part: one.measured.drift for one in read_profiles(first)[0]} == found, (
        "the first may still run"
    )
    assert list(second.glob("measuring")) == []


@pytest.mark.parametrize("drift", [0.0, 0.5])
def test_of_the_profiles_of_former_models_and_machines_the_newest_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drift: float
) -> None:
    monkeypatch.setattr(first_use, "_MOST_FILES", 6)
    for day in range(5):
        machine = Measuring(f"machine {day}", drifts=(drift,) * 4)
        used = demo_profiles(Console(), threads=1, cache=tmp_path, measure=machine)
        for path in used.glob(f"*-machine-{day}-*"):
            os.utime(path, (day, day))
    kept = [len(list(used.glob(f"*-machine-{day}-*"))) for day in range(5)]
    assert kept == [0, 0, 2, 2, 2]


def test_profiles_for_one_run_have_the_newest_of_the_parts_that_were_not_disturbed(tmp_path: Path) -> None:
    measure = Measuring(drifts=(0.3, 0.3, 0.0, 0.0, 0.3, 0.4))
    for again in (False, True):
        directory = demo_profiles(Console(), threads=1, cache=tmp_path, measure=measure, again=again)
    found = {one.identity.part: one.measured.drift for one in read_profiles(directory)[0]}
    assert found == {ModelPart.ENCODER: 0.0, ModelPart.DECODER: 0.4}


def test_of_two_commands_at_once_one_measures_and_the_other_uses_that(tmp_path: Path) -> None:
    measure, said = Measuring(), StringIO()
    waits, outcome = threading.Event(), list[Path]()

    class Said(StringIO):
        def write(self, text: str) -> int:
            if "waiting" in text:
                waits.set()
            return said.write(text)

    def other() -> None:
        outcome.append(demo_profiles(Console(file=Said(), width=200), threads=1, cache=tmp_path, measure=measure))

    second = threading.Thread(target=other)

    def first_measures(job: Job, console: Console) -> bool:
        if not measure.jobs:
            second.start()
            assert waits.wait(60)
        return measure(job, console)

    directory = demo_profiles(Console(), threads=1, cache=tmp_path, measure=first_measures)
    second.join(60)
    assert outcome == [directory]
    assert [job.parts for job in measure.jobs] == [(ModelPart.ENCODER,), (ModelPart.DECODER,)]
    assert said.getvalue() == "another command measures the demo model: waiting for it\n"


def test_profiles_that_were_disturbed_when_they_were_made_are_made_again(tmp_path: Path) -> None:
    directory = demo_profiles(Console(), threads=1, cache=tmp_path, measure=Measuring())
    for one in read_profiles(directory)[0]:
        write_profile(directory / one.file_name, replace(one, measured=replace(one.measured, drift=0.2)))
    measure = Measuring()
    demo_profiles(Console(), threads=1, cache=tmp_path, measure=measure)
    assert len(measure.jobs) == 2


def test_profiles_can_be_made_again(tmp_path: Path) -> None:
    measure = Measuring()
    for again in (False, True):
        demo_profiles(Console(), threads=1, cache=tmp_path, measure=measure, again=again)
    assert len(measure.jobs) == 4
