"""Tiers of hardware in ``triptych up``: pools of one role on several kinds of devices, with a price, a speed, settings and GPUs of their own."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from triptych.cli.outcome import CliError
from triptych.cli.service_options import Flags, loaded, parse, without_instance_flags
from triptych.domain.profile import BadProfile, Profile
from triptych.domain.scaling import Kind
from triptych.domain.stage import ModelPart, Role
from triptych.domain.tier import Tier
from triptych.runtime.profiles import the_profile, write_profile
from triptych.services.pool_manager.settings import PoolManagerSettings

T = TypeVar("T")
_GPUS = re.compile(r"[0-9A-Za-z-]{1,64}(\+[0-9A-Za-z-]{1,64})*(/[0-9A-Za-z-]{1,64}(\+[0-9A-Za-z-]{1,64})*)*")
_MAX_HARDWARE = 128
_NO_FLAGS: Flags = MappingProxyType({})
_INSTANCES = ("encoder", "text")
_DELAY, _PROFILES = "--delay-profile=", "--profiles="


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A tier of one role as it is started."""

    tier: Tier
    gpus: tuple[str, ...] = ()
    """GPUs of each instance, as CUDA_VISIBLE_DEVICES has them. Empty: all instances have those of this process."""
    flags: Flags = field(default_factory=lambda: _NO_FLAGS)
    """Settings that its instances have beside those of all, by service."""

    def of(self, service: str) -> tuple[str, ...]:
        """Flags of its processes of a service."""
        return (f"--tier={self.tier}", *self.flags.get(service, ()))

    @property
    def mounted(self) -> tuple[str, ...]:
        """Flags of an encoder in a text process."""
        return without_instance_flags(self.flags.get("encoder", ()))


Tiers = Mapping[Kind, TierPlan]
NO_TIERS: Tiers = MappingProxyType({})


def read_tiers(kinds: Iterable[Kind], tiers: Sequence[str], settings: Sequence[str]) -> Tiers:
    """The tiers among ``kinds``. ``tiers`` describe them, as ``[ROLE@]TIER[:device=TEXT,price=NUMBER,speed=NUMBER,gpus=0+1/2+3]``;
    ``settings`` are further options of their instances, as ``[ROLE@]TIER:--NAME=VALUE ...``. Raises CliError.
    """
    own = [kind for kind in kinds if kind.tier]
    described = _by_kind("--tier", own, {key: _described(text) for key, text in _keyed("--tier", tiers)})
    flags = _by_kind(
        "--tier-settings", own, {key: _settings(text) for key, text in _keyed("--tier-settings", settings)}
    )
    plans = {}
    for kind in own:
        tier, gpus = described.get(kind, (Tier(kind.tier), ()))
        plans[kind] = TierPlan(tier, gpus, flags.get(kind, _NO_FLAGS))
    return plans


def _keyed(option: str, entries: Sequence[str]) -> list[tuple[str, str]]:
    """What each entry is of, and the rest, with its tier's name in front. Raises CliError for one that is there twice."""
    keyed: dict[str, str] = {}
    for entry in entries:
        key, colon, rest = entry.partition(":")
        if key in keyed:
            raise CliError(f"{option} names {key} more than once", caller=True)
        keyed[key] = f"{key.rpartition('@')[2]}{colon}{rest}"
    return list(keyed.items())


def _by_kind(option: str, kinds: Sequence[Kind], entries: Mapping[str, T]) -> dict[Kind, T]:
    """The entry of each kind: its own, else that of the tier in all roles. Raises CliError for one that is of no kind."""
    for key in entries:
        if not any(key in (str(kind), kind.tier) for kind in kinds):
            known = ", ".join(map(str, kinds)) or "none; --roles PD@fast:1,PD@slow:2 has two"
            raise CliError(f"{option} {key}: --roles has no such tier; there are: {known}", caller=True)
    return {kind: entries[key] for kind in kinds for key in (kind.tier, str(kind)) if key in entries}


def _described(text: str) -> tuple[Tier, tuple[str, ...]]:
    """Raises CliError."""
    name, _, rest = text.partition(":")
    parts = rest.split(",") if rest else []
    gpus = [part.removeprefix("gpus=") for part in parts if part.startswith("gpus=")]
    others = ",".join(part for part in parts if not part.startswith("gpus="))
    if len(gpus) > 1 or not all(map(_GPUS.fullmatch, gpus)):
        raise CliError(f"--tier {text}: gpus of each instance are written as gpus=0/1, or gpus=0+1/2+3", caller=True)
    try:
        tier = Tier.parse(f"{name}:{others}" if others else name)
    except ValueError as error:
        raise CliError(f"--tier {text}: {error}", caller=True) from None
    groups = tuple(group.replace("+", ",") for group in gpus[0].split("/")) if gpus else ()
    return tier, groups


def _settings(text: str) -> Flags:
    """Raises CliError."""
    name, _, line = text.partition(":")
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise CliError(f"--tier-settings {name}: {error}", caller=True) from None
    flags = parse(words)
    taken = {flag for service in _INSTANCES for flag in flags[service]}
    if foreign := sorted({flag for given in flags.values() for flag in given} - taken):
        raise CliError(f"--tier-settings {name}: {', '.join(foreign)} is no setting of instances", caller=True)
    return {service: flags[service] for service in _INSTANCES}


# --- engines that sleep --------------------------------------------------------------------------------------------------


def sleeping(tiers: Tiers, options: Flags, given: Flags, folder: Path) -> tuple[Tiers, Flags]:
    """Tiers and flags of services in which engines that sleep do so at the speed of their tier. Profiles are written below ``folder``.

    ``options`` are all flags, ``given`` those of the caller. Without engines that sleep, and where all speeds are 1, nothing changes.
    Raises CliError.
    """
    delays = next((flag.removeprefix(_DELAY) for flag in reversed(options["text"]) if flag.startswith(_DELAY)), None)
    faster = {kind: plan for kind, plan in tiers.items() if plan.tier.speed != 1.0}
    if delays is None or not faster:
        return tiers, options
    if any(flag.startswith(_PROFILES) for service in ("router", "pool_manager") for flag in given[service]):
        raise CliError(
            "--profiles: those of tiers follow from --delay-profile and their speeds, leave it out", caller=True
        )
    try:
        profiles = [the_profile(Path(delays), part) for part in ModelPart]
        _write(profiles, folder)
        slept = {}
        for kind, plan in tiers.items():
            scaled = [profile.faster(plan.tier.speed, hardware=_hardware(profile, plan.tier)) for profile in profiles]
            _write(scaled, folder)
            _write(scaled, folder / plan.tier.name)
            delay = (f"{_DELAY}{folder / plan.tier.name}",)
            flags = {service: (*delay, *plan.flags.get(service, ())) for service in _INSTANCES}
            slept[kind] = replace(plan, flags=flags)
    except BadProfile as error:
        raise CliError(f"--delay-profile {delays}: {error}", caller=True) from None
    except OSError as error:
        raise CliError(f"cannot write {error.filename}: {error.strerror}", caller=True) from None
    known = (f"{_PROFILES}{folder}",)
    of_services = {service: (*options[service], *known) for service in ("router", "pool_manager")}
    return slept, {**options, **of_services}


def _hardware(profile: Profile, tier: Tier) -> str:
    """The hardware by which costs of a tier are found."""
    return (
        profile.identity.hardware if tier.speed == 1.0 else f"{tier.name} {profile.identity.hardware}"[:_MAX_HARDWARE]
    )


def _write(profiles: Sequence[Profile], folder: Path) -> None:
    """Raises OSError."""
    for profile in profiles:
        write_profile(folder / profile.file_name, profile)


# --- checks --------------------------------------------------------------------------------------------------------------


def check_tiers(tiers: Tiers, sizes: Mapping[Kind, int], options: Flags, model: Path, *, switch_roles: bool) -> None:
    """Raises CliError if an instance could not have its tier's settings or GPUs."""
    if tiers and switch_roles:
        raise CliError("--switch-roles: instances of tiers keep their roles; leave one of both out", caller=True)
    for kind, plan in tiers.items():
        if plan.gpus and sizes[kind] > len(plan.gpus):
            text = f"--roles {kind}:{sizes[kind]}: --tier {plan.tier.name} has GPUs for {len(plan.gpus)}"
            raise CliError(text, caller=True)
        service = "encoder" if kind.role is Role.E else "text"
        role = () if service == "encoder" else (f"--role={kind.role.value}",)
        loaded(service, (f"--model={model}", *role, *options[service], *plan.of(service)))


def with_gpu_bounds(tiers: Tiers, options: Flags) -> Flags:
    """The flags of services with a largest size for each tier that has GPUs for so many instances, where none is given."""
    manager: PoolManagerSettings = loaded("pool_manager", options["pool_manager"])
    known = manager.control.pool_sizes
    named = {entry.rpartition("=")[0].rpartition("/")[2] for entry in known}
    bounds = [
        f"{kind}={min(1, manager.control.min_instances)}-{len(plan.gpus)}"
        for kind, plan in tiers.items()
        if plan.gpus and not named & {str(kind), kind.role.value}
    ]
    if not bounds:
        return options
    return {**options, "pool_manager": (*options["pool_manager"], f"--pool-sizes={','.join((*known, *bounds))}")}
