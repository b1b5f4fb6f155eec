"""What ``triptych up`` is told about sizes, objectives and profiles: checked before anything starts."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from triptych.cli.model import Model
from triptych.cli.outcome import CliError
from triptych.cli.presets import Preset
from triptych.domain.pool_sizes import bounds_of, parse_bounds
from triptych.domain.profile import BadProfile
from triptych.domain.scaling import PoolName
from triptych.domain.slo import Metric, Slo
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.runtime.profiles import KnownProfiles, the_profile

_OWN_ENGINE = "triptych"
_MAX_INSTANCES = 8
"""Largest size of a pool by default: a machine has no room for the pool manager's own default."""


def options_of(
    models: Sequence[Model],
    sizes: Mapping[Role, int],
    *,
    preset: Preset | None = None,
    autoscale: bool = False,
    switch_roles: bool = False,
    delay_profile: Path | None = None,
    profiles: Path | None = None,
    max_instances: int | None = None,
    pool_sizes: str | None = None,
    slo: str | None = None,
    engine: str = _OWN_ENGINE,
    vllm_args: str = "",
    encoder_engine: str = _OWN_ENGINE,
    encoder_vllm_args: str = "",
    embedding_files: Path | None = None,
    embedding_files_bytes: int = 0,
    kv_prefixes: bool = False,
    resident: str | None = None,
    measure: Callable[[], Path] | None = None,
) -> dict[str, tuple[str, ...]]:
    """Flags by service, and of the encoders mounted in text processes. ``sizes`` are those of each model's pools at the
    start; ``measure`` makes profiles if none are named, once everything else is known to be right. A preset that switches roles has
    objectives, where ``slo`` has none. Raises CliError.
    """
    delays = delay_profile is not None
    mounting = {role for role in sizes if role.serves(Stage.ENCODE) and role is not Role.E}
    of_text = _of_engine("", engine, vllm_args, mounting, delays=delays, switches=switch_roles)
    of_encoder = _of_engine(
        "encoder-", encoder_engine, encoder_vllm_args, mounting, delays=delays, switches=switch_roles
    )
    in_memory = _resident(resident, delays=delays, switches=switch_roles)
    kept = _kept(embedding_files, embedding_files_bytes)
    begins = max(sizes.values())
    most = max(_MAX_INSTANCES, begins) if max_instances is None else max_instances
    if begins > most:
        raise CliError(f"--max-instances {most}: a pool begins with {begins} instances", caller=True)
    bounds = () if pool_sizes is None else tuple(entry.strip() for entry in pool_sizes.split(","))
    _check_bounds(bounds, models, sizes, autoscale=autoscale)
    slo = _objectives(slo, preset, switches=switch_roles)
    try:
        if delay_profile is not None:
            for part in ModelPart:
                the_profile(delay_profile, part)
    except BadProfile as error:
        raise CliError(f"--delay-profile {delay_profile}: {error}", caller=True) from None
    try:
        KnownProfiles.read(profiles)
    except BadProfile as error:
        raise CliError(f"--profiles {profiles}: {error}", caller=True) from None
    known = profiles or delay_profile or (None if measure is None else measure())
    if switch_roles:
        _check_parts(KnownProfiles.read(known))
    delayed = () if delay_profile is None else ("--delay-profile", str(delay_profile.absolute()))
    profiled = () if known is None else ("--profiles", str(known.absolute()))
    mounted = {"mounted_encoder": kept} if kept else {}
    policies = {} if preset is None else preset.options(slo)
    objectives = () if slo is None else ("--slo", slo)
    keeping, pulling = (("--kv-prefixes",), ("--prefixes", "by-cost")) if kv_prefixes else ((), ())
    return mounted | {
        "encoder": (*delayed, *of_encoder, *kept),
        "text": (*delayed, *of_text, *keeping, *in_memory, *policies.get("text", ())),
        "router": (*profiled, *objectives, *pulling, *policies.get("router", ())),
        "pool_manager": (
            *profiled,
            "--max-instances",
            str(most),
            *(("--pool-sizes", ",".join(bounds)) if bounds else ()),
        ),
    }


def _of_engine(
    prefix: str, engine: str, vllm_args: str, others: AbstractSet[Role], *, delays: bool, switches: bool
) -> tuple[str, ...]:
    """The flags of text processes or of encoders for an engine; ``prefix`` is that of their options. Of the roles there will
    be, ``others`` are those that only the own engine can have. Raises CliError.
    """
    option = f"--{prefix}engine"
    if engine == _OWN_ENGINE:
        if vllm_args:
            raise CliError(f"--{prefix}vllm-args is for {option} vllm", caller=True)
        return ()
    if switches:
        raise CliError(f"{option} {engine} cannot switch roles; --no-switch-roles does without", caller=True)
    if others:
        names = ", ".join(sorted(role.value for role in others))
        raise CliError(
            f"{option} {engine} encodes in role E and generates in roles P, D and PD, not in {names}", caller=True
        )
    if delays:
        raise CliError(f"{option} {engine} computes: it cannot have a --delay-profile", caller=True)
    return ("--engine", engine, *((f"--vllm-args={vllm_args}",) if vllm_args else ()))


def _resident(resident: str | None, *, delays: bool, switches: bool) -> tuple[str, ...]:
    """The flag of text processes for the weights that they have in memory; none leaves it to their environment. Raises CliError."""
    if resident is None:
        return ()
    if resident != "all" and not switches:
        raise CliError(f"--resident {resident} is for instances that switch roles: --switch-roles", caller=True)
    if resident != "all" and delays:
        raise CliError(f"--resident {resident}: with --delay-profile there are no weights in memory", caller=True)
    return ("--resident", resident)


def _objectives(slo: str | None, preset: Preset | None, *, switches: bool) -> str | None:
    """Those that were named, else those of a preset that switches roles. Raises CliError if they are wrong, or the pool manager could
    not tell by them when a stage is short of instances.
    """
    if slo is None and switches and preset is not None:
        slo = preset.switching or None
    try:
        told = set() if slo is None else {metric for _, metric in Slo.parse(slo.split(",")).objectives}
    except ValueError as error:
        raise CliError(f"--{error}", caller=True) from None
    if switches and not told >= {Metric.TTFT, Metric.TBT}:
        text = (
            "to switch roles takes objectives for the time to the first token and between tokens: --slo ttft=5x,tbt=5x"
        )
        raise CliError(f"{text}; --no-switch-roles does without", caller=True)
    return slo


def _check_parts(known: KnownProfiles) -> None:
    """Whether the pool manager can tell what an instance bears in each stage. Raises CliError."""
    told = {one.identity.part for one in known.own}
    if lacking := [part.value for part in ModelPart if part not in told]:
        text = (
            f"to switch roles takes profiles of the model's {' and '.join(lacking)}: --profiles DIR (triptych profile)"
        )
        raise CliError(f"{text}; --no-switch-roles does without", caller=True)


def _kept(directory: Path | None, nbytes: int) -> tuple[str, ...]:
    """The flags of encoders that keep embeddings in files. Raises CliError."""
    if (directory is None) is not (nbytes == 0):
        raise CliError("--embedding-files and --embedding-files-bytes belong together", caller=True)
    if directory is None:
        return ()
    return ("--embedding-files", str(directory.absolute()), "--embedding-files-bytes", str(nbytes))


def _check_bounds(
    entries: Sequence[str], models: Sequence[Model], sizes: Mapping[Role, int], *, autoscale: bool
) -> None:
    """Whether each entry is of a pool that there will be, which begins within its bounds. Raises CliError."""
    pools = {PoolName(model.model_id, role): size for model in models for role, size in sizes.items()}
    try:
        named = [(entry, parse_bounds(entry)[0]) for entry in entries]
    except ValueError as error:
        raise CliError(f"--pool-sizes {error}", caller=True) from None
    for entry, name in named:
        if name not in {text for pool in pools for text in (str(pool), pool.role.value)}:
            there = ", ".join(map(str, pools))
            raise CliError(f"--pool-sizes {entry!r}: there will be no such pool; there will be: {there}", caller=True)
        if [one for _, one in named].count(name) > 1:
            raise CliError(f"--pool-sizes names {name} more than once", caller=True)
    for pool, size in pools.items():
        found = bounds_of(pool, entries)
        grows = found is not None and autoscale and size < found.least
        if found is not None and not grows and not found.least <= size <= found.most:
            raise CliError(
                f"--roles {pool.role.value}:{size}: --pool-sizes lets pool {pool} have {found.least} to {found.most} instances",
                caller=True,
            )
