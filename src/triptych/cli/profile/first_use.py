"""Profiles of the demo model, measured on this machine on first use and kept in the user's cache."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from triptych.cli.folders import sole_writer
from triptych.cli.profile.command import Job, profile, write
from triptych.demo import MODEL_DIR
from triptych.domain.durations import in_words
from triptych.domain.embedding import DType
from triptych.domain.profile import Profile
from triptych.domain.slo import USUAL_FACTOR
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import open_checkpoint
from triptych.policy.costs import disturbances
from triptych.ports import Clock
from triptych.runtime.clock import monotonic
from triptych.runtime.host import cpu_name
from triptych.runtime.profiles import read_profiles, the_profile

_KV_CACHE_BYTES = 256 << 20
_REPEATS_S = 60.0
"""Longest time for all repeated measurements of one start, seconds. A part whose first measurement took longer than
what is left is not repeated.
"""
_MEASURING = "measuring"
_DISTURBED = "disturbed"
"""Profiles of parts whose measurement was disturbed, and of the others. They stay, as long as the commands may run that use them:
until there are ``_MOST_FILES`` newer ones."""
_MOST_FILES = 64
"""Profiles in a directory. A model of a machine has two: others are of models, machines and releases before."""


def cache_directory() -> Path:
    return Path.home() / ".cache" / "triptych" / "profiles"


def demo_profiles(
    console: Console,
    *,
    threads: int,
    cache: Path,
    again: bool = False,
    measure: Callable[[Job, Console], bool] = profile,
    clock: Clock = monotonic,
) -> Path:
    """The directory with profiles of the demo model's parts on this machine. Measures those that are not there yet, which
    takes about a minute, or with ``again`` all. Raises CliError.

    A part that was disturbed is measured once more, as long as that adds about a minute at most. If that was disturbed as well, its
    profile is not kept: the directory is then one for this run. Of several processes one measures at a time, and those that
    waited use what it has measured.
    """
    with sole_writer(cache, waits=lambda: console.print("another command measures the demo model: waiting for it")):
        directory = cache / f"demo-{threads}"
        profiles = read_profiles(directory)[0] if directory.is_dir() and not again else []
        checkpoint = open_checkpoint(MODEL_DIR)
        parts = [
            part
            for part in ModelPart
            if not any(_describes(profile, part, checkpoint.part_digest(part), threads) for profile in profiles)
        ]
        if not parts:
            return directory
        console.print(
            "measuring what the demo model costs here, once; this takes about a minute (--profiles DIR skips it)"
        )
        measuring, disturbed = directory / _MEASURING, directory / _DISTURBED
        if again:
            shutil.rmtree(measuring, ignore_errors=True)  # the rows of a measurement that was interrupted
        for path in measuring.glob("*.json"):
            path.unlink()
        left_s, not_kept = _REPEATS_S, set[str]()
        for part in parts:
            measured = _measured(part, directory, threads, console, measure, clock, left_s)
            left_s -= measured.repeated_s
            not_kept |= measured.disturbed
        shutil.rmtree(measuring, ignore_errors=True)
        _forget(directory)
        if not not_kept:
            console.print(f"profiles written to {directory}", soft_wrap=True)
            return directory
        console.print(
            "decisions on sizes will not be exact. These profiles serve for this run only: the next start measures again",
            soft_wrap=True,
        )
        for profile in read_profiles(directory)[0]:
            if profile.file_name not in not_kept:
                write(disturbed / profile.file_name, profile)
        _forget(disturbed)
        return disturbed


@dataclass(frozen=True, slots=True)
class _PartMeasured:
    repeated_s: float
    """Time that a second measurement took."""
    disturbed: frozenset[str]
    """Names of its files, if they are among the disturbed ones."""


def _measured(
    part: ModelPart,
    directory: Path,
    threads: int,
    console: Console,
    measure: Callable[[Job, Console], bool],
    clock: Clock,
    left_s: float,
) -> _PartMeasured:
    """Put a profile of the part into the directory, or into the one for disturbed ones below it. It is measured once if that
    takes more than ``left_s``.
    """
    job = Job(
        model="demo",
        parts=(part,),
        out=directory / _MEASURING,
        quick=True,
        dtype="float32",
        device="cpu",
        threads=threads,
        kv_cache_bytes=_KV_CACHE_BYTES,
        slo_factor=USUAL_FACTOR,
        plot=False,
    )
    began_s = clock()
    measure(job, Console(quiet=True))
    took_s, repeated_s = clock() - began_s, 0.0
    signs = disturbances(the_profile(job.out, part))
    if signs and took_s <= left_s:
        _say_disturbed(console, part, signs, f"measuring it again, which takes about {in_words(max(1.0, took_s))}")
        measure(job, Console(quiet=True))
        repeated_s = clock() - began_s - took_s
        signs = disturbances(the_profile(job.out, part))
    if signs:
        _say_disturbed(console, part, signs, "end what else runs for exact ones")
    place = directory / _DISTURBED if signs else directory
    place.mkdir(exist_ok=True)
    written = list(job.out.glob("*.json"))
    for path in written:
        path.replace(place / path.name)
    return _PartMeasured(repeated_s, frozenset(path.name for path in written if signs))


def _forget(directory: Path) -> None:
    """Remove all but the newest profiles of a directory."""
    files = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in files[:-_MOST_FILES]:
        path.unlink()


def _say_disturbed(console: Console, part: ModelPart, signs: Sequence[str], then: str) -> None:
    console.print(
        f"something else used the machine while the {part.value} was measured ({'; '.join(signs)}): {then}",
        soft_wrap=True,
    )


def _describes(profile: Profile, part: ModelPart, digest: str, threads: int) -> bool:
    """Whether the profile is of this part and can be used."""
    identity = profile.identity
    same = (identity.part, identity.digest, identity.hardware, identity.dtype) == (part, digest, cpu_name(), DType.F32)
    return same and identity.options.get("threads") == str(threads) and not disturbances(profile)
