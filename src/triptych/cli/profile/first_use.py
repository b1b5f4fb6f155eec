"""Profiles of the demo model, measured on this machine on first use and kept in the user's cache."""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from triptych.cli.profile.command import Job, profile
from triptych.demo import MODEL_DIR
from triptych.domain.embedding import DType
from triptych.domain.profile import Profile
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import open_checkpoint
from triptych.runtime.host import cpu_name
from triptych.runtime.profiles import read_profiles

_KV_CACHE_BYTES = 256 << 20
_SLO_FACTOR = 5.0


def cache_directory() -> Path:
    return Path.home() / ".cache" / "triptych" / "profiles"


def demo_profiles(
    console: Console, *, threads: int, cache: Path, measure: Callable[[Job, Console], bool] = profile
) -> Path:
    """The directory with profiles of the demo model's parts on this machine. Measures those that are not there yet, which
    takes about a minute. Raises CliError.
    """
    directory = cache / f"demo-{threads}"
    found = read_profiles(directory)[0] if directory.is_dir() else []
    checkpoint = open_checkpoint(MODEL_DIR)
    parts = tuple(
        part
        for part in ModelPart
        if not any(_describes(one, part, checkpoint.part_digest(part), threads) for one in found)
    )
    if parts:
        console.print(
            "measuring what the demo model costs here, once; this takes about a minute (--profiles DIR skips it)"
        )
        job = Job(
            model="demo",
            parts=parts,
            out=directory,
            quick=True,
            dtype="float32",
            device="cpu",
            threads=threads,
            kv_cache_bytes=_KV_CACHE_BYTES,
            slo_factor=_SLO_FACTOR,
            plot=False,
        )
        if not measure(job, Console(quiet=True)):
            console.print("the machine was not steady meanwhile: decisions will say that their costs are not exact")
        console.print(f"profiles written to {directory}", soft_wrap=True)
    return directory


def _describes(one: Profile, part: ModelPart, digest: str, threads: int) -> bool:
    told = one.identity
    same = (told.part, told.digest, told.hardware, told.dtype) == (part, digest, cpu_name(), DType.F32)
    return same and told.options.get("threads") == str(threads)
