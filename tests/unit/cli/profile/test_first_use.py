from dataclasses import replace
from pathlib import Path

from rich.console import Console

from triptych.cli.profile.command import Job
from triptych.cli.profile.first_use import demo_profiles
from triptych.demo import MODEL_DIR
from triptych.domain.stage import ModelPart
from triptych.runtime.host import cpu_name
from triptych.runtime.profiles import read_profiles, write_profile
from triptych.testing.delay import synthetic_profiles


class Measuring:
    """Writes profiles as ``triptych profile`` would; ``hardware`` is what they are of."""

    def __init__(self, hardware: str = cpu_name()) -> None:
        self.jobs: list[Job] = []
        self.hardware = hardware

    def __call__(self, job: Job, console: Console) -> bool:
        del console
        self.jobs.append(job)
        for one in synthetic_profiles(MODEL_DIR):
            if one.identity.part in job.parts:
                options = {"device": "cpu", "threads": str(job.threads)}
                identity = replace(one.identity, hardware=self.hardware, options=options)
                write_profile(job.out / one.file_name, replace(one, identity=identity))
        return True


def test_the_demo_model_is_measured_once(tmp_path: Path) -> None:
    measure = Measuring()
    first, second = (demo_profiles(Console(), threads=1, cache=tmp_path, measure=measure) for _ in range(2))
    assert first == second
    assert len(read_profiles(first)[0]) == 2
    (job,) = measure.jobs
    assert job.quick
    assert set(job.parts) == set(ModelPart)


def test_other_threads_and_other_hardware_are_measured_anew(tmp_path: Path) -> None:
    measure, elsewhere = Measuring(), Measuring("another CPU")
    demo_profiles(Console(), threads=1, cache=tmp_path, measure=elsewhere)
    demo_profiles(Console(), threads=1, cache=tmp_path, measure=measure)
    demo_profiles(Console(), threads=2, cache=tmp_path, measure=measure)
    assert [job.threads for job in measure.jobs] == [1, 2]


def test_a_measurement_that_was_interrupted_goes_on_with_the_part_that_is_missing(tmp_path: Path) -> None:
    measure = Measuring()
    directory = demo_profiles(Console(), threads=1, cache=tmp_path, measure=measure)
    (decoder,) = directory.glob("decoder-*.json")
    decoder.unlink()
    demo_profiles(Console(), threads=1, cache=tmp_path, measure=measure)
    assert measure.jobs[-1].parts == (ModelPart.DECODER,)
